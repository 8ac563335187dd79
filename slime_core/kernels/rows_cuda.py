# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Norm, rotary and gated activation as Triton kernels, forward and backward; imported on a GPU alone.

Tiles depend on the width of a row only, so a row's sums have one order whatever lies around it. Gradients of norm
weights are summed in two stages, without atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
TILE = 4096
"""Numbers of a tile of whole rows."""

BACKWARD_TILE = 2048
"""The same in the backward pass of a norm, which has more of them in registers."""

PROGRAMS = 528
"""Partial sums of a norm weight's gradient, at most: four programs a processor of an H100."""

COLUMNS = 1024


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, residual, total, weight, out, rows, eps, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + place, value, mask=inside)
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if LATE:
        result = normed * (offset + factor)
    else:
        result = normed.to(value.dtype).to(tl.float32) * factor
    tl.store(out + place, result.to(value.dtype), mask=inside)


@triton.jit(do_not_specialize=["rows", "share"])
def _norm_backward(
    grad, d_total, x, weight, d_x, partial, rows, share, eps, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """``share`` tiles of rows a program, whose weight gradients are summed in their order."""
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    if LATE:
        factor += offset
    summed = tl.zeros((BLOCK,), tl.float32)
    for tile in range(share):
        row = (tl.program_id(0) * share + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(x + place, mask=inside, other=0.0)
        slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
        normed = wide * inverse
        d_normed = slope * factor
        result = inverse * (d_normed - normed * (tl.sum(d_normed * normed, 1) / WIDTH)[:, None])
        if ADD:
            result += tl.load(d_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + place, result.to(value.dtype), mask=inside)
        if not LATE:
            normed = normed.to(value.dtype).to(tl.float32)
        summed += tl.sum(slope * normed, 0)
    tl.store(partial + tl.program_id(0) * WIDTH + column, summed, mask=column < WIDTH)


@triton.jit
def _rounded(value, like):
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _turn_heads(x, out, row, stride, c1, c2, s1, s2, HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr,
                BLOCK_H: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    half: tl.constexpr = TURNED // 2
    inside = (head < HEADS) & (column < half)
    source = x + row * stride + head * DIM + column
    target = out + row * (HEADS * DIM) + head * DIM + column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    one = _rounded(first * c1, x) - _rounded(second * s1, x)
    other = _rounded(second * c2, x) + _rounded(first * s2, x)
    tl.store(target, one.to(x.dtype.element_ty), mask=inside)
    tl.store(target + half, other.to(x.dtype.element_ty), mask=inside)
    if TURNED < DIM:
        column = TURNED + tl.arange(0, REST)[None, :]
        inside = (head < HEADS) & (column < DIM)
        value = tl.load(x + row * stride + head * DIM + column, mask=inside, other=0.0)
        tl.store(out + row * (HEADS * DIM) + head * DIM + column, value, mask=inside)


@triton.jit
def _turn(
    q, k, q_out, k_out, cos, sin, q_stride, k_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """One row's heads; ``BACK`` applies the transposed rotation."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    half: tl.constexpr = TURNED // 2
    place = row * TURNED + column
    c1 = _rounded(tl.load(cos + place, mask=column < half, other=0.0).to(tl.float32), q)
    c2 = _rounded(tl.load(cos + place + half, mask=column < half, other=0.0).to(tl.float32), q)
    s1 = _rounded(tl.load(sin + place, mask=column < half, other=0.0).to(tl.float32), q)
    s2 = _rounded(tl.load(sin + place + half, mask=column < half, other=0.0).to(tl.float32), q)
    if BACK:
        s1, s2 = -s2, -s1
    _turn_heads(q, q_out, row, q_stride, c1, c2, s1, s2, Q_HEADS, DIM, TURNED, Q_BLOCK, BLOCK, REST)
    _turn_heads(k, k_out, row, k_stride, c1, c2, s1, s2, K_HEADS, DIM, TURNED, K_BLOCK, BLOCK, REST)


@triton.jit
def _activate(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = gate_up + row * (2 * WIDTH) + column
    value = tl.load(place, mask=inside, other=0.0)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    x = value.to(tl.float32)
    z = x if SILU else 1.5957691216057308 * (x + 0.044715 * x * x * x)
    active = (x * tl.sigmoid(z)).to(value.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (active * up).to(value.dtype), mask=inside)


@triton.jit
def _activate_backward(grad, gate_up, d_both, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = row * (2 * WIDTH) + column
    slope = tl.load(grad + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate_up + place, mask=inside, other=0.0)
    up = tl.load(gate_up + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    x = value.to(tl.float32)
    if SILU:
        s = tl.sigmoid(x)
        d_active = s + x * s * (1 - s)
    else:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        d_active = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    active = (x * s).to(value.dtype).to(tl.float32)
    tl.store(d_both + place, (slope * up * d_active).to(value.dtype), mask=inside)
    tl.store(d_both + place + WIDTH, (slope * active).to(value.dtype), mask=inside)


def norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """See `norm.add_rms_norm`; without a residual the sum is ``x``."""
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    block, tile = _tiles(width)
    if rows:
        _norm[(triton.cdiv(rows, tile),)](
            _aligned(x), x if residual is None else _aligned(residual), total, weight, out, rows, eps, offset,
            WIDTH=width, BLOCK=block, ROWS=tile, ADD=residual is not None, LATE=offset != 0, num_warps=_warps(block),
        )  # fmt: skip
    return out, total


def norm_backward(
    grad: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the normed rows ``x`` and of the weight; ``d_total`` is what comes to ``x`` by another way."""
    width = x.shape[-1]
    rows = x.numel() // width
    block, tile = _tiles(width, BACKWARD_TILE)
    d_x = torch.empty_like(x)
    if not rows:
        return d_x, torch.zeros_like(weight)
    share = triton.cdiv(triton.cdiv(rows, tile), PROGRAMS)
    programs = triton.cdiv(rows, tile * share)
    partial = x.new_empty(programs, width, dtype=torch.float32)
    _norm_backward[(programs,)](
        grad.contiguous(), x if d_total is None else d_total.contiguous(), x, weight, d_x, partial, rows, share, eps,
        offset, WIDTH=width, BLOCK=block, ROWS=tile, ADD=d_total is not None, LATE=offset != 0,
        num_warps=8 if block <= BACKWARD_TILE else 16,
    )  # fmt: skip
    return d_x, partial.sum(0).to(weight.dtype)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    """See `rotary.rotate`; with ``back`` the gradients of its inputs from those of its outputs."""
    q, k = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k))
    outs = q.new_empty(q.shape), k.new_empty(k.shape)
    dim, turned = q.shape[2], cos.shape[1]
    if len(q):
        _turn[(len(q),)](
            q, k, *outs, cos.contiguous(), sin.contiguous(), q.stride(0), k.stride(0),
            Q_HEADS=q.shape[1], K_HEADS=k.shape[1], DIM=dim, TURNED=turned, Q_BLOCK=_power(q.shape[1]),
            K_BLOCK=_power(k.shape[1]), BLOCK=_power(turned // 2), REST=_power(max(dim - turned, 1)), BACK=back,
        )  # fmt: skip
    return outs


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """See `gated.gated`."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        _activate[(rows, triton.cdiv(width, COLUMNS))](gate_up, out, width, COLUMNS, activation == "silu")
    return out


def activate_backward(grad: Tensor, gate_up: Tensor, activation: str) -> Tensor:
    """The gradient of the joined input from that of the output."""
    rows, width = grad.shape
    d_both = torch.empty_like(gate_up)
    if rows:
        _activate_backward[(rows, triton.cdiv(width, COLUMNS))](
            grad, gate_up, d_both, width, COLUMNS, activation == "silu"
        )
    return d_both


def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))


def _tiles(width: int, numbers: int = TILE) -> tuple[int, int]:
    """Columns and rows of a tile."""
    block = _power(width)
    return block, max(1, numbers // block)


def _warps(block: int) -> int:
    return 8 if block <= TILE else 16


def _aligned(x: Tensor) -> Tensor:
    """Rows that begin where a vector may: a kernel compiled for others would sum in another order."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
