# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The functions of `grouped` as Triton kernels.

Products of rows, and gradients in half precision, are torch's: Triton's took the same time for Qwen3-30B-A3B's experts
on an H200. torch's product cannot add to a float32 gradient, which saves the way of a gradient to memory and back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

Tensor = torch.Tensor


class GroupedTile(NamedTuple):
    """Of a program: outputs, inputs, rows that are summed at once; warps and stages."""

    outputs: int
    inputs: int
    rows: int
    warps: int
    stages: int


GRADIENT = GroupedTile(128, 128, 64, 4, 3)
"""Of several tiles the fastest on an H200 for Qwen3-30B-A3B's experts with 512 rows each."""


@triton.jit
def _add_gradient(
    grad, x, ends, total, step, outputs, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add [run, outputs]^T by [run, inputs] to an expert's [outputs, inputs], a program a tile of it.

    Programs of an expert follow one another, so that its rows stay in the cache; what is there is the sum's beginning.
    """
    down, across = tl.cdiv(outputs, BLOCK_M), tl.cdiv(inputs, BLOCK_N)
    program = tl.program_id(0)
    expert = program // (down * across)
    top = program // across % down * BLOCK_M
    left = program % across * BLOCK_N
    row = top + tl.arange(0, BLOCK_M)
    column = left + tl.arange(0, BLOCK_N)
    place = total + expert.to(tl.int64) * step + row.to(tl.int64)[:, None] * inputs + column[None, :]
    mask = (row < outputs)[:, None] & (column < inputs)[None, :]
    stop = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    full = start + (stop - start) // BLOCK_T * BLOCK_T
    if start < stop:
        sums = tl.load(place, mask=mask, other=0.0)
        for begin in range(start, full, BLOCK_T):
            sums = tl.dot(grad.load([begin, top]).T, x.load([begin, left]), sums, input_precision=PRECISION)
        if full < stop:
            inside = full + tl.arange(0, BLOCK_T) < stop
            part = tl.where(inside[:, None], grad.load([full, top]), 0.0)
            sums = tl.dot(part.T, x.load([full, left]), sums, input_precision=PRECISION)
        tl.store(place, sums, mask=mask)


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


def add_gradient(total: Tensor, grad: Tensor, x: Tensor, ends: Tensor, tile: GroupedTile = GRADIENT) -> None:
    """Add each expert's grad^T x to ``total``.

    Args:
        total: [E, out, in] float32, its matrices contiguous
        grad: [T, out]; x: [T, in]; ends: [E] int32
    """
    experts, outputs, inputs = total.shape
    left, right = (
        TensorDescriptor.from_tensor(one, [tile.rows, width])
        for one, width in ((grad, tile.outputs), (x, tile.inputs))
    )
    programs = experts * triton.cdiv(outputs, tile.outputs) * triton.cdiv(inputs, tile.inputs)
    _add_gradient[(programs,)](
        left, right, ends, total, total.stride(0), outputs, inputs,
        BLOCK_M=tile.outputs, BLOCK_N=tile.inputs, BLOCK_T=tile.rows,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
