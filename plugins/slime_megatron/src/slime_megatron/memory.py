"""What a Megatron rank has on its GPU: arithmetic over the layout, with no megatron-core imported.

weights in the compute dtype, float32 gradient buffers, float32 masters and moments in shares of the data-parallel
ranks; activations of as many micro-batches as a pipeline stage has under way
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_convert.bridge import Sizes
from slime_core.lora.spec import LoraSpec
from slime_core.planning.activations import TokenCosts, head_bytes, spread_of
from slime_core.planning.batch import BatchPlan, PackSize
from slime_core.planning.footprint import Moment, Subject, TrainerFootprint
from slime_core.planning.fsdp import loading, micro_batch_tokens, published_bytes, quantised_weights, stored_bytes
from slime_core.planning.vision import VisionSizes
from slime_megatron.layout import Layout, check
from slime_megatron.settings import VOCABULARY_MULTIPLE

if TYPE_CHECKING:
    from slime_core.planning.sizes import ModelSizes

DENSE, STATE = 4, 12  # bytes a parameter: gradient; master and two moments
LAUNCH = 5e-3  # seconds a layer and micro-batch, both passes: its operations are called one by one
WHOLE = ("norm", "router")  # kinds that tensor-parallel ranks have whole


def footprint(subject: Subject) -> TrainerFootprint:
    """See `TrainerFootprint`.

    Raises:
        ConfigError: a layout of sizes below 1, whose flags disagree, or by which ranks or model do not divide.
    """
    table = {name.replace("-", "_"): value for name, value in subject.config.table("megatron").items()}
    if subject.config.train.context_parallel_size > 1:
        table.setdefault("context_parallel_size", subject.config.train.context_parallel_size)
    layout = Layout.of(table, subject.ranks, subject.sizes.layers)
    check(layout, _sizes(subject.sizes), _fields(subject.sizes), sequence_parallel=_shares_rows(table, layout))
    return max((_Stage(subject, table, layout, number) for number in {0, layout.pp - 1}), key=_largest).footprint()


def _shares_rows(table: Mapping[str, Any], layout: Layout) -> bool:
    """Whether tensor-parallel ranks share the rows between products, too."""
    return layout.tp > 1 and table.get("sequence_parallel") is not False


def _sizes(sizes: ModelSizes) -> Sizes:
    layer, kinds = sizes.layer, sizes.text.layer_types or ()
    return Sizes(
        layers=sizes.layers,
        hidden=layer.hidden,
        heads=layer.heads,
        groups=layer.kv_heads,
        head_dim=layer.head,
        vocab=sizes.vocab,
        padded_vocab=sizes.vocab,
        experts=layer.experts,
        moe_layers=frozenset(weight.layer for weight in sizes.weights if weight.kind == "experts"),
        linear_layers=frozenset(n for n, kind in enumerate(kinds) if kind == "linear_attention"),
        tied=sizes.tied,
    )


def _fields(sizes: ModelSizes) -> dict[str, Any]:
    """Widths that the layout is held against, by megatron-core's names."""
    text = sizes.text
    return {
        "multi_latent_attention": bool(text.kv_lora_rank),
        "ffn_hidden_size": text.intermediate_size,
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": text.shared_expert_intermediate_size,
        "linear_num_key_heads": text.linear_num_key_heads,
    }


def _largest(stage: _Stage) -> int:
    return max(moment.total for moment in stage.moments())


@dataclass(slots=True, frozen=True)
class _Stage:
    """One pipeline stage's rank."""

    subject: Subject
    table: Mapping[str, Any]
    layout: Layout
    number: int

    def footprint(self) -> TrainerFootprint:
        layout, host, subject = self.layout, self._offloaded(), self.subject
        read = 0 if subject.gpu.processor else loading(subject.sizes, subject.itemsize)
        of_host = {"optimizer": host, "loading": read}
        sizes = {"data parallel": layout.dp, "tensor parallel": layout.tp, "pipeline": layout.pp}
        sizes |= {"context parallel": layout.cp, "expert parallel": layout.ep}
        return TrainerFootprint(
            moments=tuple(self.moments()),
            resident=self._weights() | self._gradients(),
            tokens=self.tokens,
            data=layout.dp,
            sequence=layout.cp * layout.tp,
            pipeline=layout.pp,
            layout={name: size for name, size in sizes.items() if size > 1},
            recomputed=self._recomputed() / max(1, self._layers()),
            host={name: size for name, size in of_host.items() if size},
            moved=2 * host,
            launch=LAUNCH,
            publish=published_bytes(self.subject.sizes, self.subject.config.train, self.subject.itemsize),
            exact=self.subject.sizes.exact and not self.subject.sizes.layer.experts and self._spec is None,
        )

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one GPU."""
        gpu, sizes = self.subject.gpu, self.subject.sizes
        memory = 0 if gpu.processor else gpu.memory
        most = int(
            self.subject.config.train.max_tokens_per_gpu
            or micro_batch_tokens(sizes, memory, fused=False, ranks=self.layout.tp)
        )
        return max(most, -(-self.subject.lengths.longest // self.layout.cp))

    @property
    def _pack(self) -> PackSize:
        """Of the largest micro-batch, this rank's part."""
        layout, lengths, rollout = self.layout, self.subject.lengths, self.subject.config.rollout
        batch = BatchPlan.of(self.subject.config, lengths)
        whole = batch.pack(self.tokens * layout.cp, layout.dp, lengths, rollout.n_samples_per_prompt)
        return PackSize(-(-whole.tokens // layout.cp), -(-whole.rows // layout.cp))

    def moments(self) -> Iterator[Moment]:
        """Of all phases."""
        state = self._weights() | self._gradients() | self._optimizer()
        yield Moment("rollout", state)
        yield from (Moment(phase, state) for phase in ("update", "sync"))  # type: ignore[arg-type]
        scored, trained, passing = self._pictures()
        yield Moment("score", {**state, "pictures": scored + passing})
        yield Moment("train", {**state, "pictures": trained + 2 * passing})
        costs, tokens, sizes = self._costs(), self._pack.tokens, self.subject.sizes
        block, matrix = self._head()
        copies = {"reference": 2 * state["reference"]} if "reference" in state else {}
        passing = int(tokens * (costs.forward + 2 * sizes.layer.hidden * self.subject.itemsize))
        yield Moment("score", {**state, **copies, "activations": passing, "logits": block, "pictures": scored})
        recomputed, layers = self._recomputed(), self._layers()
        saved = (layers - recomputed) * costs.saved + recomputed * costs.input
        under_way = self._under_way()
        activations = int(tokens * (saved * under_way + sizes.layer.hidden * (4 + 2 * self.subject.itemsize)))
        state = {**state, "pictures": trained, "gradients": state["gradients"] + self._dequantised()}
        yield Moment("train", {**state, "activations": activations, "logits": block + matrix})
        last = costs.backward + (costs.saved if recomputed and recomputed == layers else 0.0)
        output = self.subject.itemsize * self._vocabulary() * sizes.layer.hidden if self._is_last() else 0
        yield Moment("train", {**state, "activations": int(activations + tokens * last), "logits": output})

    @property
    def _tower(self) -> VisionSizes | None:
        """On the ranks of the first stage, whole."""
        return self.subject.sizes.tower if self.number == 0 else None

    @property
    def _learns_to_see(self) -> bool:
        return self._spec is None and not self.subject.config.train.freeze_vision_tower

    def _pictures(self) -> tuple[int, int, int]:
        """Bytes of a micro-batch's pictures, with what a tower that learns keeps, and of the tower's pass."""
        if self._tower is None:
            return 0, 0, 0
        size, pack = self.subject.itemsize, self._pack
        patches = self._tower.patches * (pack.tokens - pack.rows)
        resting = self._tower.resting(self.subject.sizes.layer.hidden, size)
        saved = self._tower.saved(size) if self._learns_to_see else 0.0
        return int(patches * resting), int(patches * (resting + saved)), int(patches * self._tower.passing(size))

    def _layers(self) -> int:
        return self.layout.stages(self.subject.sizes.layers)[self.number]

    def _is_last(self) -> bool:
        return self.number == self.layout.pp - 1

    def _vocabulary(self) -> int:
        """Rows of the output matrix on this rank."""
        multiple = int(self.table.get("make_vocab_size_divisible_by", VOCABULARY_MULTIPLE)) * self.layout.tp
        return -(-self.subject.sizes.vocab // multiple) * multiple // self.layout.tp

    def _counts(self) -> tuple[int, int]:
        """Parameters on this rank: dense ones, and those of experts."""
        sizes, layout = self.subject.sizes, self.layout
        of_stage = self._layers() / sizes.layers
        inside = [weight for weight in sizes.weights if weight.layer >= 0]
        experts = sum(w.count for w in inside if w.kind == "experts") * of_stage / (layout.ep * layout.etp)
        dense = sum(w.count / (1 if w.kind in WHOLE else layout.tp) for w in inside if w.kind != "experts") * of_stage
        matrices = int(self.number == 0) + int(self._is_last() and not (sizes.tied and layout.pp == 1))
        dense += self._tower.numbers if self._tower is not None and self._learns_to_see else 0
        dense += matrices * self._vocabulary() * sizes.layer.hidden + (sizes.layer.hidden if self._is_last() else 0)
        return int(dense), int(experts)

    @property
    def _spec(self) -> LoraSpec | None:
        return LoraSpec.of(self.subject.config.train)

    def _adapters(self) -> int:
        """Numbers of all adapters on this rank at most: a part of each is the same on tensor-parallel ranks."""
        assert self._spec is not None
        count = max(1, len(self.subject.config.train.lora_adapters))
        return count * self.subject.sizes.adapter_numbers(self._spec) * self._layers() // self.subject.sizes.layers

    def _few_bits(self) -> list[float]:
        """Numbers of each weight that a base in 4 or 8 bits has so, on a rank; of all stages."""
        sizes, train = self.subject.sizes, self.subject.config.train
        ranks = {True: self.layout.ep * self.layout.etp, False: self.layout.tp}
        weights = quantised_weights(sizes) if train.base_weights != "auto" else ()
        return [weight.count / ranks[weight.kind == "experts"] for weight in weights]

    def _saved(self) -> int:
        """Bytes that a base in 4 or 8 bits does without."""
        sizes, itemsize = self.subject.sizes, self.subject.itemsize
        stored = stored_bytes(sizes, self.subject.config.train, itemsize) or itemsize
        return int((itemsize - stored) * sum(self._few_bits()) * self._layers() / sizes.layers)

    def _dequantised(self) -> int:
        """Bytes of the largest layer's weights as the floats of a product: two of transformers', or a stack twice."""
        return int(2 * self.subject.itemsize * max(self._few_bits(), default=0))

    def _weights(self) -> dict[str, int]:
        count, frozen = sum(self._counts()), self._teacher()
        if self._tower is not None and not self._learns_to_see:
            frozen["vision tower"] = self.subject.itemsize * self._tower.numbers
        if self._spec is not None:
            base = self.subject.itemsize * count - self._saved()
            return {"base": base, "adapters": 4 * self._adapters(), **frozen}
        weights = {"parameters": self.subject.itemsize * count, **frozen}
        if "reference" in self.subject.needs:
            weights["reference"] = self.subject.itemsize * count
        if "values" in self.subject.needs:
            weights["critic"] = (self.subject.itemsize + DENSE) * count + self._state()
        return weights

    def _teacher(self) -> dict[str, int]:
        """A teacher's weights, divided as the policy's are."""
        if self.subject.teacher is None or "teacher" not in self.subject.needs:
            return {}
        other = replace(self, subject=replace(self.subject, sizes=self.subject.teacher))
        return {"teacher": self.subject.itemsize * sum(other._counts())}

    def _gradients(self) -> dict[str, int]:
        """Buffers that are there at all times."""
        return {"gradients": DENSE * (sum(self._counts()) if self._spec is None else self._adapters())}

    def _state(self) -> int:
        """Masters and moments; in float32 a parameter is its own master, as adapters are."""
        if self._spec is not None:
            return (STATE - 4) * self._adapters() // (self.layout.dp * self.layout.cp)
        (dense, experts), layout = self._counts(), self.layout
        a_parameter = STATE if self.subject.half else STATE - 4
        if not self.table.get("use_distributed_optimizer", True):
            return a_parameter * (dense + experts)
        return int(a_parameter * (dense / (layout.dp * layout.cp) + experts / layout.edp))

    def _offloaded(self) -> int:
        if not self.table.get("optimizer_cpu_offload"):
            return 0
        return int(self._state() * float(self.table.get("optimizer_offload_fraction", 1.0)))

    def _optimizer(self) -> dict[str, int]:
        state = self._state() - self._offloaded()
        return {"optimizer": state} if state else {}

    def _costs(self) -> TokenCosts:
        lengths, rollout, layout = self.subject.lengths, self.subject.config.rollout, self.layout
        tokens = self.tokens * layout.cp
        shared = _shares_rows(self.table, layout)
        return TokenCosts.of(
            self.subject.sizes.layer,
            "megatron",
            itemsize=self.subject.itemsize,
            tensor=layout.tp,
            sequence_parallel=shared,
            spread=spread_of(lengths.prompt, lengths.response, rollout.n_samples_per_prompt, tokens),
        )

    def _head(self) -> tuple[int, int]:
        if not self._is_last():
            return 0, 0
        memory = 0 if self.subject.gpu.processor else self.subject.gpu.memory
        chunk, hidden = self.subject.config.train.logprob_chunk_tokens, self.subject.sizes.layer.hidden
        size, frozen = self.subject.itemsize, self._spec is not None
        return head_bytes(self._pack.rows, hidden, self._vocabulary(), size, memory, chunk, frozen=frozen)

    def _recomputed(self) -> int:
        """Layers of the stage whose forward pass is made again."""
        train, layers = self.subject.config.train, self._layers()
        granularity = self.table.get("recompute_granularity", "full" if train.gradient_checkpointing else None)
        if granularity != "full":
            return 0
        some = train.gradient_checkpointing_layers or layers
        if self.table.get("recompute_method") == "block":
            some = int(self.table.get("recompute_num_layers", some))
        return min(some, layers)

    def _under_way(self) -> float:
        """Micro-batches whose activations a stage has, in times of all its layers."""
        layout, batch = self.layout, BatchPlan.of(self.subject.config, self.subject.lengths)
        micros = batch.micro_batches(self.tokens * layout.cp, layout.dp)
        if layout.pp == 1:
            return 1.0
        if layout.vp == 1:
            return float(min(micros, layout.pp - self.number))
        chunks = min(micros * layout.vp, 2 * (layout.pp - self.number - 1) + (layout.vp - 1) * layout.pp + 1)
        return chunks / layout.vp
