"""A causal language model, sharded by FSDP2: its log-probs and entropies of packs of tokens, and its AdamW.

What a model can do is tried when it is built, on a few tokens: whether packed sequences give what single ones give,
and whether its logits are its output matrix times its last hidden state. Where not, one sequence a row is used, or
the model's own logits. Then it is sharded over data-parallel ranks; one rank holds it whole, without FSDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from slime_core.algorithms.shared.logprobs import BlockLoss, linear_log_probs, linear_loss, logits_log_probs
from slime_core.trainers.compiling import Choice, Compiled, pays
from slime_core.trainers.expert_load import ExpertLoad, copies_of_rows
from slime_core.trainers.fingerprint import all_sums, digest
from slime_core.trainers.fsdp.adamw import AdamW, clip_scale, global_norm
from slime_core.trainers.fsdp.attention import NAME, PackSegments, register, take
from slime_core.trainers.fsdp.exact import ExactPass
from slime_core.trainers.fsdp.experts import router_biases, use_kernels
from slime_core.trainers.fsdp.fused import fuse
from slime_core.trainers.fsdp.fused_cuda import GpuLayer
from slime_core.trainers.fsdp.host_inputs import HostInputs
from slime_core.trainers.fsdp.masters import Masters
from slime_core.trainers.fsdp.places import DevicePlace, HostPlace
from slime_core.trainers.optimizer_step import LossSums, MicroBatchLoss, Schedule, to_device
from slime_core.weights.routers import Routers

if TYPE_CHECKING:
    from slime_core.protocols import Loss
    from slime_core.types import MicroBatch

log = logging.getLogger(__name__)

TRIAL = (5, 3, 3)  # lengths of the sequences that a model is tried with
TOLERANCE = 1e-3
Tensors = dict[str, torch.Tensor]


class ResponseTokens:
    """The response tokens of a pack. No dataclass, in which FSDP would turn temperatures to the dtype of compute."""

    __slots__ = ("predict", "target", "temperature")

    def __init__(self, predict: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor | None) -> None:
        self.predict = predict  # [R] int64, rows of the pack
        self.target = target  # [R] int64, token ids
        self.temperature = temperature  # [R] float32; None is 1


class FsdpPolicy(nn.Module):
    """The root module that is sharded; ``hf`` is the transformers model."""

    def __init__(self, hf: Any, *, chunk: int) -> None:
        super().__init__()
        self.hf = hf
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
        self.expert_load = ExpertLoad()
        self.routers: Routers | None = None  # where a run replays their choices
        self._compiled: dict[Callable[..., Any], Compiled] = {}
        if next(hf.parameters()).is_cuda:
            use_kernels(hf)
        for number, layer in enumerate(layers(hf)):
            self._choose_forward(layer, number)

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

    def _choose_forward(self, layer: nn.Module, number: int) -> None:
        """Let the layer's forward follow ``fused``, ``compiled`` and ``recompute``."""
        plain, fused = layer.forward, fuse(layer, self.hf.config, GpuLayer.apply)
        function = getattr(plain, "__func__", None)  # of all layers of a class: it is compiled once for them

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.fused and fused is not None:
                return fused(*args, recompute=number < self.recompute, masters=self.masters, **kwargs)
            run: Callable[..., Any] = plain
            if self.compiled and function is not None:
                run = partial(self._compiled.setdefault(function, Compiled(function)), layer)
            if number < self.recompute and torch.is_grad_enabled():
                return checkpoint(run, *args, use_reentrant=False, **kwargs)
            return run(*args, **kwargs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.saving(number, args[0] if args else kwargs["hidden_states"]):
                return run(*args, **kwargs)

        layer.forward = forward  # type: ignore[method-assign]

    def learning(self) -> Tensors:
        """Parameters that learn, by name, tied ones once: float32 masters where there are some, or shards."""
        named: Mapping[str, torch.Tensor] = self.masters.weights if self.masters else dict(self.named_parameters())
        return {name.removeprefix("hf."): tensor for name, tensor in named.items()}

    def all_names(self) -> Tensors:
        """The same by all names that a model folder may use, tied ones under each."""
        names = {id(parameter): name.removeprefix("hf.") for name, parameter in self.named_parameters()}
        named, values = self.hf.named_parameters(remove_duplicate=False), self.learning()
        return {name: values[names[id(parameter)]] for name, parameter in named}

    def choose_compiling(self, choice: Choice) -> None:
        """Follow ``train.compile``; before the model is sharded."""
        parameters = list(self.hf.parameters())
        self.compiled = pays(choice, parameters[0].device, sum(p.numel() for p in parameters))

    def try_model(self) -> None:
        """Find out what the model can do, before it is sharded; leaves its attention as it will be used."""
        with torch.no_grad():
            trial = _PolicyTrial(self.hf)
            self.linear_head = trial.linear_head()
            reason = trial.packing()
        self.packs = not reason
        self.fused = self.packs and self._fusing_changes_nothing(trial)
        if reason:
            log.warning("%s: %s; training runs one sequence a row, slower", type(self.hf).__name__, reason)

    def _fusing_changes_nothing(self, trial: _PolicyTrial) -> bool:
        """Whether fused layers give the model's own numbers and gradients; False where none is known."""
        if not any(fuse(layer, self.hf.config, GpuLayer.apply) for layer in layers(self.hf)):
            return False
        results, compute = [], trial.layer if trial.tokens.is_cuda else trial.packed
        parameters = list((layers(self.hf)[0] if trial.tokens.is_cuda else self.hf).parameters())
        try:
            for self.fused in (False, True):
                with torch.enable_grad():
                    out = compute()
                    grads = torch.autograd.grad(out.square().mean(), parameters)
                results.append((out.detach(), *grads))
        except Exception as error:  # of a compiler, say
            if not trial.tokens.is_cuda:
                raise
            log.warning("fused layers are left out, training is slower: %s", " ".join(str(error).split())[:300])
            return False
        finally:
            self.fused = False
        return all(_close(one, other) for one, other in zip(*results))

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        segments: PackSegments,
        rows: ResponseTokens,
        loss: BlockLoss | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Log-prob of each target and entropy, both [R]; arguments as in `types.MicroBatch`, as tensors.

        With ``loss``, for models with a linear head, its sum alone, with the gradient taken in this pass.
        """
        kwargs: dict[str, Any] = {"input_ids": tokens[None], "position_ids": position_ids[None], "use_cache": False}
        if self.packs:
            kwargs["segments"] = segments
        if not self.linear_head:
            logits = self.hf(**kwargs, logits_to_keep=rows.predict).logits[0]
            return logits_log_probs(logits, rows.target, temperature=rows.temperature)
        head = self.hf.get_output_embeddings()
        more: dict[str, Any] = {"bias": head.bias, "temperature": rows.temperature, "chunk": self.chunk}
        if self.exact is not None:
            hidden = self.exact.hidden(tokens, position_ids, segments, rows.predict)
            more["kernels"] = self.exact.head(rows)
        else:
            hidden = take(self.hf.base_model(**kwargs).last_hidden_state[0], rows.predict)
        if loss is not None:
            return (linear_loss(hidden, head.weight, rows.target, loss, **more),)
        return linear_log_probs(hidden, head.weight, rows.target, **more)


class _PolicyTrial:
    """A few tokens through a model, one sequence at a time with its own attention, to compare with."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        device = next(hf.parameters()).device
        vocab = int(hf.config.get_text_config().vocab_size)
        self.tokens = torch.arange(1, 1 + sum(TRIAL), device=device) * 7 % vocab
        self.positions = torch.cat([torch.arange(n, device=device) for n in TRIAL])
        cu = np.concatenate([[0], np.cumsum(TRIAL)])
        self.segments = PackSegments.of(cu, np.full(len(TRIAL), -1), device)
        parts = [slice(a, b) for a, b in zip(cu[:-1].tolist(), cu[1:].tolist())]
        self.logits = torch.cat([self._logits(part) for part in parts])

    def _logits(self, part: slice, **kwargs: Any) -> torch.Tensor:
        ids, positions = self.tokens[None, part], self.positions[None, part]
        return self.hf(input_ids=ids, position_ids=positions, use_cache=False, **kwargs).logits[0].float()  # type: ignore[no-any-return]

    def linear_head(self) -> bool:
        """Whether logits are the output matrix times the base model's last hidden state."""
        head, base, first = self.hf.get_output_embeddings(), self.hf.base_model, slice(0, TRIAL[0])
        if type(head) is not nn.Linear or base is self.hf:
            return False
        if getattr(self.hf.config.get_text_config(), "final_logit_softcapping", None):
            return False  # of small logits a cap shows in no trial
        out = base(input_ids=self.tokens[None, first], position_ids=self.positions[None, first], use_cache=False)
        hidden = getattr(out, "last_hidden_state", None)
        return hidden is not None and _close(head(hidden[0]).float(), self.logits[first])

    def packed(self) -> torch.Tensor:
        """Logits of all sequences as one pack."""
        return self._logits(slice(None), segments=self.segments)

    def layer(self) -> torch.Tensor:
        """What the first layer makes of numbers drawn for it: a gradient of the whole model may have no room."""
        size = int(self.hf.config.get_text_config().hidden_size)
        x = torch.sin(torch.arange(len(self.tokens) * size, device=self.tokens.device).float()).view(1, -1, size)
        positions = self.positions[None]
        tables = self.hf.base_model.rotary_emb(x, position_ids=positions)
        out = layers(self.hf)[0](x, attention_mask=None, position_ids=positions, position_embeddings=tables,
                                 segments=self.segments)  # fmt: skip
        return out  # type: ignore[no-any-return]

    def packing(self) -> str:
        """Why sequences cannot be packed, or an empty string; the model then uses segment attention."""
        types = set(getattr(self.hf.config.get_text_config(), "layer_types", None) or ())
        if odd := types - {"full_attention", "sliding_attention"}:
            return f"layers of type {', '.join(sorted(odd))} cannot be packed"
        register()
        before = self.hf.config._attn_implementation
        try:
            self.hf.set_attn_implementation(NAME)
            if _close(self.packed(), self.logits):
                return ""
            reason = "packed sequences see each other"
        except Exception as error:  # whatever a strange model or a kernel raises; single sequences run it as it is
            reason = f"segment attention is rejected ({(str(error) or type(error).__name__).splitlines()[0]})"
        self.hf.set_attn_implementation(before)
        return reason


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * max(float(other.abs().max()), 1e-6))


def layers(hf: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: what is sharded, and recomputed with gradient checkpointing, one by one."""
    names = set(getattr(hf, "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in hf.modules():
        if type(module).__name__ in names and module not in inside:
            layers.append(module)
            inside.update(module.modules())  # a block inside a block belongs to it
    return layers or [m for module in hf.modules() if isinstance(module, nn.ModuleList) for m in module]


def forward(
    policy: FsdpPolicy, micro: MicroBatch, temperature: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy of every response token of the pack, [R]."""
    result: tuple[torch.Tensor, torch.Tensor] = policy(
        *on_device(micro, device),
        ResponseTokens(to_device(micro.predict, device), to_device(micro.target, device), temperature),
    )
    return result


def backward(
    policy: FsdpPolicy, loss: Loss, train: Any, micro: MicroBatch, temperature: torch.Tensor | None, sums: LossSums
) -> None:
    """Add the pack's share of the loss to the gradients, and its sums to ``sums``.

    Raises:
        TrainerError: a loss of another shape, or without a gradient.
    """
    with policy.expert_load.counting(copies_of_rows(micro)):
        total, loss_part = _loss_of(policy, loss, train, micro, temperature, sums.device)
    total.backward()
    sums.add({"loss": total, **loss_part.metric_sums}, loss_part.mark_nonfinite)


def _loss_of(
    policy: FsdpPolicy,
    loss: Loss,
    train: Any,
    micro: MicroBatch,
    temperature: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, MicroBatchLoss]:
    """The pack's share of the loss."""
    if within_forward(policy, loss, train):
        rows = np.flatnonzero(micro.weight > 0)
        loss_part = MicroBatchLoss(loss, train, micro, rows, device)
        place = torch.from_numpy(rows)
        row_selection = ResponseTokens(
            to_device(micro.predict[rows], device),
            to_device(micro.target[rows], device),
            temperature[place.to(temperature.device)] if temperature is not None else None,
        )
        (total,) = policy(*on_device(micro, device), row_selection, loss_part)
        return total, loss_part
    loss_part = MicroBatchLoss(loss, train, micro, np.arange(len(micro.weight)), device)
    return loss_part(slice(None), *forward(policy, micro, temperature, device)), loss_part


def within_forward(policy: FsdpPolicy, loss: Loss, train: Any) -> bool:
    """Whether the gradient of the loss is taken inside the forward pass, so that logits are made once."""
    return policy.linear_head and loss.local is not None and loss.local(train)


def on_device(micro: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, PackSegments]:
    """Tokens, their positions and the segments of a pack, as a model takes them."""
    segments = PackSegments.of(micro.cu_seqlens, micro.prefix, device)
    return to_device(micro.tokens, device), to_device(micro.position_ids, device), segments


def shard(
    policy: FsdpPolicy,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    exact: Sequence[nn.Module] = (),
    place: DevicePlace | None = None,
) -> None:
    """Shard every block and the rest, computing in ``dtype``, ``exact`` modules in the dtype they have.

    Gradients are summed in float32. One rank holds all of it, and masters where ``dtype`` is not float32. Masters and
    moments lie in ``place``; with a `HostPlace` the shards and gradients of several ranks lie in host memory too.
    """
    half = dtype != torch.float32
    policy.place = place or policy.place
    if mesh.size() == 1:
        policy.masters = Masters(policy, dtype, exact, policy.place) if half else None
        return
    offload = OffloadPolicy()
    if isinstance(place, HostPlace):
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    modules: list[nn.Module] = [*exact, *layers(policy.hf), policy]
    for module in modules:
        dtypes = MixedPrecisionPolicy() if module in exact else precision
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=dtypes, offload_policy=offload)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter or gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(shard_: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A local shard as a DTensor with ``parameter``'s placement."""
    if not isinstance(parameter, DTensor):
        return shard_
    return DTensor.from_local(
        shard_, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def full(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' shards as one plain tensor, on the device that ranks talk by; a collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh_device = tensor.device_mesh.device_type
    sharded: Any = tensor if tensor.device.type == mesh_device else like(tensor.to_local().to(mesh_device), tensor)
    whole: torch.Tensor = sharded.full_tensor()
    return whole


def first_row(parameter: torch.Tensor) -> int:
    """The row of the whole tensor with which this rank's shard begins."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    return min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))


def own_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a whole tensor that every rank has."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    chunks = list(torch.chunk(whole, mesh.size(), dim=0))
    part = chunks[mesh.get_local_rank()] if mesh.get_local_rank() < len(chunks) else whole[:0]
    return part.to(parameter.device)


def reshard(policy: FsdpPolicy) -> None:
    """Drop gathered parameters after passes with no backward, so that the next pass sees what the shards hold."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(slots=True)
class FsdpLearner:
    """``begin`` gives it a fresh optimizer; a step that is not made advances neither AdamW nor the schedule."""

    module: FsdpPolicy
    rank: int
    world: int
    optimizer: AdamW = field(default_factory=lambda: AdamW(0.9, 0.98, 1e-8, 0.0))
    schedule: Schedule = field(default_factory=lambda: Schedule(peak=0.0))
    clip_grad: float = 0.0
    _grads: Tensors = field(default_factory=dict)  # of this rank's shards, from `norm` to `zero_grad`

    def begin(self, train: Any, schedule: Schedule) -> None:
        """A fresh optimizer with the [train] section's settings."""
        betas = train.adam_beta1, train.adam_beta2
        self.optimizer = AdamW(*betas, train.adam_eps, train.weight_decay, self.module.place)
        self.schedule, self.clip_grad = schedule, train.clip_grad

    def parameters(self) -> Tensors:
        """Parameters by their names in a model folder, tied ones once; DTensors on several ranks."""
        return self.module.learning()

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
        return global_norm(self._grads, self.world, self.module.place)

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
        """The model computes with these ``weights``, in shards by name, inside the block; router biases are whole."""
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
        parameters = self.locals()
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

    def put(self, parameters: Tensors, moment1: Tensors, moment2: Tensors, *, steps: int) -> None:
        """Take the state that ``steps`` optimizer steps made: this rank's shards by parameter name."""
        for name, tensor in self.locals().items():
            tensor.copy_(parameters[name])
        self.refresh()
        self.optimizer.steps = steps
        place = self.module.place
        self.optimizer.moment1, self.optimizer.moment2 = place.keep(moment1), place.keep(moment2)

    def states(self) -> list[torch.Tensor]:
        """What AdamW remembers, in shards."""
        return [*self.optimizer.moment1.values(), *self.optimizer.moment2.values()]


@torch.no_grad()
def fingerprint(tensors: Mapping[str, torch.Tensor], world: int) -> str:
    """The checksum of tensors by name, which may be sharded by rows; a collective.

    Every rank gets the same answer: 32 hex digits. Of a tensor that every rank has whole, the first one counts.
    """
    names, runs = sorted(tensors), []
    for name in names:
        tensor = tensors[name].detach()
        width = tensor[:1].numel() if tensor.ndim > 1 else 1
        shard_ = local(tensor)
        if world > 1 and not isinstance(tensor, DTensor) and dist.get_rank():
            shard_ = shard_[:0]
        runs.append((shard_, first_row(tensor) * width))
    total = all_sums(runs)
    if world > 1:
        dist.all_reduce(total)
    return digest({n: (list(tensors[n].shape), pair) for n, pair in zip(names, total.tolist(), strict=True)})
