# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The backward pass of `attention.varlen_attention` as Triton kernels (Dao 2023, "FlashAttention-2").

One kernel sums over queries for a tile of keys, one over keys for a tile of queries: nothing is added atomically, so
gradients repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from slime_core.kernels.attention_batch import ScoreForm
from slime_core.kernels.attention_cuda import (
    LOG2E,
    AttentionTile,
    inner,
    locate,
    padded,
    precision,
    scales,
    varlen_forward,
)

Tensor = torch.Tensor


@triton.jit
def _weights(s, scale, cap, lse, visible, SOFTCAP: tl.constexpr):
    """Weights of raw products ``s``, and d score / d (scale * product)."""
    slope = tl.full(s.shape, 1.0, tl.float32)
    if SOFTCAP:
        t = 2 * tl.sigmoid(2 * s * scale) - 1
        slope = 1 - t * t
        s = cap * t
    else:
        s = s * scale
    return tl.where(visible, tl.exp2(s - lse), 0.0), slope


@triton.jit(do_not_specialize=["segments"])
def _keys(
    query, key, value, d_out, lse, delta, d_key, d_value, cu_rows, segments, q_row, q_head, k_row, k_head, v_row,
    v_head, scale, cap, factor, heads,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values of one head."""
    head = tl.program_id(1)
    segment, begin = locate(cu_rows, segments, tl.program_id(0), BLOCK)
    first = tl.load(cu_rows + segment).to(tl.int64)
    rows = (tl.load(cu_rows + segment + 1) - first).to(tl.int32)
    if begin >= rows:
        return
    per_tile: tl.constexpr = ROWS // GROUP
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    column = begin + tl.arange(0, BLOCK)
    inside = column < rows
    k_mask = inside[:, None] & (d < D)[None, :]
    v_mask = inside[:, None] & (dv < DV)[None, :]
    k = tl.load(key + ((first + column) * k_row + head * k_head)[:, None] + d[None, :], mask=k_mask, other=0.0)
    v = tl.load(value + ((first + column) * v_row + head * v_head)[:, None] + dv[None, :], mask=v_mask, other=0.0)
    dk = tl.zeros([BLOCK, DP], tl.float32)
    dvalue = tl.zeros([BLOCK, DVP], tl.float32)
    end = rows
    if WINDOW > 0:
        end = tl.minimum(rows, begin + BLOCK - 1 + WINDOW)
    index = tl.arange(0, ROWS)
    query_head = head * GROUP + index % GROUP
    for start in tl.range(begin, end, per_tile):
        token = start + index // GROUP
        valid = (token < end) & (index < per_tile * GROUP)
        row = first + token
        at = row * heads + query_head
        q = tl.load(
            query + (row * q_row + query_head * q_head)[None, :] + d[:, None],
            mask=valid[None, :] & (d < D)[:, None],
            other=0.0,
        )
        do = tl.load(d_out + at[:, None] * DV + dv[None, :], mask=valid[:, None] & (dv < DV)[None, :], other=0.0)
        row_lse = tl.load(lse + at, mask=valid, other=float("inf"))
        row_delta = tl.load(delta + at, mask=valid, other=0.0)
        visible = (column[:, None] <= token[None, :]) & valid[None, :] & inside[:, None]
        if WINDOW > 0:
            visible &= column[:, None] > token[None, :] - WINDOW
        s = tl.dot(k, q, input_precision=PRECISION)
        p, slope = _weights(s, scale, cap, row_lse[None, :], visible, SOFTCAP)
        dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :]) * slope
        dk = tl.dot(ds.to(q.dtype), tl.trans(q), dk, input_precision=PRECISION)
    kv_heads = heads // GROUP
    at = (first + column) * kv_heads + head
    tl.store(d_key + at[:, None] * D + d[None, :], (dk * factor).to(d_key.dtype.element_ty), mask=k_mask)
    tl.store(d_value + at[:, None] * DV + dv[None, :], dvalue.to(d_value.dtype.element_ty), mask=v_mask)


@triton.jit(do_not_specialize=["segments"])
def _queries(
    query, key, value, out, d_out, lse, delta, d_query, cu_rows, segments, q_row, q_head, k_row, k_head, v_row,
    v_head, scale, cap, factor, heads,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries of one head of keys, and the sums of out * d_out, ``delta``."""
    head = tl.program_id(1)
    per_tile: tl.constexpr = ROWS // GROUP
    segment, begin = locate(cu_rows, segments, tl.program_id(0), per_tile)
    first = tl.load(cu_rows + segment).to(tl.int64)
    rows = (tl.load(cu_rows + segment + 1) - first).to(tl.int32)
    if begin >= rows:
        return
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    index = tl.arange(0, ROWS)
    token = begin + index // GROUP
    valid = (token < rows) & (index < per_tile * GROUP)
    query_head = head * GROUP + index % GROUP
    row = first + token
    at = row * heads + query_head
    q_mask = valid[:, None] & (d < D)[None, :]
    q = tl.load(query + (row * q_row + query_head * q_head)[:, None] + d[None, :], mask=q_mask, other=0.0)
    o_mask = valid[:, None] & (dv < DV)[None, :]
    do = tl.load(d_out + at[:, None] * DV + dv[None, :], mask=o_mask, other=0.0)
    o = tl.load(out + at[:, None] * DV + dv[None, :], mask=o_mask, other=0.0)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + at, row_delta, mask=valid)
    row_lse = tl.load(lse + at, mask=valid, other=float("inf"))
    low = 0
    end = tl.minimum(rows, begin + per_tile)
    if WINDOW > 0:
        low = tl.maximum(begin - WINDOW + 1, 0) // BLOCK * BLOCK
    dq = tl.zeros([ROWS, DP], tl.float32)
    for start in tl.range(low, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < end
        k = tl.load(
            key + ((first + column) * k_row + head * k_head)[:, None] + d[None, :],
            mask=inside[:, None] & (d < D)[None, :],
            other=0.0,
        )
        v = tl.load(
            value + ((first + column) * v_row + head * v_head)[None, :] + dv[:, None],
            mask=inside[None, :] & (dv < DV)[:, None],
            other=0.0,
        )
        visible = (column[None, :] <= token[:, None]) & valid[:, None]
        if WINDOW > 0:
            visible &= column[None, :] > token[:, None] - WINDOW
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, slope = _weights(s, scale, cap, row_lse[:, None], visible, SOFTCAP)
        dp = tl.dot(do, v, input_precision=PRECISION)
        ds = p * (dp - row_delta[:, None]) * slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(d_query + at[:, None] * D + d[None, :], (dq * factor).to(d_query.dtype.element_ty), mask=q_mask)


def tiles(query: Tensor, width: int, group: int) -> tuple[AttentionTile, AttentionTile]:
    """Tiles of the kernel over keys and of the kernel over queries."""
    least = max(int(triton.next_power_of_2(group)), 16)
    if query.dtype == torch.float32:
        both = AttentionTile(max(16, least), 16, 4, 1) if width > 128 else AttentionTile(max(32, least), 32, 4, 1)
        return both, both
    if width > 128:
        return AttentionTile(max(32, least), 32, 4, 1), AttentionTile(max(32, least), 32, 4, 1)
    if width > 64:
        return AttentionTile(max(64, least), 64, 4, 2), AttentionTile(max(64, least), 64, 4, 2)
    return AttentionTile(max(64, least), 128, 8, 2), AttentionTile(max(128, least), 64, 8, 2)


class Varlen(torch.autograd.Function):
    """`attention.varlen_attention` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cu_seqlens: Tensor,
        form: ScoreForm,
        invariant: bool,
    ) -> Tensor:
        """Save log2 of the sums of exponentials; weights are computed again in the backward pass."""
        query, key, value = inner(query), inner(key), inner(value)
        out, lse = varlen_forward(query, key, value, cu_seqlens, form, sinks, invariant)
        ctx.save_for_backward(query, key, value, sinks, cu_seqlens, out, lse)
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and sinks."""
        query, key, value, sinks, cu_seqlens, out, lse = ctx.saved_tensors
        d_out = grads[0].contiguous()
        delta = torch.empty_like(lse)
        (count, heads, width), (kv_heads, value_width) = query.shape, value.shape[1:]
        constants = {
            "GROUP": heads // kv_heads, "D": width, "DV": value_width, "DP": padded(width),
            "DVP": padded(value_width), "WINDOW": ctx.form.window, "SOFTCAP": bool(ctx.form.softcap),
            "PRECISION": precision(query),
        }  # fmt: skip
        d_query, d_key, d_value = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in
                                   (query, key, value))  # fmt: skip
        segments = len(cu_seqlens) - 1
        strides = (stride for one in (query, key, value) for stride in one.stride()[:2])
        rest = (cu_seqlens, segments, *strides, *scales(ctx.form), ctx.form.scale, heads)
        over_keys, over_queries = tiles(query, max(width, value_width), heads // kv_heads)
        per_tile = over_queries.rows // (heads // kv_heads)
        _queries[(count // per_tile + segments, kv_heads)](
            query, key, value, out, d_out, lse, delta, d_query, *rest, **constants, **compiled(over_queries)
        )
        _keys[(count // over_keys.keys + segments, kv_heads)](
            query, key, value, d_out, lse, delta, d_key, d_value, *rest, **constants, **compiled(over_keys)
        )
        d_sinks = None
        if sinks is not None:
            d_sinks = -(torch.exp2(sinks.float() * LOG2E - lse) * delta).sum(0).to(sinks.dtype)
        return d_query, d_key, d_value, d_sinks, None, None, None


def compiled(tile: AttentionTile) -> dict[str, int]:
    """AttentionLaunch arguments of a tile."""
    return {"ROWS": tile.rows, "BLOCK": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    form: ScoreForm,
    sinks: Tensor | None,
    invariant: bool,
) -> Tensor:
    """See `attention.varlen_attention`."""
    out: Tensor = Varlen.apply(query, key, value, sinks, cu_seqlens, form, invariant)
    return out
