"""The adapter of a rank's stage: which layers have it, where its factors lie in whole ones, and what is made of them.

    transformers' skeleton --targets--> weights --bridge--> layers of megatron-core --> A and B of each, this rank's
    A and B --gathered--> factors by weight: an adapter folder, or merged with the base into engines' tensors

Factors have entries of their own, as a bridge gives base weights, so that they are saved, read, summed and gathered at
any layout as these are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import nn

from slime_convert.bridge import Entry, join, part
from slime_core.errors import ConfigError
from slime_core.lora.folder import Factors, factors_of
from slime_core.lora.layers import attach, drawn, merged
from slime_core.media.features import tower
from slime_core.seeds import seed_of
from slime_core.weights.build import skeleton
from slime_core.weights.transports.buckets import TensorSource
from slime_megatron.experts import GroupedExperts
from slime_megatron.fingerprint import spots
from slime_megatron.low_rank import CLASSES, AdapterPart, AdapterSwitch, LowRank, adapt, is_summed
from slime_megatron.tensors import LocalTensor, Tensors, canonical

if TYPE_CHECKING:
    from slime_core.lora.layers import Adapters
    from slime_core.lora.spec import LoraSpec
    from slime_core.weights.folder import ModelFolder
    from slime_megatron.model import ModelStage

Tensor = torch.Tensor
SHOWN = 4
LEAVES = ("weight", "gate_weight")
"""What layers that can have adapters call their base weight."""


@dataclass(slots=True, frozen=True)
class PlacedPart:
    """A part of a layer, with the entries of its A and B."""

    part: AdapterPart
    a: Entry
    b: Entry


class StageAdapter:
    """The adapter of a stage's layers.

    Example:
        adapter = StageAdapter.attach(stage, tensors, folder, spec, seed=0)
        with adapter.switch.base():
            ...  # passes of the reference
        factors = adapter.factors()
    """

    def __init__(self, spec: LoraSpec, base: Tensors, targets: Adapters) -> None:
        self.targets, self.name = targets, targets.names[0]
        self.spec, self.base = targets.spec, base  # the spec says what it means for this model
        self.switch = AdapterSwitch(spec)
        self._origins: dict[str, tuple[str, str, int]] = {}  # weight, letter and expert of a factor's name
        self._places: dict[str, list[PlacedPart]] = {}  # by the name of the layer's tensor
        for entry in base.of_model().entries:
            if placed := list(self._parts(entry)):
                self._places[entry.megatron] = placed
        self.tensors = copy(base)
        self.tensors.entries = [e for placed in self._places.values() for one in placed for e in (one.a, one.b)]
        self.tensors.by_name, self.tensors.copies, self.tensors._sources = {}, [], None
        self.tensors.parameter_name = _same

    @classmethod
    def attach(
        cls, stage: ModelStage, base: Tensors, folder: ModelFolder, spec: LoraSpec, *, seed: int
    ) -> StageAdapter:
        """Freeze a stage and give its target layers an adapter, which changes nothing yet; a collective.

        Raises:
            ConfigError: CFG04 targets that are no layers of megatron-core's that can have adapters.
        """
        model = skeleton(folder.config, trust_remote_code=folder.trust_remote_code)
        adapter = cls(spec, base, attach(model, spec, seed=seed, outside=tower(model)))
        stage.requires_grad_(False)
        for chunk in stage.chunks:
            for prefix, module in list(chunk.named_modules()):
                if isinstance(module, GroupedExperts):
                    module.lay_together()
                for leaf in LEAVES:
                    local = base.by_name.get(canonical(f"{prefix}.{leaf}", chunk))
                    if local is not None and type(module) in CLASSES and leaf in module._parameters:
                        adapter._adapt(module, local)
        adapter._check()
        adapter.fill(adapter._draw(seed))
        return adapter

    def _parts(self, entry: Entry) -> Iterator[PlacedPart]:
        """Parts of a layer that have factors; all experts' gates and ups have theirs together."""
        weights, factors = self.targets.weights(), factors_of(self.targets, self.name)
        names = [spot.name for spot in spots(entry, self.base)]
        chosen = [(index, name) for index, name in enumerate(names) if name in weights]
        if entry.expert >= 0:
            chosen = [(-1, name) for _, name in chosen[:1]]
        for index, name in chosen:
            shape = int(factors[name].b.shape[-2]), int(factors[name].a.shape[-1])
            one = AdapterPart(name, index, weights[name][0].number, shape)
            yield PlacedPart(one, self._entry(entry, one, "A"), self._entry(entry, one, "B"))

    def _entry(self, entry: Entry, one: AdapterPart, letter: str) -> Entry:
        """Of a factor."""
        module, _, leaf = one.weight.rpartition(".")
        name, key = f"{module}.lora_{letter}.{self.name}", f"{module}.lora_{letter}"
        if entry.expert >= 0:
            name = f"{module}.lora_{letter}.{leaf}.{self.name}.{entry.expert}"
            key = f"{module}.local_experts.{entry.expert}.{leaf}.lora_{letter}"
        self._origins[name] = (one.weight, letter, entry.expert)
        out, inputs = one.shape
        if letter == "A":
            kind, shape = "columns" if entry.kind == "columns" else "whole", (self.spec.rank, inputs)
        else:
            of_rows = entry.kind if one.index < 0 or len(entry.hf) == 1 else "rows"
            kind, shape = "whole" if entry.kind == "columns" else of_rows, (out, self.spec.rank)
        key = f"adapters.{self.name}.{key}"
        return replace(entry, megatron=key, hf=(name,), kind=kind, layer=-1, shapes=(shape,))  # type: ignore[arg-type]

    def _adapt(self, module: Any, local: LocalTensor) -> None:
        """Give a layer its adapter, where it has one."""
        entry, group, tp = local.entry, local.group, local.group.size()
        if not (placed := self._places.get(entry.megatron)):
            return
        a, b = ([self._factor(module, local, getattr(one, which)) for one in placed] for which in "ab")
        sizes = self.base.sizes
        if entry.expert < 0:
            sizes = replace(sizes, heads=sizes.heads // tp, groups=sizes.groups // tp)
        parts = [one.part for one in placed]
        first = group.rank() * parts[0].shape[1] // tp if entry.kind == "columns" else 0
        adapt(module, LowRank(self.switch, entry, sizes, tp, parts, a, b, first))

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
        adapted = {one.part.weight for placed in self._places.values() for one in placed if one.a.megatron in present}
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
        """Factors as they start, by weight, the same as with FSDP: A is drawn, B is 0."""
        shapes = factors_of(self.targets, self.name)

        @lru_cache(maxsize=1)
        def draw(weight: str) -> Factors:
            name, one = weight.removesuffix(".weight"), shapes[weight]
            a = drawn(tuple(one.a.shape), seed_of(seed, "lora", self.name, name), torch.device("cpu"))
            return Factors(a, torch.zeros(one.b.shape))

        return draw

    def fill(self, factors: Callable[[str], Factors]) -> None:
        """Take factors by weight, this rank's shards of them."""
        self.tensors.fill(self.named(factors))

    def named(self, factors: Callable[[str], Factors]) -> Mapping[str, Tensor]:
        """Factors by the names that entries have for them."""
        return _NamedFactors(self._origins, factors)

    @torch.no_grad()
    def factors(self) -> dict[str, Factors]:
        """Whole factors by weight, in the order of the model, on rank 0; nothing on the others; a collective."""
        whole: dict[tuple[str, str], list[Tensor]] = {}
        for source in self.tensors.sources():
            tensor, (one,) = source.gather(), source.parts
            if dist.get_rank() == 0:
                weight, letter, _ = self._origins[one.name]
                whole.setdefault((weight, letter), []).append(one.cut(tensor))
        factors = {}
        for weight, expected in factors_of(self.targets, self.name).items() if whole else ():
            a, b = (whole[weight, letter] for letter in "AB")
            factors[weight] = Factors(torch.stack(a), torch.stack(b)) if expected.a.ndim == 3 else Factors(a[0], b[0])
        return factors

    def stacked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by names of factors, by the names of transformers' parameters: experts' are stacks there."""
        stacks: dict[str, list[Tensor]] = {}
        for name, tensor in tensors.items():
            stacks.setdefault(name if self._origins[name][2] < 0 else name.rpartition(".")[0], []).append(tensor)
        return {name: torch.stack(s) if self._origins.get(name) is None else s[0] for name, s in stacks.items()}

    def put_on(self, model: Any, tensors: Mapping[str, Tensor]) -> None:
        """Give transformers' own model the adapter, in the dtype of its weights.

        Args:
            tensors: all factors, whole, by the names of entries
        """
        adapters, values = attach(model, self.spec, seed=0, outside=tower(model)), self.stacked(tensors)
        for name, parameter in adapters.parameters().items():
            parameter.data = values[name].to(next(model.parameters()))

    def merged_sources(self) -> list[TensorSource]:
        """Tensors of the whole model in the names of its folder, with the adapter merged; a collective, once."""
        own = dict(zip((e.megatron for e in self.tensors.entries), self.tensors.sources(), strict=True))
        return [
            TensorSource(source.parts, partial(self._merged, entry, source, own))
            if entry.megatron in self._places
            else source
            for entry, source in zip(self.base.entries, self.base.sources(), strict=True)
        ]

    @torch.no_grad()
    def _merged(self, entry: Entry, source: TensorSource, own: Mapping[str, TensorSource]) -> Tensor:
        """A whole tensor of megatron-core's on rank 0, its parts merged as transformers has them; a collective."""
        whole, placed = source.gather(), self._places[entry.megatron]
        gathered = [[own[one.megatron].gather() for one in (place.a, place.b)] for place in placed]
        if dist.get_rank():
            return whole
        parts = [whole] if placed[0].part.index < 0 else part(entry, whole, self.base.sizes)
        for place, pair in zip(placed, gathered, strict=True):
            a, b = (own[e.megatron].parts[0].cut(t) for e, t in zip((place.a, place.b), pair, strict=True))
            index = max(place.part.index, 0)
            parts[index] = merged(parts[index], a, b, self.spec.scaling)
        return parts[0] if placed[0].part.index < 0 else join(entry, parts, self.base.sizes)


class _NamedFactors(Mapping[str, Tensor]):
    """Factors by the names that entries have for them."""

    def __init__(self, origins: Mapping[str, tuple[str, str, int]], factors: Callable[[str], Factors]) -> None:
        self._origins, self._factors = origins, factors

    def __getitem__(self, name: str) -> Tensor:
        weight, letter, expert = self._origins[name]
        factors = self._factors(weight)
        tensor = factors.a if letter == "A" else factors.b
        return tensor[expert] if expert >= 0 else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)


def _same(name: str) -> str:
    return name
