"""Adapters of a rank's stage: which layers have them, where factors lie in whole ones, and what is made of them.

    transformers' skeleton --targets--> weights --bridge--> layers of megatron-core --> A and B of each, this rank's
    A and B --gathered--> factors by weight: an adapter folder, or merged with the base into engines' tensors

Factors have entries of their own, as a bridge gives base weights, so that they are saved, read, summed and gathered at
any layout as these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import nn

from slime_convert.bridge import Entry, join, part
from slime_core.errors import ConfigError
from slime_core.lora.effective import put_on
from slime_core.lora.folder import Factors, factors_of, factors_to_load
from slime_core.lora.layers import attach, check_targets, initial_factor, merged
from slime_core.media.features import tower
from slime_core.seeds import seed_of
from slime_core.weights.build import skeleton
from slime_core.weights.transports.buckets import TensorSource, stream
from slime_megatron.adapter_entries import KINDS, Origin, PlacedPart, origins, placed_parts, whole_factors
from slime_megatron.experts import GroupedExperts
from slime_megatron.low_rank import CLASSES, AdapterSwitch, LayerAdapter, RankFactors, adapt, is_summed
from slime_megatron.tensors import LocalTensor, Tensors, canonical

if TYPE_CHECKING:
    from pathlib import Path

    from slime_core.lora.layers import Adapters
    from slime_core.lora.spec import LoraSpec
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.model import ModelStage

Tensor = torch.Tensor
SHOWN = 4
LEAVES = ("weight", "gate_weight")
"""What layers that can have adapters call their base weight."""


class StageAdapter:
    """An adapter of a stage's layers, which may have several.

    Example:
        adapters = StageAdapter.attach(stage, tensors, folder, spec, names=["solver", "critic"], seed=0)
        with adapters["critic"].in_use():
            ...  # passes with it
        with adapters["critic"].switch.base():
            ...  # passes of the reference
        factors = adapters["critic"].factors()
    """

    def __init__(self, name: str, base: Tensors, targets: Adapters, switch: AdapterSwitch) -> None:
        self.name, self.base, self.targets, self.switch = name, base, targets, switch
        self.spec = targets.spec  # says what the run's means for this model
        self._places: dict[str, list[PlacedPart]] = {}  # by the name of the layer's tensor
        for entry in base.of_model().entries:
            if placed := list(placed_parts(entry, base, targets, name)):
                self._places[entry.megatron] = placed
        self._origins = origins(one for placed in self._places.values() for one in placed)
        self.tensors = copy(base)
        self.tensors.entries = [e for placed in self._places.values() for one in placed for e in one.factors]
        self.tensors.by_name, self.tensors.copies, self.tensors._sources = {}, [], None
        self.tensors.parameter_name = _same

    @classmethod
    def attach(
        cls, stage: ModelStage, base: Tensors, folder: ModelFolder, spec: LoraSpec, *, names: Sequence[str], seed: int
    ) -> dict[str, StageAdapter]:
        """Freeze a stage and give its target layers adapters, which change nothing yet; a collective.

        The first is in use.

        Raises:
            ConfigError: CFG04 targets that are no layers of megatron-core's that can have adapters.
        """
        model = skeleton(folder.config, trust_remote_code=folder.trust_remote_code)
        targets = attach(model, spec, seed=seed, names=names, outside=tower(model))
        switch = AdapterSwitch(spec, names[0])
        check_targets(model, targets, spec)
        adapters = {name: cls(name, base, targets, switch) for name in names}
        stage.requires_grad_(False)
        layers = []
        for module, local in _layers(stage, base):
            if (low_rank := adapters[names[0]]._of_layer(local)) is not None:
                low_rank.factors = {name: one._factors(module, local) for name, one in adapters.items()}
                adapt(module, low_rank)
                layers.append((low_rank, local))
        adapters[names[0]]._check()
        for adapter in adapters.values():
            adapter.fill(adapter._draw(seed))
        for low_rank, local in layers if spec.use_dora else ():
            low_rank.start_magnitudes(local.tensor)
        for layer in (one for chunk in stage.chunks for one in chunk.decoder.layers if spec.dropout):
            layer.register_forward_pre_hook(switch.take_rows, with_kwargs=True)
        return adapters

    def in_use(self) -> AbstractContextManager[None]:
        """Passes inside the block compute with it."""
        return self.switch.using(self.name)

    def _of_layer(self, local: LocalTensor) -> LayerAdapter | None:
        """What a layer computes with its adapters, without their factors; None where it has none."""
        entry, group, sizes = local.entry, local.group, self.base.sizes
        if not (placed := self._places.get(entry.megatron)):
            return None
        if entry.expert < 0:
            sizes = replace(sizes, heads=sizes.heads // group.size(), groups=sizes.groups // group.size())
        return LayerAdapter(self.switch, entry, sizes, group, [one.part for one in placed])

    def _factors(self, module: Any, local: LocalTensor) -> RankFactors:
        """Its factors of a layer, this rank's shards of them."""
        entries = zip(*(one.factors for one in self._places[local.entry.megatron]), strict=True)
        factors = [[self._factor(module, local, one) for one in of_kind] for of_kind in entries]
        return RankFactors(*(*factors, [])[:3])

    def _factor(self, module: Any, local: LocalTensor, entry: Entry) -> nn.Parameter:
        """This rank's shard of a factor, and what megatron-core has to know of it."""
        group, is_expert, dealt = local.group, local.entry.expert >= 0, entry.kind != "whole"
        axis, shape = int(entry.kind == "columns"), list(entry.shapes[0])
        shape[axis] //= group.size() if dealt else 1
        parameter: Any = nn.Parameter(torch.zeros(shape, device=local.tensor.device))
        if dealt or is_expert:
            set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        if is_expert:
            parameter.allreduce = getattr(local.tensor, "allreduce", True)
            parameter.shared = not dealt and group.rank() > 0  # its gradient counts once in the norm
        parameter.summed_over = group if is_summed(module, dealt, group) else None
        self.tensors.by_name[entry.megatron] = LocalTensor(entry, parameter)
        return parameter  # type: ignore[no-any-return]

    def _check(self) -> None:
        """Refuse targets that no rank has as a layer that can have adapters."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(self.tensors.by_name))
        present = {name for names in everyone for name in names}
        every = [one for placed in self._places.values() for one in placed]
        adapted = {one.part.weight for one in every if one.factors[0].megatron in present}
        if missing := [name.removesuffix(".weight") for name in self.targets.weights() if name not in adapted]:
            leaves = sorted({name.rpartition(".")[2] for name in missing})
            raise ConfigError(
                f"Megatron has no adapters on {', '.join(missing[:SHOWN])}" + " ..." * (len(missing) > SHOWN),
                code="CFG04",
                where="train.lora_target_modules",
                why="they are not linear layers or experts of megatron-core's here",
                fix=f"lora_exclude_modules = {leaves}   or train with --train-backend fsdp",
            )

    def _draw(self, seed: int) -> Callable[[str], Factors]:
        """Factors as they start, by weight, as with FSDP: A is drawn, B is 0; and 0 for magnitudes."""
        shapes = factors_of(self.targets, self.name)

        @lru_cache(maxsize=1)
        def draw(weight: str) -> Factors:
            name, one = weight.removesuffix(".weight"), shapes[weight]
            a = initial_factor(tuple(one.a.shape), seed_of(seed, "lora", self.name, name), torch.device("cpu"))
            return Factors(a, torch.zeros(one.b.shape), torch.zeros(one.b.shape[:1]))

        return draw

    def load(self, path: Path) -> None:
        """Start from an adapter folder, see `factors_to_load`."""
        self.fill(factors_to_load(self.targets, self.name, path).__getitem__)

    def fill(self, factors: Callable[[str], Factors]) -> None:
        """Take factors by weight, this rank's shards of them."""
        self.tensors.fill(self.named(factors))

    def named(self, factors: Callable[[str], Factors]) -> Mapping[str, Tensor]:
        """Factors by the names that entries have for them."""
        return _NamedFactors(self._origins, factors)

    @torch.no_grad()
    def factors(self) -> dict[str, Factors]:
        """Whole factors by weight, in the order of the model, on rank 0; nothing on the others; a collective."""
        gathered = stream(self.tensors.sources())
        whole = {one.name: one.cut(tensor) for (one,), tensor in gathered if dist.get_rank() == 0}
        return whole_factors(whole, self._origins, self.targets) if whole else {}

    def stacked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by names of factors, by the names of transformers' parameters: experts' are stacks there."""
        stacks: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            expert = self._origins[name].expert
            stacks.setdefault(_stack(name, expert), []).append(tensor[None] if expert >= 0 else tensor)
        return {name: torch.cat(parts) for name, parts in stacks.items()}

    def put_on(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """Let transformers' own model compute with the adapter.

        Args:
            tensors: all factors, whole, by the names of entries
        """
        put_on(model, self.targets, self.name, self.stacked(tensors))

    def merged_sources(self, *, rounded: bool = False) -> list[TensorSource]:
        """Tensors of the whole model in the names of its folder, with the adapter merged; a collective, once.

        Args:
            rounded: to the dtype of the base; else what the adapter changes is float32
        """
        factors = dict(zip((one.megatron for one in self.tensors.entries), self.tensors.sources(), strict=True))
        sources = []
        for entry, source in zip(self.base.entries, self.base.sources(), strict=True):
            placed = self._places.get(entry.megatron, [])
            merge = partial(self._merged, entry, source, placed, factors, rounded)
            sources.append(TensorSource(source.parts, merge) if placed else source)
        return sources

    @torch.no_grad()
    def _merged(
        self,
        entry: Entry,
        source: TensorSource,
        placed: Sequence[PlacedPart],
        factors: Mapping[str, TensorSource],
        rounded: bool,
    ) -> Tensor:
        """A whole tensor of megatron-core's on rank 0, its parts merged as transformers has them; a collective."""
        weight = source.gather()
        gathered = [[factors[one.megatron].gather() for one in place.factors] for place in placed]
        if dist.get_rank():
            return weight
        at_once, dtype = placed[0].part.index < 0, weight.dtype if rounded else torch.float32
        parts = [weight] if at_once else part(entry, weight, self.base.sizes)
        for place, tensors in zip(placed, gathered, strict=True):
            cuts = [factors[one.megatron].parts[0].cut for one in place.factors]
            a, b, *magnitude = (cut(tensor) for cut, tensor in zip(cuts, tensors, strict=True))
            index = max(place.part.index, 0)
            parts[index] = merged(parts[index], a, b, self.spec.scaling, *magnitude, dtype=dtype)
        return parts[0] if at_once else join(entry, parts, self.base.sizes)


def _layers(stage: ModelStage, base: Tensors) -> list[tuple[nn.Module, LocalTensor]]:
    """Layers of this rank's chunks that can have adapters, and the base weight of each; experts' weights together."""
    layers = []
    for chunk in stage.chunks:
        for prefix, module in chunk.named_modules():
            if isinstance(module, GroupedExperts):
                module.lay_together()
            for leaf in LEAVES:
                local = base.by_name.get(canonical(f"{prefix}.{leaf}", chunk))
                if local is not None and type(module) in CLASSES and leaf in module._parameters:
                    layers.append((module, local))
    return layers


class _NamedFactors(Mapping[str, Tensor]):
    """Factors by the names that entries have for them."""

    def __init__(self, origins: Mapping[str, Origin], factors: Callable[[str], Factors]) -> None:
        self._origins, self._factors = origins, factors

    def __getitem__(self, name: str) -> Tensor:
        origin = self._origins[name]
        factors = self._factors(origin.weight)
        tensor = dict(zip(KINDS, (factors.a, factors.b, factors.magnitude)))[origin.kind]
        assert tensor is not None
        return tensor[origin.expert] if origin.expert >= 0 else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)


def _stack(name: str, expert: int) -> str:
    """What transformers calls the parameter that a factor is part of."""
    return name if expert < 0 else name.removesuffix(f".{expert}")


def _same(name: str) -> str:
    return name
