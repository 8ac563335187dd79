"""What the FSDP trainer has on a GPU.

One rank in bfloat16 computes with copies of float32 masters and adds gradients in float32 (`fsdp.masters`); several
ranks have float32 shards of parameters, gradients and moments, and gather a layer at a time (`fsdp.shards`). With
adapters the base is there once, in the dtype of compute or quantised, and what learns is float32 (`lora.layers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime_core.config.sections.train import FEW_TOKENS
from slime_core.lora.spec import LoraSpec
from slime_core.planning.activations import Form, TokenCosts, head_bytes, spread_of
from slime_core.planning.batch import BatchPlan
from slime_core.planning.footprint import Moment, Subject, TrainerFootprint

if TYPE_CHECKING:
    from slime_core.planning.sizes import ModelSizes, Weight

MOST_TOKENS = 32768  # of a micro-batch: more do not make a GPU faster
ALIGNED = 64  # numbers, see `fsdp.masters`
WINDOW, WINDOWS = 256 << 20, 3  # see `fsdp.places`: one at work, two on their way back
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "paged_adamw_8bit": 2 + 8 / 256}
"""Bytes a parameter of both moments; of 8 bits, blocks of 256 numbers have a float32 scale each."""


def micro_batch_tokens(sizes: ModelSizes, memory: int, *, fused: bool, ranks: int = 1) -> int:
    """Tokens whose activations take about a sixth of ``memory`` bytes, in half precision, from 4,096 to 32,768.

    A layer keeps some four rows of its width and three of its MLP's a token; one that is not ``fused`` twice that.

    Args:
        sizes: of the model; its weights are not looked at
        memory: of the GPU; 0 is a processor
        ranks: that share each layer
    """
    layer = sizes.layer
    a_token = 2 * sizes.layers * (4 * layer.hidden + 3 * layer.inner) * (1 if fused else 2) // ranks
    return max(FEW_TOKENS, min(MOST_TOKENS, memory // 6 // a_token // 1024 * 1024))


def copies_bytes(sizes: ModelSizes) -> int:
    """Bytes of all weights in bfloat16, each at a multiple of 64 numbers."""
    return sum(2 * -(-weight.count // ALIGNED) * ALIGNED for weight in sizes.weights)


def stored_bytes(sizes: ModelSizes, train: Any, itemsize: int) -> float | None:
    """Bytes a number of a base in few bits, with its scales, see `kernels.quantised`; None of floats."""
    packed = bool((sizes.config.quantization_config or {}).get("load_in_4bit"))  # scales of a folder may be float32
    return {"nf4": 0.5 + (4 if packed else itemsize) / 64, "fp8": 1 + 4 / 128}.get(train.base_weights)


def quantised_weights(sizes: ModelSizes) -> list[Weight]:
    """Weights of a base that may have few bits: linear layers and experts."""
    return [w for w in sizes.weights if w.layer >= 0 and (w.linear or w.kind == "experts")]


def quantised_numbers(sizes: ModelSizes) -> int:
    """How many numbers these weights have."""
    return sum(weight.count for weight in quantised_weights(sizes))


def published_bytes(sizes: ModelSizes, train: Any, itemsize: int) -> int:
    """Bytes of a weight update: all weights, or adapters alone, in float32."""
    spec = LoraSpec.of(train)
    if spec is not None and train.lora_sync == "adapter":
        return 4 * max(1, len(train.lora_adapters)) * sizes.adapter_numbers(spec)
    return itemsize * sizes.parameters


def loading(sizes: ModelSizes, itemsize: int) -> int:
    """Bytes of main memory that a rank takes at most while it loads a model for a GPU: its largest tensor.

    It is there as it was read, in 16 bits, and in ``itemsize`` bytes a number where that is another form. Every other
    tensor has gone to the device; what has few bits is rounded there.
    """
    return (itemsize + (2 if itemsize != 2 else 0)) * max(weight.count for weight in sizes.weights)


def gathered_layer(sizes: ModelSizes, train: Any, itemsize: int) -> int:
    """Bytes of the largest layer on a rank that has gathered it: a quantised base as it is stored, and adapters."""
    spec, stored = LoraSpec.of(train), stored_bytes(sizes, train, itemsize) or itemsize
    adapted = {weight.name for weight in sizes.adapted(spec)} if spec is not None else set()
    by_layer: dict[int, float] = {}
    for weight in sizes.weights:
        size = (stored if weight.linear or weight.kind == "experts" else itemsize) * weight.count
        if spec is not None and weight.name in adapted:
            size += itemsize * max(1, len(train.lora_adapters)) * spec.numbers(weight.shape, linear=weight.linear)
        by_layer[weight.layer] = by_layer.get(weight.layer, 0.0) + size
    return int(max((size for layer, size in by_layer.items() if layer >= 0), default=0))


def footprint(subject: Subject) -> TrainerFootprint:
    """See `TrainerFootprint`."""
    return _Fsdp(subject).footprint()


class _Fsdp:
    """One rank's bytes."""

    def __init__(self, subject: Subject) -> None:
        config, sizes, gpu = subject.config, subject.sizes, subject.gpu
        self.subject, self.train, self.sizes, self.gpu = subject, config.train, sizes, gpu
        train = config.train
        self.context, self.tensor = train.context_parallel_size, train.tensor_parallel_size
        self.shards = train.fsdp_shard_size or subject.ranks
        self.alone = subject.ranks == 1
        self.has_masters = self.alone and subject.half
        self.spec = LoraSpec.of(train)
        self.teacher = subject.teacher if "teacher" in subject.needs else None
        self.fused = sizes.fused and self.context * self.tensor == 1 and not train.true_on_policy_mode
        plain = self.spec is None or not (self.spec.dropout or self.spec.use_dora)
        self.fused = self.fused and plain
        memory = 0 if gpu.processor else gpu.memory
        self.memory = memory
        most = int(train.max_tokens_per_gpu or micro_batch_tokens(sizes, memory, fused=self.fused))
        self.tokens = max(most, -(-subject.lengths.longest // self.context))
        data, batch = subject.ranks // (self.context * self.tensor), BatchPlan.of(config, subject.lengths)
        samples = config.rollout.n_samples_per_prompt
        pack = batch.pack(self.tokens * self.context, data, subject.lengths, samples)
        self.pack = -(-pack.tokens // self.context)
        self.rows = -(-pack.rows // self.context)
        self.several = batch.micro_batches(self.tokens * self.context, data) > 1
        self.recomputed = min(train.gradient_checkpointing_layers or sizes.layers, sizes.layers)
        self.recomputed = self.recomputed if train.gradient_checkpointing else 0
        self.parameters = -(-sizes.parameters // self.shards)
        self.tower = sizes.tower
        frozen = self.tower.numbers if self.tower is not None and train.freeze_vision_tower else 0
        self.learning = self.active = -(-(sizes.parameters - frozen) // self.shards)
        self.patches = self.tower.patches * (pack.tokens - pack.rows) if self.tower is not None else 0
        if self.spec is not None:
            self.active = -(-sizes.adapter_numbers(self.spec) // self.shards)
            self.learning = self.active * max(1, len(train.lora_adapters))
        self.has_masters = self.has_masters and self.spec is None

    def footprint(self) -> TrainerFootprint:
        layout = {"data parallel": self.subject.ranks // (self.context * self.tensor), "shards": self.shards}
        layout |= {"context parallel": self.context, "tensor parallel": self.tensor}
        on_host = self.train.fsdp_cpu_offload
        weights = self.parameters if self.spec is None else self.learning
        offloaded = int(self._moment_bytes()) + (4 * weights if self.has_masters or not self.alone else 0)
        offloaded += 4 * self.learning if not self.alone else 0
        inputs = self.recomputed * self.pack * self.sizes.layer.hidden * self.subject.itemsize
        host = {"optimizer": offloaded if on_host else 0}
        host["activations"] = inputs if self.train.activation_offload else 0
        host["loading"] = (
            0 if self.gpu.processor else loading(self.sizes, 4 if self.spec is None else self.subject.itemsize)
        )
        return TrainerFootprint(
            moments=tuple(self._moments()),
            resident=self._weights(),
            tokens=self.tokens,
            data=layout["data parallel"],
            sequence=self.context * self.tensor,
            layout={name: size for name, size in layout.items() if size > 1},
            recomputed=self.recomputed / self.sizes.layers,
            host={name: size for name, size in host.items() if size},
            moved=2 * offloaded if on_host else 0,
            publish=published_bytes(self.sizes, self.train, self.subject.itemsize),
            live=self.alone,
            exact=self.sizes.exact and self.fused and not self.gpu.processor,
        )

    def _base(self) -> int:
        """Bytes of a frozen base: linear layers and experts may be quantised."""
        stored = stored_bytes(self.sizes, self.train, self.subject.itemsize)
        if stored is None:
            return self.subject.itemsize * self.parameters
        inside = quantised_numbers(self.sizes)
        return int((stored * inside + self.subject.itemsize * (self.sizes.parameters - inside)) / self.shards)

    def _weights(self) -> dict[str, int]:
        """Of the policy and of models that do not learn, at any time."""
        on_host, count, itemsize = self.train.fsdp_cpu_offload, self.parameters, self.subject.itemsize
        teacher = {"teacher": -(-itemsize * self.teacher.parameters // self.shards)} if self.teacher else {}
        if self.spec is not None:
            adapters = 0 if on_host and not self.alone else 4 * self.learning
            return {"base": self._base(), "adapters": adapters, **teacher}
        if self.has_masters:
            weights = {"parameters": copies_bytes(self.sizes), "masters": 0 if on_host else 4 * count}
        else:
            weights = {"parameters": 0 if on_host and not self.alone else 4 * count}
        if "reference" in self.subject.needs:
            weights["reference"] = 0 if on_host else 4 * count
        if "values" in self.subject.needs:
            weights["critic"] = sum(weights.values()) - weights.get("reference", 0)
        return {name: size for name, size in (weights | teacher).items() if size}

    def _moment_bytes(self) -> float:
        return MOMENTS[self.train.optimizer] * self.learning

    def _optimizer(self) -> dict[str, int]:
        """Moments on the device; the driver moves paged ones away where it is full."""
        learners = 2 if "values" in self.subject.needs else 1
        away = self.train.fsdp_cpu_offload or self.train.optimizer.startswith("paged")
        return {} if away else {"optimizer": int(self._moment_bytes() * learners)}

    def _gathered(self, teacher: ModelSizes | None = None) -> int:
        """Whole weights: what lies outside of layers, a layer and the next one, each as it came and as it computes."""
        if self.alone:
            return 0
        if teacher is not None:
            return self.subject.itemsize * (teacher.outside() + 2 * 2 * teacher.largest_layer)
        layer = gathered_layer(self.sizes, self.train, self.subject.itemsize)
        outside = self.sizes.outside() - (self.tower.inside if self.tower is not None else 0)
        return self.subject.itemsize * outside + 2 * 2 * layer // self.tensor

    def _moments(self) -> Iterator[Moment]:
        weights, optimizer = self._weights(), self._optimizer()
        state = weights | optimizer
        gathered = {"gathered layers": self._gathered()} if not self.alone else {}
        yield Moment("rollout", state)
        scored, trained = ({"pictures": self._pictures(trains=trains)} for trains in (False, True))
        for moment in self._seeing():
            yield moment.with_(state | gathered)
        yield self._score(self.sizes).with_(state | gathered | scored)
        if self.teacher is not None:
            layers = {"gathered layers": self._gathered(self.teacher)}
            yield self._score(self.teacher).with_(state | layers | scored)
        for moment in self._train():
            yield moment.with_(state | gathered | trained)
        windows = {}
        if self.train.fsdp_cpu_offload and not self.gpu.processor:
            windows = {"optimizer windows": min(3 * WINDOW * WINDOWS, 12 * self.learning)}
        yield Moment("update", {**state, **self._gradients(), **windows})
        yield Moment("sync", state)

    def _pictures(self, *, trains: bool) -> int:
        """Bytes of a pack's pictures while the text model passes; a tower that learns has kept its own activations.

        Each token of a prompt counts as a picture's.
        """
        if self.tower is None:
            return 0
        learns = trains and self.spec is None and not self.train.freeze_vision_tower
        size = self.subject.itemsize
        saved = self.tower.saved(size) if learns else 0.0
        return int(self.patches * (saved + self.tower.resting(self.sizes.layer.hidden, size)))

    def _seeing(self) -> Iterator[Moment]:
        """While the tower passes, forward and backward: nothing of the text model's layers is there."""
        if self.tower is not None:
            passing = int(self.patches * self.tower.passing(self.subject.itemsize))
            yield Moment("score", {"pictures": self._pictures(trains=False) + passing})
            yield Moment("train", {**self._gradients(), "pictures": self._pictures(trains=True) + 2 * passing})

    def _score(self, sizes: ModelSizes) -> Moment:
        """Of the policy's or the teacher's pass."""
        passing = self.pack * (self._costs(sizes).forward + 2 * sizes.layer.hidden * self.subject.itemsize)
        block, _ = self._head(self.rows, sizes)
        swaps = sizes is self.sizes and "reference" in self._weights() and not self.has_masters
        copies = {"policy's copy": 4 * self.parameters} if swaps else {}  # while the reference's weights are in place
        return Moment("score", {**copies, "activations": int(passing), "logits": block})

    def _costs(self, sizes: ModelSizes | None = None) -> TokenCosts:
        lengths, samples = self.subject.lengths, self.subject.config.rollout.n_samples_per_prompt
        spread = spread_of(lengths.prompt, lengths.response, samples, self.tokens * self.context)
        form: Form = "fused" if self.fused else "plain" if self.spec is None else "adapters"
        layer = (sizes or self.sizes).layer
        rank = self.spec.rank if self.spec is not None else 0
        return TokenCosts.of(layer, form, itemsize=self.subject.itemsize, tensor=self.tensor, spread=spread, rank=rank)

    def _head(self, rows: int, sizes: ModelSizes | None = None) -> tuple[int, int]:
        sizes, chunk = sizes or self.sizes, self.train.logprob_chunk_tokens
        return head_bytes(
            rows,
            sizes.layer.hidden,
            sizes.vocab,
            self.subject.itemsize,
            self.memory,
            chunk,
            frozen=self.spec is not None,
        )

    def _gradients(self, count: int | None = None) -> dict[str, int]:
        """Sums of gradients on the device, of all parameters or of ``count``; with several ranks the host has them."""
        if self.train.fsdp_cpu_offload and not self.alone:
            return {}
        return {"gradients": 4 * (self.active if count is None else min(count, self.active))}

    def _train(self) -> Iterator[Moment]:
        """Where memory may be fullest: at the loss, in the last layer's backward pass, and in the first layer's.

        Before the second micro-batch of an optimizer step there are no gradients at the loss.
        """
        sizes, tokens, size = self.sizes, self.pack, self.subject.itemsize
        hidden, costs, several = sizes.layer.hidden, self._costs(), self.several
        stored = sizes.layers - self.recomputed
        inputs = 0.0 if self.train.activation_offload else costs.input
        saved = stored * costs.saved + self.recomputed * inputs
        last_norm = hidden * (4 + 2 * size)
        block, matrix = self._head(self.rows)
        loss = {"activations": int(tokens * (saved + last_norm)), "logits": block + matrix}
        yield Moment("train", {**self._gradients(None if several else 0), **loss})
        again = costs.saved if self.recomputed else 0.0  # of the first layers, which are recomputed first
        last = saved + costs.backward + (again if not stored else 0.0)
        first = again + (inputs if self.recomputed else costs.saved) + costs.backward
        output = 0 if self.spec else size * sizes.vocab * hidden  # gradient, until that of the embedding is there
        gradients = {"logits": output, "layer gradients": self._layer_gradients()}
        passing = {"activations": int(tokens * last)} | gradients
        yield Moment("train", {**self._gradients(None if several else sizes.outside("head")), **passing})
        if not several:
            done = -(-(sizes.parameters - sizes.outside("embedding")) // self.shards)
            yield Moment("train", {**self._gradients(done), **passing, "activations": int(tokens * first)})

    def _layer_gradients(self) -> int:
        """Gradients of a layer before they are added up, or sent to other ranks; floats of two quantised matrices."""
        if self.spec is not None:
            quantised = self.train.base_weights != "auto"
            return 2 * 6 * max(w.count for w in self.sizes.weights if w.layer >= 0) if quantised else 0
        layer = self.sizes.largest_layer // self.tensor
        if not self.alone:
            return (self.subject.itemsize + 4) * layer
        return 0 if self.fused or not self.has_masters else self.subject.itemsize * layer
