"""A causal language model, sharded by FSDP2: its log-probs and entropies of packs of tokens, and its AdamW.

What a model can do is tried when it is built, on a few tokens: whether packed sequences give what single ones give,
and whether its logits are its output matrix times its last hidden state. Where not, one sequence a row is used, or
the model's own logits. Then it is sharded over data-parallel ranks; one rank holds it whole, without FSDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from slime_core.algorithms.shared.logprobs import BlockLoss, linear_log_probs, linear_loss, logits_log_probs
from slime_core.errors import TrainerError
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.trainers.compiling import Choice, Compiled, pays
from slime_core.trainers.expert_load import ExpertLoad
from slime_core.trainers.fingerprint import all_sums, digest
from slime_core.trainers.fsdp.adamw import AdamW, clip_scale, global_norm
from slime_core.trainers.fsdp.adamw_8bit import optimizer_of
from slime_core.trainers.fsdp.adapters import MergedWeights, trial_values
from slime_core.trainers.fsdp.attention import PackSegments, take
from slime_core.trainers.fsdp.blocks import layers, text_of, tower_layers
from slime_core.trainers.fsdp.exact import ExactPass
from slime_core.trainers.fsdp.experts import router_biases, use_kernels
from slime_core.trainers.fsdp.fused import fuse
from slime_core.trainers.fsdp.fused_adapters import AdaptedPass
from slime_core.trainers.fsdp.fused_adapters_cuda import AdaptedGpuPass
from slime_core.trainers.fsdp.fused_cuda import GpuPass
from slime_core.trainers.fsdp.host_inputs import HostInputs
from slime_core.trainers.fsdp.masters import Masters
from slime_core.trainers.fsdp.packs import RankPack, ResponseTokens
from slime_core.trainers.fsdp.places import DevicePlace, HostPlace
from slime_core.trainers.fsdp.ranks import FsdpRanks, check_packs
from slime_core.trainers.fsdp.shards import copy_of, local, own_runs, shard_modules
from slime_core.trainers.fsdp.tensor_parallel import split_products
from slime_core.trainers.fsdp.trial import PolicyTrial, close, close_in_half, picture_logits
from slime_core.trainers.optimizer_step import LossSums, MicroBatchLoss, Schedule
from slime_core.trainers.vision import PackPixels, tower_of
from slime_core.weights.routers import Routers

if TYPE_CHECKING:
    from slime_core.lora.layers import Adapters
    from slime_core.protocols import Loss
    from slime_core.types import MicroBatch

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


class FsdpPolicy(nn.Module):
    """The root module that is sharded; ``hf`` is the transformers model."""

    def __init__(self, hf: Any, *, chunk: int, adapters: Adapters | None = None) -> None:
        super().__init__()
        self.hf, self.adapters = hf, adapters
        self.device = next(hf.parameters()).device  # that computes
        self.chunk = chunk
        self.masters: Masters | None = None  # of one rank in half precision
        self.place = DevicePlace()  # of masters and moments
        self.packs = False
        self.linear_head = False
        self.recompute = 0  # gradient checkpointing: of so many layers
        self.host_inputs: HostInputs | None = None  # where their inputs wait, if not on the device
        self.fused = False
        self.compiled = False
        self.exact: ExactPass | None = None
        self.ranks: FsdpRanks | None = None  # that share its packs
        self.lane_copies: frozenset[str] = frozenset()  # parameters that all ranks of a layer's products have
        self.expert_load = ExpertLoad()
        self.routers: Routers | None = None  # where a run replays their choices
        self.tower = tower_of(hf)
        self._compiled: dict[Callable[..., Any], Compiled] = {}
        if next(hf.parameters()).is_cuda:
            use_kernels(hf)
        for number, layer in enumerate(layers(hf)):
            self._choose_forward(layer, number)
        for layer in tower_layers(hf):
            self._choose_forward(layer, 0, compiles=False)

    def freeze(self, train: Any) -> None:
        """Follow ``train.freeze_vision_tower``; before the model is sharded."""
        if self.tower is not None and train.freeze_vision_tower:
            self.tower.freeze()

    def choose_recomputing(self, train: Any) -> None:
        """Follow the [train] section's gradient checkpointing."""
        some = train.gradient_checkpointing_layers or len(layers(self.hf))
        self.recompute = some if train.gradient_checkpointing else 0
        self.host_inputs = HostInputs(self.device) if train.activation_offload else None

    def saving(self, number: int, *inputs: torch.Tensor | None) -> AbstractContextManager[None]:
        """Around layer ``number``: its ``inputs`` wait on the host where it is recomputed and activations offload."""
        if self.host_inputs is None or number >= self.recompute:
            return nullcontext()
        return self.host_inputs.of(*inputs)

    def _fuse(self, layer: nn.Module) -> Callable[..., torch.Tensor] | None:
        """The layer's forward written out, where its shape is known."""
        adapted = AdaptedPass, AdaptedGpuPass
        return fuse(layer, self.hf.config.get_text_config(), GpuPass, adapted)

    def _choose_forward(self, layer: nn.Module, number: int, *, compiles: bool = True) -> None:
        """Let the layer's forward follow ``fused``, ``compiled`` and ``recompute``."""
        plain, fused = layer.forward, self._fuse(layer)
        function = getattr(plain, "__func__", None)  # of all layers of a class: it is compiled once for them

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.fused and fused is not None:
                return fused(*args, recompute=number < self.recompute, masters=self.masters, **kwargs)
            run: Callable[..., Any] = plain
            if self.compiled and compiles and function is not None:
                run = partial(self._compiled.setdefault(function, Compiled(function)), layer)
            if number < self.recompute and torch.is_grad_enabled():
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            return run(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.saving(number, args[0] if args else kwargs["hidden_states"]):
                return run(*args, **kwargs)

        layer.forward = forward  # type: ignore[method-assign]

    def learning(self, adapter: str = "") -> Tensors:
        """Parameters by name: of an adapter, of all adapters, or all there are, tied ones once and frozen ones too.

        They are float32 masters where there are some, or shards.
        """
        if self.adapters is not None:
            return dict[str, torch.Tensor](self.adapters.parameters(adapter or None))
        return self.base()

    def base(self) -> Tensors:
        """Parameters without adapters by name, tied ones once: masters where there are some, or shards."""
        named: Mapping[str, torch.Tensor] = self.masters.weights if self.masters else dict(self.named_parameters())
        adapters = self.adapters.parameters() if self.adapters is not None else {}
        base = {name.removeprefix("hf."): tensor for name, tensor in named.items()}
        return {name: tensor for name, tensor in base.items() if name not in adapters}

    def merged(self) -> MergedWeights:
        """Whole weights by all names that a model folder may use."""
        return MergedWeights(self.adapters, self.all_names())

    def frozen(self) -> frozenset[str]:
        """Names of parameters that do not learn."""
        named = self.named_parameters()
        return frozenset(name.removeprefix("hf.") for name, parameter in named if not parameter.requires_grad)

    def all_names(self) -> Tensors:
        """The base's by all names that a model folder may use, tied ones under each."""
        names = {id(parameter): name.removeprefix("hf.") for name, parameter in self.named_parameters()}
        named, values = self.hf.named_parameters(remove_duplicate=False), self.base()
        return {name: values[one] for name, p in named if (one := names[id(p)]) in values}

    def choose_compiling(self, choice: Choice) -> None:
        """Follow ``train.compile``; before the model is sharded."""
        parameters = list(self.hf.parameters())
        plain = not any(isinstance(parameter, QuantisedWeight) for parameter in parameters)
        self.compiled = plain and pays(choice, parameters[0].device, sum(p.numel() for p in parameters))

    def try_model(self) -> None:
        """Find out what the model can do, before it is sharded; leaves its attention as it will be used."""
        self.try_passes()
        self.try_fused()

    def try_fused(self) -> None:
        """Find out whether fused layers compute what the model's do."""
        with torch.no_grad():
            self.fused = self.packs and self._fusing_changes_nothing(PolicyTrial(self.hf))

    def try_passes(self) -> None:
        """Find out about packs, a linear head and pictures."""
        with torch.no_grad():
            trial = PolicyTrial(self.hf)
            self.linear_head = trial.linear_head()
            if self.tower is not None:
                self._try_picture()
            reason = trial.packing()
        self.packs = not reason
        if reason:
            log.warning("%s: %s; training runs one sequence a row, slower", type(self.hf).__name__, reason)

    def share_packs(self, ranks: FsdpRanks) -> None:
        """Compute each pack together with other ranks, after :meth:`try_model`.

        Raises:
            ConfigError: CFG04 a model that cannot.
        """
        check_packs(self.hf, self.packs, ranks)
        if ranks.size > 1:
            self.ranks, self.fused = ranks, False  # fused layers attend by themselves
        split_products(self.hf, ranks)

    def sum_lanes(self) -> None:
        """Complete gradients of which each rank that shares a layer's products has a part; a collective."""
        parameters = [p for name, p in self.learning().items() if name in self.lane_copies]
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        if self.ranks is not None and grads:
            total = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(total, group=self.ranks.tensor.get_group())
            for grad, part in zip(grads, total.split([grad.numel() for grad in grads])):
                grad.copy_(part.view(grad.shape))

    def copies(self) -> set[str]:
        """Parameters whose shard on this rank is a copy of another's: that one counts in sums over ranks."""
        return {name for name, p in self.learning().items() if self.copy_of(name, p)[0]}

    def copy_of(self, name: str, parameter: torch.Tensor) -> tuple[int, int]:
        """Which copy of a parameter's shard this rank has, of how many on all ranks."""
        number, count = copy_of(parameter)
        if self.ranks is not None and name in self.lane_copies:
            return number * self.ranks.lanes + self.ranks.lane, count * self.ranks.lanes
        return number, count

    def _fusing_changes_nothing(self, trial: PolicyTrial) -> bool:
        """Whether each fused layer gives its own numbers and gradients; False where none is known."""
        fusible = [layer for layer in layers(self.hf) if self._fuse(layer)]
        if not fusible:
            return False
        try:
            with trial_values(self.adapters), torch.enable_grad():
                alike = all(self._fused_alike(trial, layer) for layer in fusible)
        except Exception as error:  # of a compiler, say
            if not trial.tokens.is_cuda:
                raise
            log.warning("fused layers are left out, training is slower: %s", " ".join(str(error).split())[:300])
            return False
        finally:
            self.fused = False
        if not alike:
            log.warning("fused layers are left out, training is slower: their numbers are not the model's own")
        return alike

    def _fused_alike(self, trial: PolicyTrial, layer: nn.Module) -> bool:
        idle = self.adapters.idle() if self.adapters is not None else ()
        learning = {name: p for name, p in layer.named_parameters() if p.requires_grad and p not in idle}
        results = []
        for self.fused in (False, True):
            x, out = trial.layer(layer)
            results.append((out.detach(), *torch.autograd.grad(out.square().mean(), [x, *learning.values()])))
        pairs = list(zip(*results, strict=True))
        if next(self.hf.parameters()).dtype == torch.float32:
            return all(close(one, other) for one, other in pairs)
        # those of q and k nearly cancel in short sequences, so that rounding is as large as they are
        norms = [float(one.float().norm()) for one, _ in pairs[2:]]
        largest = max(norms, default=0.0)
        cancel = ["q_proj" in name or "k_proj" in name for name in learning]
        sizes = [largest if nearly else min(largest, 5 * norm) for nearly, norm in zip(cancel, norms, strict=True)]
        sized = zip(pairs[2:], sizes, strict=True)
        gradients = all(close_in_half(one, other, size) for (one, other), size in sized)
        return gradients and all(close_in_half(one, other) for one, other in pairs[:2])

    def _try_picture(self) -> None:
        """Compare the log-probs of a picture and text with those of transformers' own forward.

        Raises:
            TrainerError: TRN115, they differ, or the model takes its pictures in another way.
        """
        try:
            one, other = picture_logits(self)
            if self.linear_head and close(one, other):
                return
            reason = "its logits are not those of transformers' forward"
        except Exception as error:  # of a family whose modules or arguments have other names
            reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TrainerError(
            f"{type(self.hf).__name__} is not among the models of pictures that this trainer knows",
            code="TRN115",
            where="rollout.hf_checkpoint",
            why=reason,
            fix="name a model of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, SmolVLM or Idefics3",
        )

    def hidden(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        segments: PackSegments | None,
        pixels: PackPixels | None,
    ) -> torch.Tensor:
        """Last hidden states [T, hidden]; arguments as in `types.MicroBatch`, as tensors."""
        arguments: dict[str, Any] = self._arguments(position_ids, segments)
        if self.tower is None:
            arguments["input_ids"] = tokens[None]
        else:
            arguments["inputs_embeds"], options = self.tower.embeddings(tokens, pixels)
            arguments |= options
        return text_of(self.hf)(**arguments).last_hidden_state[0]  # type: ignore[no-any-return]

    def _arguments(self, position_ids: torch.Tensor, segments: PackSegments | None) -> dict[str, Any]:
        positions = position_ids[None] if position_ids.ndim == 1 else position_ids[:, None]
        return {"position_ids": positions, "use_cache": False} | ({"segments": segments} if self.packs else {})

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        segments: PackSegments,
        rows: ResponseTokens,
        loss: BlockLoss | None = None,
        pixels: PackPixels | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Log-prob of each target and entropy, both [R]; arguments as in `types.MicroBatch`, as tensors.

        With ``loss``, for models with a linear head, its sum alone, with the gradient taken in this pass.
        """
        if not self.linear_head:
            arguments = self._arguments(position_ids, segments)
            logits = self.hf(input_ids=tokens[None], **arguments, logits_to_keep=rows.predict).logits[0]
            return logits_log_probs(logits, rows.target, temperature=rows.temperature)
        head = self.hf.get_output_embeddings()
        more: dict[str, Any] = {"bias": head.bias, "temperature": rows.temperature, "chunk": self.chunk}
        if self.exact is not None:
            hidden = self.exact.hidden(tokens, position_ids, segments, rows.predict)
            more["kernels"] = self.exact.head(rows)
        else:
            hidden = take(self.hidden(tokens, position_ids, segments, pixels), rows.predict)
        if loss is not None:
            return (linear_loss(hidden, head.weight, rows.target, loss, **more),)
        return linear_log_probs(hidden, head.weight, rows.target, **more)


def forward(
    policy: FsdpPolicy, micro: MicroBatch, temperature: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Log-prob and entropy of every response token of the pack, [R], on every rank that shares it."""
    pack = RankPack(micro, device, policy.ranks)
    columns = policy(*pack.inputs, pack.response_tokens(pack.own_tokens, temperature), pixels=pack.pixels)
    return tuple(pack.spread(column) for column in columns)


def backward(
    policy: FsdpPolicy, loss: Loss, train: Any, micro: MicroBatch, temperature: torch.Tensor | None, sums: LossSums
) -> None:
    """Add the pack's share of the loss to the gradients, and its sums to ``sums``.

    Raises:
        TrainerError: a loss of another shape, or without a gradient.
    """
    pack = RankPack(micro, sums.device, policy.ranks)
    within = within_forward(policy, loss, train)
    tokens = pack.own_tokens[micro.weight[pack.own_tokens] > 0] if within else np.arange(len(micro.weight))
    loss_part = MicroBatchLoss(loss, train, micro, tokens, sums.device)
    with policy.expert_load.counting(pack.copies()):
        if within:
            (total,) = policy(*pack.inputs, pack.response_tokens(tokens, temperature), loss_part, pixels=pack.pixels)
        else:
            total = loss_part(slice(None), *forward(policy, micro, temperature, sums.device))
    total.backward()
    counted = within or pack.speaks  # within, each rank that shares the pack has its own tokens' sums
    sums.add({"loss": total, **loss_part.metric_sums}, loss_part.mark_nonfinite, counted=counted)


def within_forward(policy: FsdpPolicy, loss: Loss, train: Any) -> bool:
    """Whether the gradient of the loss is taken inside the forward pass, so that logits are made once."""
    return policy.linear_head and loss.local is not None and loss.local(train)


def shard(
    policy: FsdpPolicy,
    ranks: FsdpRanks,
    dtype: torch.dtype,
    exact: Sequence[nn.Module] = (),
    place: DevicePlace | None = None,
) -> None:
    """Shard every block and the rest, computing in ``dtype``, ``exact`` modules in the dtype they have.

    Gradients are summed in float32. One rank holds all of it, and masters where ``dtype`` is not float32. Masters and
    moments lie in ``place``; with a `HostPlace` the shards and gradients of several ranks lie in host memory too.
    """
    policy.place = place or policy.place
    if ranks.world == 1:
        half = (
            dtype != torch.float32 and policy.adapters is None
        )  # a base is in the dtype of compute, adapters float32
        policy.masters = Masters(policy, dtype, exact, policy.place) if half else None
        return
    if policy.tower is not None:
        policy.tower.sharded = True
    blocks, on_host = layers(policy.hf), isinstance(place, HostPlace)
    if ranks.lanes > 1:
        inside = {id(p) for block in blocks for p in block.parameters() if not isinstance(p, DTensor)}
        policy.lane_copies = frozenset(
            name for name, p in (policy.base() | policy.learning()).items() if id(p) in inside
        )
    towers = tower_layers(policy.hf)  # whose tables of angles stay in float32
    shard_modules(towers, ranks.weights, dtype, on_host=on_host, cast_inputs=False)
    shard_modules(blocks, ranks.layers if ranks.lanes > 1 else ranks.weights, dtype, on_host=on_host)
    shard_modules([*exact, policy], ranks.weights, dtype, exact, on_host=on_host)


@dataclass(slots=True)
class FsdpLearner:
    """``begin`` gives it a fresh optimizer; a step that is not made advances neither AdamW nor the schedule."""

    module: FsdpPolicy
    rank: int
    world: int
    optimizer: AdamW = field(default_factory=lambda: AdamW(0.9, 0.98, 1e-8, 0.0))
    schedule: Schedule = field(default_factory=lambda: Schedule(peak=0.0))
    clip_grad: float = 0.0
    adapter: str = ""  # that learns; empty where the whole model does
    _grads: Tensors = field(default_factory=dict)  # of this rank's shards, from `norm` to `zero_grad`

    def begin(self, train: Any, schedule: Schedule) -> None:
        """A fresh optimizer with the [train] section's settings."""
        self.optimizer = optimizer_of(train, self.module.place, self.module.device)
        self.schedule, self.clip_grad = schedule, train.clip_grad

    def parameters(self) -> Tensors:
        """Parameters by their names in a model folder, tied ones once; DTensors on several ranks."""
        return self.module.learning(self.adapter)

    def biases(self) -> Tensors:
        """Router biases by their names in a model folder, which every rank has whole."""
        return router_biases(self.module.hf)

    def locals(self) -> Tensors:
        """This rank's shards of the parameters."""
        return {name: local(p.detach()) for name, p in self.parameters().items()}

    def gradients(self) -> Tensors:
        """What backward passes have added up, of the parameters that have a gradient."""
        if self.module.masters is not None:
            return {name.removeprefix("hf."): grad for name, grad in self.module.masters.gradients().items()}
        return {name: p.grad for name, p in self.parameters().items() if p.grad is not None}

    def norm(self) -> float:
        """The Euclidean norm of all ranks' gradients; a collective."""
        self._grads = {name: local(grad) for name, grad in self.gradients().items()}
        return global_norm(self._grads, self.world, self.module.place, self.module.copies())

    def update(self, norm: float) -> float:
        """Clip and step, after :meth:`norm`; the answer is the learning rate."""
        rate, masters = self.rate, self.module.masters
        copies = {name.removeprefix("hf."): p.detach() for name, p in masters.copies.items()} if masters else None
        self.optimizer.step(self.locals(), self._grads, rate, clip_scale(norm, self.clip_grad), copies)
        return rate

    def refresh(self) -> None:
        """Have the model compute with the parameters as they are now."""
        if self.module.masters is not None:
            self.module.masters.refresh()

    @contextmanager
    def computing_with(self, weights: Tensors) -> Iterator[None]:
        """The model computes with these ``weights``, in shards by name, inside the block; router biases are whole.

        Without any it computes with the base alone, as adapters do with a reference's weights in its place.
        """
        with self.module.adapters.using(None) if self.module.adapters is not None else nullcontext():
            with self._all_from(weights) if weights else nullcontext():
                yield

    @contextmanager
    def _all_from(self, weights: Tensors) -> Iterator[None]:
        biases = self.biases()
        copies = {name: bias.clone() for name, bias in biases.items()}
        for name, bias in biases.items():
            bias.copy_(weights[name])
        try:
            with self._parameters_from(weights):
                yield
        finally:
            for name, bias in biases.items():
                bias.copy_(copies[name])

    @contextmanager
    def _parameters_from(self, weights: Tensors) -> Iterator[None]:
        if (masters := self.module.masters) is not None:
            masters.refresh({f"hf.{name}": weights[name] for name in self.parameters()})
            try:
                yield
            finally:
                masters.refresh()
            return
        parameters = {name: local(p.detach()) for name, p in self.module.base().items()}
        copies = {name: tensor.clone() for name, tensor in parameters.items()}
        try:
            for name, tensor in parameters.items():
                tensor.copy_(weights[name])
            yield
        finally:
            for name, tensor in parameters.items():
                tensor.copy_(copies[name])

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self.schedule.at(self.optimizer.steps)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._grads = {}
        self.module.zero_grad()
        if self.module.masters is not None:
            self.module.masters.forget()

    def put(self, parameters: Tensors, states: Mapping[str, Tensors], *, steps: int) -> None:
        """Take the state that ``steps`` optimizer steps made: this rank's shards by parameter name.

        Args:
            states: of the optimizer, by kind
        """
        for name, tensor in self.locals().items():
            tensor.copy_(parameters[name])
        self.refresh()
        self.optimizer.steps = steps
        for kind, tensors in self.optimizer.states().items():
            tensors.clear()
            tensors |= self.optimizer.place.keep(states.get(kind, {}))

    def states(self) -> list[torch.Tensor]:
        """What AdamW remembers, in shards."""
        return [tensor for tensors in self.optimizer.states().values() for tensor in tensors.values()]


@torch.no_grad()
def fingerprint(tensors: Mapping[str, torch.Tensor], world: int, copies: Container[str] = ()) -> str:
    """The checksum of tensors by name, which may be sharded; a collective.

    Every rank gets the same answer: 32 hex digits. Of a tensor that every rank has whole, the first one counts;
    ``copies`` are shards that count on another rank.
    """
    runs = own_runs(tensors, world, copies)
    total = all_sums(list(runs.values()))
    if world > 1:
        dist.all_reduce(total)
    return digest({n: (list(tensors[n].shape), pair) for n, pair in zip(runs, total.tolist(), strict=True)})
