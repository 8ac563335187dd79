# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Grouped products as Triton kernels, for `bench_experts.py` alone: what smaller tiles give, and sums in place.

On Hopper torch's grouped kernel takes bfloat16 in clusters of two tiles of 128 rows by 256 columns, and its products
do not overlap a tile's end with the next one's begin. Gradients of weights are rounded to bfloat16 before they are
added to float32 ones. Here a program finds its expert on the device, several programs share a processor, and
gradients are added in float32 within their product. `tests/unit/kernels/interpreted_grouped.py` holds the numbers in
Triton's interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

Tensor = torch.Tensor


class GroupedTile(NamedTuple):
    """Of a program: rows (outputs, for gradients), columns, what is summed at once; warps and stages."""

    rows: int
    columns: int
    sums: int
    warps: int
    stages: int


TILES = {
    "128x128": GroupedTile(128, 128, 64, 8, 3),  # two programs a processor of an H100
    "128x256": GroupedTile(128, 256, 64, 8, 3),
    "64x256": GroupedTile(64, 256, 64, 8, 4),
}


@triton.jit
def _place(ends, experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """The expert of this program's tile of rows, the tile's first row, and where the expert's rows end."""
    number = tl.arange(0, EXPERTS)
    present = number < experts
    stop = tl.load(ends + number, mask=present, other=0)
    start = tl.load(ends + number - 1, mask=present & (number > 0), other=0)
    tiles = (tl.where(present, stop - start, 0) + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, 0)
    program = tl.program_id(0)
    expert = tl.sum((last <= program).to(tl.int32), 0)
    own = number == expert
    first = tl.sum(tl.where(own, start + (program - (last - tiles)) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(own, stop, 0), 0)


@triton.jit
def _rows_product(
    x, weight, ends, out, experts, columns, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Runs of [rows, inputs] by their own [columns, inputs]^T, or [inputs, columns]."""
    expert, top, stop = _place(ends, experts, BLOCK_M, EXPERTS)
    left = tl.program_id(1) * BLOCK_N
    if expert < experts:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, inputs, BLOCK_K):
            if TRANSPOSED:
                part = weight.load([expert, left, begin]).reshape(BLOCK_N, BLOCK_K).T
            else:
                part = weight.load([expert, begin, left]).reshape(BLOCK_K, BLOCK_N)
            total = tl.dot(x.load([top, begin]), part, total, input_precision=PRECISION)
        row = top + tl.arange(0, BLOCK_M)
        column = left + tl.arange(0, BLOCK_N)
        place = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(row < stop)[:, None] & (column < columns)[None, :])


@triton.jit
def _gradient(
    grad, x, ends, out, step, outputs, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds [run, outputs]^T by [run, inputs] to an expert's [outputs, inputs]."""
    expert, top, left = tl.program_id(0), tl.program_id(1) * BLOCK_M, tl.program_id(2) * BLOCK_N
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(start, stop, BLOCK_T):
        inside = begin + tl.arange(0, BLOCK_T) < stop
        part = tl.where(inside[:, None], grad.load([begin, top]), 0.0)
        total = tl.dot(part.T, x.load([begin, left]), total, input_precision=PRECISION)
    row = top + tl.arange(0, BLOCK_M)
    column = left + tl.arange(0, BLOCK_N)
    place = out + expert.to(tl.int64) * step + row.to(tl.int64)[:, None] * inputs + column[None, :]
    mask = (row < outputs)[:, None] & (column < inputs)[None, :]
    tl.store(place, tl.load(place, mask=mask, other=0.0) + total, mask=mask)


def rows_product(x: Tensor, weight: Tensor, ends: Tensor, tile: GroupedTile, *, transposed: bool) -> Tensor:
    """Multiply each run of rows by its own matrix.

    Args:
        x: [T, in], contiguous
        weight: [E, out, in] if ``transposed``, as in a forward pass, else [E, in, out]
        ends: [E] int32, where runs end

    Returns:
        [T, out].
    """
    (rows, inputs), experts = x.shape, len(weight)
    columns = weight.shape[1 if transposed else 2]
    out = x.new_empty(rows, columns)
    block = [1, tile.columns, tile.sums] if transposed else [1, tile.sums, tile.columns]
    grid = (triton.cdiv(rows, tile.rows) + experts, triton.cdiv(columns, tile.columns))
    _rows_product[grid](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.sums]), TensorDescriptor.from_tensor(weight, block),
        ends, out, experts, columns, inputs,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.sums, EXPERTS=triton.next_power_of_2(experts),
        TRANSPOSED=transposed, PRECISION=_precision(x), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def add_gradient(total: Tensor, grad: Tensor, x: Tensor, ends: Tensor, tile: GroupedTile) -> None:
    """Add each expert's grad^T x to ``total``.

    Args:
        total: [E, out, in] float32, its matrices contiguous
        grad: [T, out]; x: [T, in]; ends: [E] int32
    """
    experts, outputs, inputs = total.shape
    grid = (experts, triton.cdiv(outputs, tile.rows), triton.cdiv(inputs, tile.columns))
    left, right = (
        TensorDescriptor.from_tensor(one, [tile.sums, n]) for one, n in ((grad, tile.rows), (x, tile.columns))
    )
    _gradient[grid](
        left, right, ends, total, total.stride(0), outputs, inputs,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_T=tile.sums, PRECISION=_precision(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
