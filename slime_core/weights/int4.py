"""Weights in int4 as compressed-tensors packs them: eight of a row in an int32, a scale for each group of a row.

NAME.weight_packed  int32 [rows, columns / 8]: column 8 k + i is bits 4 i to 4 i + 3 of number k, plus 8
NAME.weight_scale   float [rows, columns / group]        value = (number - 8) * scale of its group
NAME.weight_shape   rows, columns
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PACKED = ".weight_packed"
EACH = 8  # numbers in an int32
ZERO = 8  # what stands for 0
ORDERS = (None, False, "static", "weight")  # values of actorder with which a group is of adjacent columns


@dataclass(slots=True, frozen=True)
class PackedFormat:
    """How a model is stored in int4.

    Example:
        packed_format = PackedFormat.of(json.loads((folder / "config.json").read_bytes()))
    """

    group: int = 32  # columns

    height = 1  # rows that share a scale
    form = 'symmetric "pack-quantized" int4 of compressed-tensors in groups of adjacent columns'

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> PackedFormat | None:
        """The format that a config.json states; None where it states none, or one that is not read here."""
        table = config.get("quantization_config")
        if not isinstance(table, dict) or table.get("format") != "pack-quantized":
            return None
        groups = list((table.get("config_groups") or {}).values())
        weights = groups[0].get("weights") if len(groups) == 1 and isinstance(groups[0], dict) else None
        if not isinstance(weights, dict):
            return None
        sizes, group = (weights.get("num_bits"), weights.get("symmetric")), weights.get("group_size")
        plain = sizes == (4, True) and weights.get("actorder") in ORDERS
        return cls(group) if plain and type(group) is int and group > 0 else None

    def names(self, stored: str) -> tuple[str, str, tuple[str, ...]]:
        """Of a stored weight: the weight's own name, that of its scales, and those of what says nothing more."""
        name = stored.removesuffix("_packed")
        return name, f"{name}_scale", (f"{name}_shape",)

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Of the weight, whose packed numbers have two axes."""
        return stored[0], stored[1] * EACH

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of the scales of a weight of ``shape``."""
        return shape[0], -(-shape[1] // self.group)

    def dequantise(self, packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values of packed numbers [rows, columns / 8]: products in float32, rounded to ``dtype``."""
        import torch

        shifts = torch.arange(EACH, dtype=torch.int32, device=packed.device) * 4
        numbers = ((packed[..., None] >> shifts) & 15).flatten(1).float() - ZERO
        return (numbers * scales.float().repeat_interleave(self.group, 1)[:, : numbers.shape[1]]).to(dtype)
