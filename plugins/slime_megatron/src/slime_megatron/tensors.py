"""A rank's parameters by the bridge: which whole tensor each is part of, filled from a folder, gathered for engines.

decoder.layers.0.mlp.linear_fc1.weight of stage 2 --names--> decoder.layers.14.mlp.linear_fc1.weight --bridge-->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime_convert.bridge import Bridge, Entry, Sizes, join, part, shard, unshard
from slime_core.errors import TrainerError
from slime_core.kernels.quantised import dense
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.transports.buckets import TensorPart, TensorSource
from slime_megatron.convert.dist_keys import AHEAD, AHEAD_LAYER, apart

if TYPE_CHECKING:
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.model import PackedGPT

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
EXPERT = re.compile(
    r"^(.*mlp\.experts\.)(?:local_experts\.(\d+)\.(linear_fc[12])\.(\w+)|(linear_fc[12])\.(\w+?)(\d+))$"
)
FUSED = (  # Transformer Engine keeps a norm with the linear layer behind it
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("self_attention.linear_q_up_proj.layer_norm_", "self_attention.q_layernorm."),
    ("self_attention.linear_kv_up_proj.layer_norm_", "self_attention.kv_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@dataclass(slots=True, frozen=True)
class LocalTensor:
    """A parameter or buffer of this rank, and the tensor of the model that it is a shard of."""

    entry: Entry
    tensor: torch.Tensor

    @property
    def group(self) -> Any:
        """The ranks that share the whole tensor."""
        if self.entry.expert >= 0:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    @property
    def replicas(self) -> tuple[int, int]:
        """Which of how many copies of this shard it is."""
        if self.entry.expert >= 0:
            others = parallel_state.get_expert_data_parallel_group()
        else:
            others = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self.entry.kind != "whole":
            return others.rank(), others.size()
        return others.rank() + others.size() * self.group.rank(), others.size() * self.group.size()

    @property
    def speaks(self) -> bool:
        """Whether this rank counts for all that hold a copy: the first of its group, and of the copies."""
        return bool(self.group.rank() == 0 and self.replicas[0] == 0)


@dataclass(slots=True, frozen=True)
class TensorDescription:
    """What ranks tell each other of a tensor that they hold."""

    shape: list[int]
    dtype: torch.dtype
    speaks: bool


class Tensors:
    """Every tensor of a model's chunks of layers on this rank.

    Example:
        tensors = Tensors(stage.chunks, bridge, hf_config, multiple=128)
        tensors.fill(folder.tensors())
        sources = tensors.sources()
    """

    def __init__(
        self,
        chunks: Sequence[PackedGPT],
        bridge: Bridge,
        config: Any,
        *,
        multiple: int,
        entries: Sequence[Entry] | None = None,  # where they are not the bridge's
    ) -> None:
        self.sizes: Sizes = bridge.sizes(config, multiple)
        self.entries = list(entries) if entries is not None else bridge.entries(config)
        vision = chunks[0].vision
        self.frozen_tower = vision is not None and vision.frozen
        by_name = {entry.megatron: entry for entry in self.entries}
        self.parameter_name: Callable[[str], str] = bridge.parameter_name
        self.attention, self.layers_apart = bridge.attention, apart(bridge.megatron(config))
        self.by_name: dict[str, LocalTensor] = {}
        self._sources: list[TensorSource] | None = None
        self.copies: list[LocalTensor] = []  # of what other stages hold: an output matrix that is tied
        for chunk in chunks:
            for name, tensor in _stored(chunk):
                key = canonical(name, chunk)
                if key not in by_name:
                    if key == "output_layer.weight" and self.sizes.tied:
                        embedding = by_name["embedding.word_embeddings.weight"]
                        self.copies.append(LocalTensor(embedding, tensor))  # kept equal by megatron-core
                        continue
                    raise TrainerError(
                        f"the bridge of {bridge.family} has no row for {key}",
                        code="TRN108",
                        why=f"the model holds it, of shape {list(tensor.shape)}",
                        fix="add a row to the bridge",
                    )
                self.by_name[key] = LocalTensor(by_name[key], tensor)

    def like(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """The same places with other tensors in them, by Megatron's name: what is there once a parameter."""
        other = copy(self)
        other._sources = None
        other.by_name = {
            name: LocalTensor(entry.entry, tensors[name]) for name, entry in self.by_name.items() if name in tensors
        }
        other.entries = [entry for entry in self.entries if self._trained(entry)]
        return other

    def of_model(self) -> Tensors:
        """The same without layers that predict further ahead: what every other form of the model has."""
        other = copy(self)
        other._sources = None
        other.by_name = {name: local for name, local in self.by_name.items() if not name.startswith(AHEAD)}
        other.entries = [entry for entry in self.entries if not entry.megatron.startswith(AHEAD)]
        return other

    def _trained(self, entry: Entry) -> bool:
        """Whether it learns, on whichever rank."""
        return not entry.megatron.endswith("expert_bias") and not (self.frozen_tower and entry.in_tower)

    @torch.no_grad()
    def fill(self, folder: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's shards from a folder's tensors, by Hugging Face name, each read when it is asked for."""
        for local in self.by_name.values():
            local.tensor.copy_(self.shard_of(local, folder))

    @torch.no_grad()
    def read(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's shards of another folder's tensors, beside the model's own; as :meth:`fill` reads them."""
        return {n: self.shard_of(local, tensors).to(local.tensor, copy=True) for n, local in self.by_name.items()}

    def shard_of(self, entry: LocalTensor, folder: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's part of a tensor, of a folder's tensors.

        Raises:
            TrainerError: TRN108 it has another shape.
        """
        whole = join(entry.entry, [folder[name] for name in entry.entry.hf], self.sizes)
        local = shard(entry.entry, whole, entry.group.rank(), entry.group.size())
        if local.shape != entry.tensor.shape:
            raise TrainerError(
                f"{entry.entry.megatron} has shape {list(entry.tensor.shape)} in the model and {list(local.shape)} "
                f"made of {', '.join(entry.entry.hf)}",
                code="TRN108",
            )
        return local

    def sources(self) -> list[TensorSource]:
        """Every tensor of the whole model in the names of its folder, gathered on rank 0; a collective, once."""
        if self._sources is None:
            local = {
                name: TensorDescription(list(h.tensor.shape), h.tensor.dtype, h.speaks)
                for name, h in self.by_name.items()
            }
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, local)
            self._sources = [self._source(entry, everyone) for entry in self.entries]
        return self._sources

    def _source(self, entry: Entry, everyone: Sequence[Mapping[str, TensorDescription]]) -> TensorSource:
        name = entry.megatron
        owner = next(rank for rank, source in enumerate(everyone) if name in source and source[name].speaks)
        source = everyone[owner][name]
        form = torch.empty(self._whole_shape(entry, source.shape), dtype=source.dtype, device="meta")
        pieces = part(entry, form, self.sizes)
        parts = tuple(
            TensorPart(hf, tuple(piece.shape), partial(self._cut, entry, number))
            for number, (hf, piece) in enumerate(zip(entry.hf, pieces, strict=True))
        )
        return TensorSource(parts, partial(self.gather, entry, owner, form))

    @torch.no_grad()
    def gather(self, entry: Entry, owner: int, form: torch.Tensor) -> torch.Tensor:
        """The whole tensor, shaped as ``form``, on rank 0, from the owner's group; empty elsewhere; a collective."""
        rank, whole = dist.get_rank(), torch.empty(0)
        copy = self.by_name.get(entry.megatron)
        if copy is not None:
            local = dense(copy.tensor.detach()).contiguous()
            shards = [torch.empty_like(local) for _ in range(copy.group.size())]
            if len(shards) > 1 and entry.kind != "whole":
                dist.all_gather(shards, local, group=copy.group)
            else:
                shards = [local]
            whole = unshard(entry, shards)
        if owner != 0 and rank == owner:
            dist.send(whole.contiguous(), 0)
        elif owner != 0 and rank == 0:
            whole = torch.empty_like(form, device=next(iter(self.by_name.values())).tensor.device)
            dist.recv(whole, owner)
        return whole if rank == 0 else torch.empty(0)

    def _cut(self, entry: Entry, number: int, whole: torch.Tensor) -> torch.Tensor:
        return part(entry, whole, self.sizes)[number]

    def _whole_shape(self, entry: Entry, shape: list[int]) -> list[int]:
        expert = entry.expert >= 0
        size = (
            parallel_state.get_expert_tensor_parallel_world_size()
            if expert
            else parallel_state.get_tensor_model_parallel_world_size()
        )
        if entry.kind == "whole":
            return shape
        axis = 1 if entry.kind == "columns" else 0
        return [n * size if i == axis else n for i, n in enumerate(shape)]


def stored(folder: ModelFolder, seed: int = 0) -> Mapping[str, torch.Tensor]:
    """A folder's tensors by name; of one without weights, those that are drawn from the seed."""
    if folder.init_weights == "load":
        return folder.tensors()
    model: Any = folder.build_model("float32", seed)
    layout = FolderLayout(model)
    named = model.state_dict().items()
    return {part.name: part.cut(tensor) for name, tensor in named for part in layout.parts(name, tensor.shape)}


def _stored(chunk: PackedGPT) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters, and buffers that a checkpoint holds (an expert bias)."""
    yield from chunk.named_parameters()
    for prefix, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and name == "expert_bias":
                yield f"{prefix}.{name}", buffer


def canonical(name: str, chunk: PackedGPT) -> str:
    """A parameter's name in a chunk to its name in the whole model, as the local spec without fusion has it."""
    if match := LAYER.match(name):
        layer = chunk.decoder.layers[int(match[1])]
        name = f"decoder.layers.{layer.layer_number - 1}.{_unfused(match[2])}"
    elif ahead := AHEAD_LAYER.match(name):
        name = ahead[0] + _unfused(name.removeprefix(ahead[0]))
    if expert := EXPERT.match(name):
        prefix, local, linear, leaf, te_linear, te_leaf, te_local = expert.groups()
        per_rank = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        first = per_rank * parallel_state.get_expert_model_parallel_rank()
        number = first + int(local if local is not None else te_local)
        name = f"{prefix}local_experts.{number}.{linear or te_linear}.{leaf or te_leaf}"
    return name


def _unfused(name: str) -> str:
    """A tensor's name within a layer, as without Transformer Engine."""
    for fused, plain in FUSED:
        if name.startswith(fused):
            return plain + name.removeprefix(fused)
    return name
