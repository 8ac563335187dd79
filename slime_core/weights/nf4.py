"""Weights in nf4 as bitsandbytes packs them (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

    NAME.weight                                   bytes: numbers 2 k and 2 k + 1 of the flattened weight are the high
                                                  and the low bits of byte k, indices of `NF4`
    NAME.weight.absmax                            float32, a scale for each block of the flattened weight
    NAME.weight.quant_state.bitsandbytes__nf4     JSON: shape, dtype, block size
with double quantisation
    NAME.weight.absmax                            uint8, indices of nested_quant_map
    NAME.weight.nested_quant_map, .nested_absmax  scale = map[index] * scale of its block of scales + offset
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_core.weights.tensor_info import Read, TensorInfo

if TYPE_CHECKING:
    import torch

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of a 4-bit number (QLoRA, appendix E)."""

STATE = ".quant_state.bitsandbytes__nf4"
NUMBERS, SCALES, MAP = "", ".absmax", ".quant_map"
NESTED_SCALES, NESTED_MAP = ".nested_absmax", ".nested_quant_map"
PARTS = (NUMBERS, SCALES, MAP, NESTED_SCALES, NESTED_MAP)
"""Ends of the names of what a weight is stored in."""
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(slots=True, frozen=True)
class Nf4Format:
    """How a model is stored that bitsandbytes holds in nf4; its weights say the rest themselves."""

    height = 1  # rows that share a scale
    form = "nf4 of bitsandbytes"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Nf4Format | None:
        """The format that a config.json states; None where it states none, or one that is not read here."""
        table = config.get("quantization_config")
        if not isinstance(table, dict) or table.get("quant_method", "bitsandbytes") != "bitsandbytes":
            return None
        return cls() if table.get("load_in_4bit") and table.get("bnb_4bit_quant_type") == "nf4" else None


@dataclass(slots=True, frozen=True)
class NestedScales:
    """Double quantisation: what scales of 8 bits are computed from."""

    values: TensorInfo
    scales: TensorInfo
    block: int
    offset: float


@dataclass(slots=True, frozen=True)
class Nf4Weight:
    """Some rows of a weight in nf4."""

    form: Nf4Format
    numbers: TensorInfo  # of the whole weight, as are the scales
    scales: TensorInfo
    block: int
    nested: NestedScales | None
    dtype: str  # of the values
    shape: tuple[int, ...]
    first: int = 0  # number of the flattened weight

    @classmethod
    def of(cls, parts: Mapping[str, TensorInfo | None], state: bytes) -> Nf4Weight:
        """A whole weight, from `PARTS` that its folder has.

        Raises:
            ValueError, KeyError, TypeError: parts that are missing or of other sizes than ``state`` says.
        """
        table = json.loads(state)
        shape, block = tuple(table["shape"]), table["blocksize"]
        count = math.prod(shape)
        if not (all(type(n) is int and n > 0 for n in (*shape, block)) and table["dtype"] in DTYPES):
            raise ValueError(f"its state is {state.decode()}")
        numbers = _sized(parts, NUMBERS, -(-count // 2), None)
        length = -(-count // block)
        scales = _sized(parts, SCALES, length, "U8" if "nested_offset" in table else "F32")
        nested = None
        if scales.dtype == "U8":
            size = table["nested_blocksize"]
            scales_of_scales = _sized(parts, NESTED_SCALES, -(-length // size), "F32")
            nested = NestedScales(
                _sized(parts, NESTED_MAP, 256, "F32"), scales_of_scales, size, float(table["nested_offset"])
            )
        return cls(Nf4Format(), numbers, scales, block, nested, table["dtype"], shape)

    def rows(self, first: int, count: int) -> Nf4Weight:
        """Of these rows, ``count`` from ``first`` on."""
        width = math.prod(self.shape[1:])
        return replace(self, first=self.first + first * width, shape=(count, *self.shape[1:]))

    def values(self, read: Read) -> torch.Tensor:
        """The floats: products in float32, rounded to the dtype that the folder says."""
        import torch

        first, count = self.first, math.prod(self.shape)
        start, end = first // 2, -(-(first + count) // 2)
        packed = read(self.numbers.rows(start, end - start))
        numbers = torch.stack((packed >> 4, packed & 15), -1).flatten()[first % 2 :][:count]
        blocks = first // self.block
        scales = self._scales(read, blocks, -(-(first + count) // self.block) - blocks)
        spread = scales.repeat_interleave(self.block)[first % self.block :][:count]
        dtype: torch.dtype = getattr(torch, self.dtype)
        return (torch.tensor(NF4)[numbers.int()] * spread).to(dtype).view(self.shape)

    def parts(self, read: Read) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Numbers uint8 [rows, columns / 2] and scales float32 [rows, columns / block]; None of blocks of two rows."""
        rows, columns = self.shape
        if columns % self.block or self.first % self.block:
            return None
        numbers = read(self.numbers.rows(self.first // 2, rows * columns // 2))
        scales = self._scales(read, self.first // self.block, rows * columns // self.block)
        return numbers.view(rows, -1), scales.view(rows, -1)

    def _scales(self, read: Read, first: int, count: int) -> torch.Tensor:
        """Of ``count`` blocks; float32."""
        scales, nested = read(self.scales.rows(first, count)), self.nested
        if nested is None:
            return scales
        start, end = first // nested.block, -(-(first + count) // nested.block)
        largest = read(nested.scales.rows(start, end - start)).repeat_interleave(nested.block)
        return read(nested.values)[scales.int()] * largest[first % nested.block :][:count] + nested.offset


def _sized(parts: Mapping[str, TensorInfo | None], key: str, count: int, dtype: str | None) -> TensorInfo:
    """A part as one row of ``count`` elements; without ``dtype`` these are its bytes."""
    info = parts[key]
    if info is None:
        raise ValueError(f"there is no {key.removeprefix('.')}")
    size = info.end - info.begin if dtype is None else math.prod(info.shape)
    if size != count or dtype not in (None, info.dtype):
        raise ValueError(f"{info.name} has shape {list(info.shape)} {info.dtype}, and {count} numbers are needed")
    return replace(info, shape=(count,), dtype=dtype or "U8")
