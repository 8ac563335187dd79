"""Where tensors of a model folder, and the factors of an adapter, lie in megatron-core's whole tensors.

Factors have entries of their own, as a bridge gives base weights. Of megatron-core nothing is imported, so that
`slime convert` finds them too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from slime_convert.bridge import Entry, Sizes
from slime_core.lora.folder import Factors, factors_of
from slime_megatron.convert.dist_keys import ADAPTERS

if TYPE_CHECKING:
    from slime_core.lora.layers import Adapters

EXPERT = re.compile(r"(.*mlp\.experts)\.\d+\.(?:(gate|up|down)_proj|(w[123]))\.weight")
FACTOR = re.compile(r"(.*\.lora_[AB]\..*)\.\d+")
"""A factor of an expert's adapter, of which transformers has all as a stack."""
MIXTRAL = {"w1": "gate", "w3": "up", "w2": "down"}
"""Names of an expert's matrices that begin with ``block_sparse_moe``, where transformers has ``mlp``."""
KINDS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Factors of a part, by their names in transformers' model."""


class Naming(Protocol):
    """What a model's entries are read with: sizes, and transformers' parameter of a name in the folder."""

    @property
    def sizes(self) -> Sizes:
        """Of the model."""

    @property
    def parameter_name(self) -> Callable[[str], str]:
        """Transformers' name of a tensor of the folder."""


@dataclass(slots=True, frozen=True)
class Spot:
    """A tensor of the model folder in a parameter of transformers: from element ``begin`` on."""

    name: str
    shape: tuple[int, ...]
    begin: int = 0


def spots(entry: Entry, naming: Naming) -> list[Spot]:
    """Where the tensors of ``entry.hf`` lie in the parameters of transformers' model."""
    spots = []
    for stored, shape in zip(entry.hf, entry.shapes, strict=True):
        name = naming.parameter_name(stored).replace(".block_sparse_moe.", ".mlp.")
        if entry.expert >= 0 and (factor := FACTOR.fullmatch(name)):
            spots.append(Spot(factor[1], (naming.sizes.experts, *shape), entry.expert * math.prod(shape)))
            continue
        stack = EXPERT.fullmatch(name)
        if stack is None or entry.expert < 0:
            spots.append(Spot(name, shape))
            continue
        rows, columns = shape
        kind = stack[2] or MIXTRAL[stack[3]]
        down = kind == "down"
        whole = (naming.sizes.experts, rows if down else 2 * rows, columns)
        begin = (entry.expert * whole[1] + (rows if kind == "up" else 0)) * columns
        spots.append(Spot(f"{stack[1]}.{'down_proj' if down else 'gate_up_proj'}", whole, begin))
    return spots


@dataclass(slots=True, frozen=True)
class AdapterPart:
    """A layer of transformers within a layer of megatron-core.

    ``index`` is its place in the bridge's entry; -1 where the adapter is of the whole layer, as of an expert's gate
    and up. ``number`` is that of `LoraLinear`.
    """

    weight: str  # in transformers' model
    index: int
    number: int
    shape: tuple[int, int]  # [out, in]


@dataclass(slots=True, frozen=True)
class PlacedPart:
    """A part of a layer, with the entries of its factors: A, B and, with DoRA, magnitudes."""

    part: AdapterPart
    factors: tuple[Entry, ...]


def placed_parts(entry: Entry, naming: Naming, targets: Adapters, adapter: str) -> Iterator[PlacedPart]:
    """Parts of a layer that have factors; all experts' gates and ups have theirs together."""
    weights, factors = targets.weights(), factors_of(targets, targets.names[0])
    names = [spot.name for spot in spots(entry, naming)]
    chosen = [(index, name) for index, name in enumerate(names) if name in weights]
    if entry.expert >= 0:
        chosen = [(-1, name) for _, name in chosen[:1]]
    for index, name in chosen:
        shape = int(factors[name].b.shape[-2]), int(factors[name].a.shape[-1])
        one = AdapterPart(name, index, weights[name][0].number, shape)
        kinds = KINDS if targets.spec.use_dora else KINDS[:2]
        yield PlacedPart(one, tuple(_entry(entry, one, targets.spec.rank, adapter, factor) for factor in kinds))


def _entry(entry: Entry, one: AdapterPart, rank: int, adapter: str, factor: str) -> Entry:
    """Of a factor."""
    module, _, leaf = one.weight.rpartition(".")
    name, key = f"{module}.{factor}.{adapter}", f"{module}.{factor}"
    if entry.expert >= 0:
        name = f"{module}.{factor}.{leaf}.{adapter}.{entry.expert}"
        key = f"{module}.local_experts.{entry.expert}.{leaf}.{factor}"
    out, inputs = one.shape
    shape = {"lora_A": (rank, inputs), "lora_B": (out, rank)}.get(factor, (out,))
    kind = entry.kind if one.index < 0 or len(entry.hf) == 1 else "rows"
    if (factor == "lora_A") != (entry.kind == "columns"):
        kind = "whole"
    key = f"{ADAPTERS}{adapter}.{key}"
    return replace(entry, megatron=key, hf=(name,), kind=kind, layer=-1, shapes=(shape,))


@dataclass(slots=True, frozen=True)
class Origin:
    """Which factor a name of `placed_parts` is: of a weight, ``kind`` of KINDS; expert -1 where there are none."""

    weight: str
    kind: str
    expert: int


def origins(parts: Iterable[PlacedPart]) -> dict[str, Origin]:
    """By the names of factors."""
    return {
        entry.hf[0]: Origin(placed.part.weight, kind, entry.expert)
        for placed in parts
        for kind, entry in zip(KINDS, placed.factors)
    }


def whole_factors(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, Origin], targets: Adapters
) -> dict[str, Factors]:
    """Factors by weight, in the order of the model, of whole tensors by the names of entries; experts' are stacked."""
    stacks: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, origin in names.items():
        one = tensors[name][None] if origin.expert >= 0 else tensors[name]
        stacks.setdefault((origin.weight, origin.kind), []).append(one)
    of_kinds = {weight: [stacks[weight, kind] for kind in KINDS if (weight, kind) in stacks] for weight, _ in stacks}
    return {weight: Factors(*map(torch.cat, of_kinds[weight])) for weight in targets.weights()}
