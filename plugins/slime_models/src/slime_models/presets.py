"""Published models by name, from `presets.toml`, and how many parameters a config makes; nothing is downloaded."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_convert.bridge import Bridge

FILE = Path(__file__).with_name("presets.toml")


@dataclass(slots=True, frozen=True, kw_only=True)
class Preset:
    """A published model: ``source`` is its name on the hub, ``config`` holds the attributes of its config.json."""

    name: str
    source: str
    config: SimpleNamespace


@cache
def presets() -> dict[str, Preset]:
    """Every preset, in the order of the file."""
    groups = tomllib.loads(FILE.read_text())
    presets_by_name = {}
    for group in groups.values():
        common = group.pop("common")
        for name, table in group.items():
            source = table.pop("source")
            presets_by_name[name] = Preset(name=name, source=source, config=SimpleNamespace(**common, **table))
    return presets_by_name


@dataclass(slots=True, frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters: all, those that one token passes, and all but embedding and output matrix."""

    total: int
    active: int
    beside_embeddings: int


def count(bridge: Bridge, config: Any) -> ParameterCounts:
    """Parameters of a model, from the shapes of its entries alone; the bias that only chooses experts is none."""
    fields = bridge.megatron(config)
    chosen, experts = int(fields.get("moe_router_topk") or 0), int(fields.get("num_moe_experts") or 0)
    total = routed = ends = 0
    for entry in bridge.entries(config):
        if entry.megatron.endswith(".expert_bias"):
            continue
        number = sum(math.prod(shape) for shape in entry.shapes)
        total += number
        routed += number if entry.expert >= 0 else 0
        ends += number if entry.kind == "vocabulary" else 0
    idle = routed - routed * chosen // experts if experts else 0
    return ParameterCounts(total=total, active=total - idle, beside_embeddings=total - ends)


def short(number: int) -> str:
    """``1.03T``, ``4.02B``, ``494M``: three digits."""
    unit, name = next((unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if number >= unit)
    return f"{number / unit:.3g}{name}"
