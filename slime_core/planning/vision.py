"""The part of a model that sees, as a plan counts it: sizes by the names of its weights, and bytes of a patch.

Numbers that a layer keeps of a patch for its backward pass, h its width and f its MLP's, as transformers writes it:

    one product of queries, keys and values, turned    norms' inputs and outputs 4h, qkv 3h, turned 2h, output h, 2f
    three products, not turned                         4h, 3h, h, 2f
    with a gate (Qwen2.5-VL)                           the same, norms' inputs in float32, windows h, 4f
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PART = re.compile(r"(^|\.)(visual|vision_tower|vision_model|connector|multi_modal_projector)\.")
LAYER = re.compile(r"\.(?:blocks|layers)\.(\d+)\.")
DEEPER = re.compile(r"deepstack_merger_list\.(\d+)\.")
MERGER = 4  # numbers in times of h that a merger keeps of a patch
TURNING = 16  # bytes in times of h: queries and keys in float32, and their halves turned


@dataclass(slots=True, frozen=True, kw_only=True)
class VisionSizes:
    """Vision layers and the projector after them."""

    numbers: int  # of all weights
    inside: int  # of those of layers
    layers: int
    hidden: int
    inner: int
    gated: bool
    joined: bool  # queries, keys and values are one product, and turned
    deeper: int  # features that go to deeper text layers
    pixels: int  # numbers of a patch
    patches: int  # that become one token

    @classmethod
    def of(cls, weights: Mapping[str, tuple[int, ...]], config: Any) -> VisionSizes | None:
        """None for a model of text alone.

        Args:
            weights: shapes by name
            config: of the model, by attributes
        """
        shapes = {name: shape for name, shape in weights.items() if PART.search(name)}
        numbers = {name: int(match[1]) for name in shapes if (match := LAYER.search(name))}
        first = {name.rpartition(".")[0].rpartition(".")[2]: shapes[name] for name in numbers if not numbers[name]}
        patch = next((shape for shape in shapes.values() if len(shape) > 3), None)
        wide = first.get("fc1") or first.get("linear_fc1") or first.get("gate_proj")
        if wide is None or patch is None:
            return None
        deeper = {match[1] for name in shapes if (match := DEEPER.search(name))}
        side = int((config.vision_config or {}).get("spatial_merge_size") or config.scale_factor or 2)
        return cls(
            numbers=sum(map(math.prod, shapes.values())),
            inside=sum(math.prod(shapes[name]) for name in numbers),
            layers=max(numbers.values()) + 1,
            hidden=patch[0],
            inner=max(size for name in ("fc1", "linear_fc1", "gate_proj") for size in first.get(name, (0,))[:1]),
            gated="gate_proj" in first,
            joined="qkv" in first,
            deeper=len(deeper),
            pixels=math.prod(patch[1:]),
            patches=side * side,
        )

    def saved(self, itemsize: int) -> float:
        """Bytes of a patch from the forward pass to the backward pass, in all layers and the projector."""
        norms = 2 * (4 + 2 * itemsize) if self.gated else 4 * itemsize
        attention = (4 + 2 * self.joined + self.gated) * itemsize
        layer = (norms + attention) * self.hidden + (4 if self.gated else 2) * self.inner * itemsize
        merger = itemsize * self.hidden * MERGER * (1 + self.deeper)
        return self.layers * layer + merger + self.pixels * itemsize

    def passing(self, itemsize: int) -> float:
        """Bytes of a patch for a while, in a pass that keeps nothing."""
        attention = 7 * itemsize + (TURNING if self.joined else 0)
        mlp = itemsize * (2 * self.hidden + (3 if self.gated else 2) * self.inner)
        return max(attention * self.hidden, mlp)

    def resting(self, hidden: int, itemsize: int) -> float:
        """Bytes of a patch as long as its pack is there: float32 pixels, and features of the text model's width."""
        return 4 * self.pixels + (1 + self.deeper) * hidden * itemsize / self.patches
