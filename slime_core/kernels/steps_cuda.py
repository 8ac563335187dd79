# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`steps.read_rows` and `steps.move_on` as Triton kernels: one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
COLUMNS = 256
"""Pages that a program copies at once."""


@triton.jit
def _read(
    state, tables, index, wide, lengths, numbers, columns, stride, pitch, width,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``wide`` [6, pitch] int64 and ``numbers`` [2, pitch] float32 in the order of `steps.SequenceRows`."""
    row = tl.program_id(0)
    at = tl.load(index + row)
    token = tl.load(state + at)
    position = tl.load(state + stride + at)
    page = tl.load(tables + at * width + position // PAGE).to(tl.int64)
    tl.store(wide + row, token)
    tl.store(wide + pitch + row, position)
    tl.store(wide + 2 * pitch + row, page * PAGE + position % PAGE)
    tl.store(wide + 3 * pitch + row, tl.load(state + 2 * stride + at))
    tl.store(wide + 4 * pitch + row, position + tl.load(state + 6 * stride + at))
    tl.store(wide + 5 * pitch + row, tl.load(state + 3 * stride + at))
    tl.store(lengths + row, (position + 1).to(tl.int32))
    for number in tl.static_range(2):
        bits = tl.load(state + (4 + number) * stride + at).to(tl.int32)
        tl.store(numbers + number * pitch + row, bits.to(tl.float32, bitcast=True))
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < width
        tl.store(columns + row * width + column, tl.load(tables + at * width + column, mask=inside), mask=inside)


@triton.jit
def _move(state, index, following, tokens, log_probs, plain, out, stride, count):
    row = tl.program_id(0)
    at = tl.load(index + row)
    token = tl.load(tokens + row)
    tl.store(state + at, token)
    tl.store(state + stride + at, tl.load(following + row))
    tl.store(out + row, token.to(tl.int32))
    tl.store(out + count + row, tl.load(log_probs + row).to(tl.int32, bitcast=True))
    tl.store(out + 2 * count + row, tl.load(plain + row).to(tl.int32, bitcast=True))


def read_rows(state: Tensor, tables: Tensor, index: Tensor, page_size: int) -> tuple[Tensor, ...]:
    """See `steps.read_rows`."""
    count, width = len(index), tables.shape[1]
    pitch = -(-count // 4) * 4  # what a row begins with is aligned for any count: kernels are compiled once
    wide = state.new_empty(6, pitch)
    lengths = torch.empty(count, dtype=torch.int32, device=state.device)
    numbers = torch.empty(2, pitch, dtype=torch.float32, device=state.device)
    columns = torch.empty(count, width, dtype=torch.int32, device=state.device)
    _read[(count,)](
        state, tables, index, wide, lengths, numbers, columns, state.stride(0), pitch, width, PAGE=page_size,
        BLOCK=COLUMNS,
    )  # fmt: skip
    wide, numbers = wide[:, :count], numbers[:, :count]
    return *wide[:3], lengths, *wide[3:], *numbers, columns


def move_on(
    state: Tensor, index: Tensor, following: Tensor, tokens: Tensor, log_probs: Tensor, plain: Tensor
) -> Tensor:
    """See `steps.move_on`."""
    out = torch.empty(3, len(index), dtype=torch.int32, device=state.device)
    _move[(len(index),)](state, index, following, tokens, log_probs, plain, out, state.stride(0), len(index))
    return out
