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
def _nf4(numbers, scales, table, out, count, HALF: tl.constexpr, TILE: tl.constexpr):
    """Of ``count`` bytes each is two floats, its high bits first; HALF bytes share a scale."""
    first = tl.program_id(0).to(tl.int64) * TILE
    place = tl.arange(0, TILE)
    inside = place < count - first
    pair = tl.load(numbers + first + place, mask=inside, other=0).to(tl.int32)
    block = (first % HALF).to(tl.int32) + place
    scale = tl.load(scales + first // HALF + block // HALF, mask=inside, other=0.0).to(tl.float32)
    high, low = tl.load(table + (pair >> 4)) * scale, tl.load(table + (pair & 15)) * scale
    both = tl.arange(0, 2 * TILE)
    values = tl.interleave(high, low).to(out.dtype.element_ty)
    tl.store(out + 2 * first + both, values, mask=both < 2 * (count - first))


@triton.jit(do_not_specialize=["count"])
def _fp8(numbers, scales, out, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Of ``count`` numbers each is a float, and BLOCK share a scale."""
    first = tl.program_id(0).to(tl.int64) * TILE
    place = tl.arange(0, TILE)
    inside = place < count - first
    block = (first % BLOCK).to(tl.int32) + place
    scale = tl.load(scales + first // BLOCK + block // BLOCK, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(numbers + first + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first + place, (value * scale).to(out.dtype.element_ty), mask=inside)


def dequantise(numbers: Tensor, scales: Tensor, table: Tensor | None, block: int, out: Tensor) -> None:
    """See `quantised.dequantise`; ``table`` has the values of 4-bit numbers, without it they are float8."""
    count, tile = numbers.numel(), TILE // 2 if table is not None else TILE
    grid = (triton.cdiv(count, tile),)
    if table is not None:
        _nf4[grid](numbers, scales, table, out, count, HALF=block // 2, TILE=tile)
    else:
        _fp8[grid](numbers.view(torch.float8_e4m3fn), scales, out, count, BLOCK=block, TILE=tile)
