# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The functions of `grouped` as Triton kernels.

Tiles of rows never cross from one matrix's rows to the next one's. A first kernel lists them on the device, so that
nothing waits for counts; programs then take tiles in order, all columns of a tile of rows before the next rows, which
leaves rows and matrices in the cache. Gradients of matrices are written in their dtype or added to float32 sums.
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
    persistent: bool = False


ROWS = GroupedTile(128, 256, 64, 8, 4, persistent=True)
GRADIENT = GroupedTile(128, 128, 64, 4, 3)
"""Of several tiles the fastest on an H100 for Qwen3-30B-A3B's experts with 512 rows each."""

LISTED = 64
"""Tiles that a program of the listing kernel places."""


@triton.jit
def _list_tiles(ends, tiles, experts, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, LISTED: tl.constexpr):
    """Write [matrix, first row, end of its rows] of every tile, and their number into the last entry."""
    number = tl.arange(0, EXPERTS)
    present = number < experts
    stop = tl.load(ends + number, mask=present, other=0)
    start = tl.load(ends + number - 1, mask=present & (number > 0), other=0)
    count = (tl.where(present, stop - start, 0) + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(count, 0)
    tile = tl.program_id(0) * LISTED + tl.arange(0, LISTED)
    expert = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    match = number[None, :] == expert[:, None]
    begin = (start - (last - count) * BLOCK_M)[None, :] + tile[:, None] * BLOCK_M
    tl.store(tiles + 1 + tile * 3, expert)
    tl.store(tiles + 2 + tile * 3, tl.sum(tl.where(match, begin, 0), 1))
    tl.store(tiles + 3 + tile * 3, tl.sum(tl.where(match, stop[None, :], 0), 1))
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.sum(count, 0))


@triton.jit
def _rows_product(
    x, weight, tiles, out, columns, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Runs of [rows, inputs] by their match [columns, inputs]^T, or [inputs, columns]."""
    across = tl.cdiv(columns, BLOCK_N)
    work = tl.load(tiles) * across
    for item in tl.range(tl.program_id(0), work, tl.num_programs(0), flatten=FLATTEN):
        entry = tiles + 1 + item // across * 3
        expert, top, stop = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        left = item % across * BLOCK_N
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
    grad, x, ends, out, step, experts, outputs, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """[run, outputs]^T by [run, inputs] of an expert, written to its [outputs, inputs] or added to it."""
    down, across = tl.cdiv(outputs, BLOCK_M), tl.cdiv(inputs, BLOCK_N)
    for item in tl.range(tl.program_id(0), experts * down * across, tl.num_programs(0), flatten=FLATTEN):
        expert = item // (down * across)
        top = item // across % down * BLOCK_M
        left = item % across * BLOCK_N
        stop = tl.load(ends + expert)
        start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
        full = start + (stop - start) // BLOCK_T * BLOCK_T
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(start, full, BLOCK_T):
            total = tl.dot(grad.load([begin, top]).T, x.load([begin, left]), total, input_precision=PRECISION)
        if full < stop:
            inside = full + tl.arange(0, BLOCK_T) < stop
            part = tl.where(inside[:, None], grad.load([full, top]), 0.0)
            total = tl.dot(part.T, x.load([full, left]), total, input_precision=PRECISION)
        row = top + tl.arange(0, BLOCK_M)
        column = left + tl.arange(0, BLOCK_N)
        place = out + expert.to(tl.int64) * step + row.to(tl.int64)[:, None] * inputs + column[None, :]
        mask = (row < outputs)[:, None] & (column < inputs)[None, :]
        if ADD:
            total += tl.load(place, mask=mask, other=0.0)
        tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum(rows, place, out, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of a token's rows, a program a token and part of the width."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for number in tl.static_range(COUNT):
        row = tl.load(place + token * COUNT + number).to(tl.int64)
        total += tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate_up, weights, out, width, BLOCK: tl.constexpr):
    """A row of silu(gate) * up * weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(grad, gate_up, weights, of_gate_up, of_weights, width, BLOCK: tl.constexpr):
    """A row of its gradients."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
        back = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        total += back * gate * share * up
        weighted = back * weight
        of_gate = weighted * up * share * (1 + gate * (1 - share))
        place = of_gate_up + row * 2 * width + column
        tl.store(place, of_gate.to(of_gate_up.dtype.element_ty), mask=inside)
        tl.store(place + width, (weighted * gate * share).to(of_gate_up.dtype.element_ty), mask=inside)
    tl.store(of_weights + row, tl.sum(total, 0).to(of_weights.dtype.element_ty))


def sum_rows(rows: Tensor, place: Tensor, count: int) -> Tensor:
    """Add the ``count`` rows of each token, whose places are ``place`` [tokens * count]: [tokens, width]."""
    tokens, width = len(place) // count, rows.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    out = rows.new_empty(tokens, width)
    _sum[(tokens, triton.cdiv(width, block))](rows, place, out, width, COUNT=count, BLOCK=block, num_warps=4)
    return out


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up * weight, [T, f]."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _swiglu[(rows,)](gate_up, weights, out, width, BLOCK=min(1024, triton.next_power_of_2(width)), num_warps=4)
    return out


def weighted_swiglu_backward(grad: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate_up`` and ``weights``."""
    rows, width = grad.shape
    of_gate_up, of_weights = torch.empty_like(gate_up), torch.empty_like(weights)
    block = min(1024, triton.next_power_of_2(width))
    _swiglu_backward[(rows,)](grad, gate_up, weights, of_gate_up, of_weights, width, BLOCK=block, num_warps=4)
    return of_gate_up, of_weights


def _listed_tiles(ends: Tensor, rows: int, height: int) -> Tensor:
    """Tiles of ``height`` rows that cover all runs: their number, then three int32 each."""
    most = triton.cdiv(triton.cdiv(rows, height) + len(ends), LISTED)
    tiles = torch.empty(1 + 3 * most * LISTED, dtype=torch.int32, device=ends.device)
    _list_tiles[(most,)](
        ends, tiles, len(ends), BLOCK_M=height, EXPERTS=triton.next_power_of_2(len(ends)), LISTED=LISTED
    )
    return tiles


def rows_product(x: Tensor, weight: Tensor, ends: Tensor, tile: GroupedTile = ROWS, *, transposed: bool) -> Tensor:
    """Multiply each run of rows by its match matrix.

    Args:
        x: [T, in], contiguous
        weight: [E, out, in] if ``transposed``, as in a forward pass, else [E, in, out]
        ends: [E] int32

    Returns:
        [T, out].
    """
    rows, inputs = x.shape
    columns = weight.shape[1 if transposed else 2]
    out = x.new_empty(rows, columns)
    tiles = _listed_tiles(ends, rows, tile.rows)
    block = [1, tile.columns, tile.sums] if transposed else [1, tile.sums, tile.columns]
    most = (triton.cdiv(rows, tile.rows) + len(weight)) * triton.cdiv(columns, tile.columns)
    _rows_product[_programs(x, most, tile)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.sums]), TensorDescriptor.from_tensor(weight, block),
        tiles, out, columns, inputs, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.sums,
        TRANSPOSED=transposed, PRECISION=_precision(x), FLATTEN=tile.persistent,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def gradient(grad: Tensor, x: Tensor, ends: Tensor, out: Tensor, tile: GroupedTile = GRADIENT, *, add: bool) -> None:
    """Write each expert's grad^T x to ``out``, or add it.

    Args:
        grad: [T, out]; x: [T, in]; ends: [E] int32
        out: [E, out, in], its matrices contiguous
    """
    experts, outputs, inputs = out.shape
    left, right = (
        TensorDescriptor.from_tensor(one, [tile.sums, n]) for one, n in ((grad, tile.rows), (x, tile.columns))
    )
    most = experts * triton.cdiv(outputs, tile.rows) * triton.cdiv(inputs, tile.columns)
    _gradient[_programs(x, most, tile)](
        left, right, ends, out, out.stride(0), experts, outputs, inputs,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_T=tile.sums, ADD=add, PRECISION=_precision(x),
        FLATTEN=tile.persistent, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _programs(x: Tensor, most: int, tile: GroupedTile) -> tuple[int]:
    if not tile.persistent:
        return (most,)
    return (min(most, torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3),)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
