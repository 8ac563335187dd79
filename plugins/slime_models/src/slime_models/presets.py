"""Published models by name, from `presets.toml`, and how many parameters a config makes; nothing is downloaded."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_convert.bridge import Bridge

FILE = Path(__file__).with_name("presets.toml")
PARTS = ("text_config", "vision_config")


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
            presets_by_name[name] = Preset(name=name, source=source, config=_joined(common, table))
    return presets_by_name


def _joined(common: dict[str, Any], table: dict[str, Any]) -> SimpleNamespace:
    """Attributes of both; those of text and of a tower have attributes themselves."""
    inner = {key: _joined(common[key], table[key]) for key in PARTS if key in common}
    return SimpleNamespace(**{**common, **table, **inner})


@dataclass(slots=True, frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters: all, those that one token passes, and all but embedding and output matrix."""

    total: int
    active: int
    beside_embeddings: int


def count(bridge: Bridge, config: Any) -> ParameterCounts:
    """Parameters of a model, from the shapes of its entries, and of its tower if it sees pictures.

    The bias that only chooses experts is none.
    """
    fields = bridge.megatron(config)
    chosen, experts = int(fields.get("moe_router_topk") or 0), int(fields.get("num_moe_experts") or 0)
    total = routed = ends = 0
    for entry in replace(bridge, tower="").entries(config, experts=1):  # a tower's need transformers
        if entry.megatron.endswith(".expert_bias"):
            continue
        number = sum(math.prod(shape) for shape in entry.shapes) * (experts if entry.expert >= 0 else 1)
        total += number
        routed += number if entry.expert >= 0 else 0
        ends += number if entry.kind == "vocabulary" else 0
    total += _tower(config.vision_config) if bridge.tower else 0
    idle = routed - routed * chosen // experts if experts else 0
    return ParameterCounts(total=total, active=total - idle, beside_embeddings=total - ends)


def _tower(vision: Any) -> int:
    """Parameters of the tower and projector of Qwen2.5-VL, or of Qwen3-VL, whose layers have no gates."""
    hidden, inner, joined = (
        vision.hidden_size,
        vision.intermediate_size,
        vision.hidden_size * vision.spatial_merge_size**2,
    )
    patches = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * hidden
    merger = joined**2 + joined + joined * vision.out_hidden_size + vision.out_hidden_size
    attention = 4 * hidden**2 + 4 * hidden
    deep = getattr(vision, "deepstack_visual_indexes", None)
    if deep is None:
        layer = attention + 2 * hidden + 3 * hidden * inner + 2 * inner + hidden
        return int(patches + vision.depth * layer + hidden + merger)
    layer = attention + 4 * hidden + 2 * hidden * inner + inner + hidden
    mergers = 2 * hidden + merger + len(deep) * (2 * joined + merger)
    return int(patches + hidden + vision.num_position_embeddings * hidden + vision.depth * layer + mergers)


def short(number: int) -> str:
    """``1.03T``, ``4.02B``, ``494M``: three digits."""
    unit, name = next((unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if number >= unit)
    return f"{number / unit:.3g}{name}"
