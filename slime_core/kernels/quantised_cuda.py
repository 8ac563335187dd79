# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`quantised.dequantise` as a Triton kernel: one pass over the numbers; imported on a GPU alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
TILE = 4096
"""Floats of a program."""


@triton.jit(do_not_specialize=["count"])
def _dequantise(
    numbers, scales, table, out, count, BLOCK: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Number i stands in byte i / 2, an even one in its high bits, where they are PACKED; else in element i."""
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < count
    scale = tl.load(scales + place // BLOCK, mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        pair = tl.load(numbers + place // 2, mask=inside, other=0).to(tl.int32)
        value = tl.load(table + ((pair >> ((1 - place % 2) * 4).to(tl.int32)) & 15))
    else:
        value = tl.load(numbers + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (value * scale).to(out.dtype.element_ty), mask=inside)


def dequantise(numbers: Tensor, scales: Tensor, table: Tensor | None, block: int, dtype: torch.dtype) -> Tensor:
    """See `quantised.dequantise`; ``table`` has the values of 4-bit numbers, without it they are float8."""
    packed = table is not None
    source = numbers if packed else numbers.view(torch.float8_e4m3fn)
    shape = (*numbers.shape[:-1], numbers.shape[-1] * (2 if packed else 1))
    out = torch.empty(shape, dtype=dtype, device=numbers.device)
    grid = (triton.cdiv(out.numel(), TILE),)
    _dequantise[grid](source, scales, table, out, out.numel(), BLOCK=block, PACKED=packed, TILE=TILE)
    return out
