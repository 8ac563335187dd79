# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""`cache.store` and `cache.norm_rotate_store` as Triton kernels: one pass over a row's heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
ELEMENTS = 1024
"""Numbers that a program of `_rotate` holds."""


@triton.jit
def _store(keys, values, places, key, value, k_row, v_row, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """One row of ``K`` numbers of the key and ``V`` of the value."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    if place < 0:
        return
    at = tl.arange(0, BLOCK)
    new = tl.load(key + row * k_row + at, mask=at < K)
    tl.store(keys + place * K + at, new.to(keys.dtype.element_ty), mask=at < K)
    new = tl.load(value + row * v_row + at, mask=at < V)
    tl.store(values + place * V + at, new.to(values.dtype.element_ty), mask=at < V)


def store(keys: Tensor, values: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
    """See `cache.store`."""
    if not len(key):
        return
    key, value = _rows(key), _rows(value)
    k, v = key.shape[1] * key.shape[2], value.shape[1] * value.shape[2]
    _store[(len(key),)](
        keys, values, places, key, value, key.stride(0), value.stride(0), K=k, V=v,
        BLOCK=triton.next_power_of_2(max(k, v)),
    )  # fmt: skip


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with rows whose numbers lie side by side."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


@triton.jit
def _put(qkv, keys, at, key_at, offset, column, x, is_query, is_key):
    """Write queries back, and keys into their page."""
    place = (at[:, None] + offset) + column[None, :]
    tl.store(qkv + place, x.to(qkv.dtype.element_ty), mask=is_query)
    place = (key_at[:, None] + offset) + column[None, :]
    tl.store(keys + place, x.to(keys.dtype.element_ty), mask=is_key)


@triton.jit
def _weighed(x, inverse, weight, mask, dtype: tl.constexpr):
    """x * inverse, rounded, times its weight, rounded."""
    factor = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    return ((x * inverse).to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)


@triton.jit
def _rotate(
    qkv, head_norms, eps, cos, sin, positions, places, keys, values, row_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr,
    HALFP: tl.constexpr, REST: tl.constexpr, RESTP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``TILE`` heads of a row: queries and keys are normalised and rotated, values are copied."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    at = row * row_stride + head * D
    column = tl.arange(0, DP)
    copied = ((head >= HEADS + KV) & (head < HEADS + 2 * KV) & (place >= 0))[:, None] & (column < D)[None, :]
    v = tl.load(qkv + at[:, None] + column[None, :], mask=copied, other=0.0)
    v_at = (place * KV + head - HEADS - KV) * D
    tl.store(values + v_at[:, None] + column[None, :], v.to(values.dtype.element_ty), mask=copied)
    dtype: tl.constexpr = qkv.dtype.element_ty
    turned = (head < HEADS + KV)[:, None]
    is_query = (head < HEADS)[:, None]
    is_key = turned & (head >= HEADS)[:, None] & (place >= 0)
    key_at = (place * KV + head - HEADS) * D
    i = tl.arange(0, HALFP)
    half = turned & (i < HALF)[None, :]
    x = tl.load(qkv + at[:, None] + i[None, :], mask=half, other=0.0).to(tl.float32)
    y = tl.load(qkv + at[:, None] + HALF + i[None, :], mask=half, other=0.0).to(tl.float32)
    j = tl.arange(0, RESTP)
    rest = turned & (j < REST)[None, :]
    if REST > 0:
        z = tl.load(qkv + at[:, None] + 2 * HALF + j[None, :], mask=rest, other=0.0).to(tl.float32)
    if head_norms is not None:
        square = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if REST > 0:
            square += tl.sum(z * z, 1)
        inverse = tl.rsqrt(square / D + eps)[:, None]
        weight = head_norms + head[:, None] * D
        x = _weighed(x, inverse, weight + i[None, :], half, dtype)
        y = _weighed(y, inverse, weight + HALF + i[None, :], half, dtype)
        if REST > 0:
            z = _weighed(z, inverse, weight + 2 * HALF + j[None, :], rest, dtype)
    angle = tl.load(positions + row).to(tl.int64) * (2 * HALF) + i
    c1 = tl.load(cos + angle, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos + angle + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + angle, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin + angle + HALF, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    _put(qkv, keys, at, key_at, 0, i, x * c1 - y * s1, half & is_query, half & is_key)
    _put(qkv, keys, at, key_at, HALF, i, y * c2 + x * s2, half & is_query, half & is_key)
    if REST > 0:
        _put(qkv, keys, at, key_at, 2 * HALF, j, z, rest & is_query, rest & is_key)


def norm_rotate_store(
    qkv: Tensor,
    head_norms: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> None:
    """See `cache.norm_rotate_store`; cos and sin are contiguous."""
    rows, total, width = qkv.shape
    if not rows:
        return
    half, rest = cos.shape[1] // 2, width - cos.shape[1]
    tile = max(ELEMENTS // triton.next_power_of_2(width), 1)
    _rotate[(rows, triton.cdiv(total, tile))](
        qkv, head_norms, eps, cos, sin, positions, places, keys, values, qkv.stride(0), HEADS=heads,
        KV=keys.shape[2], D=width, DP=triton.next_power_of_2(width), HALF=half, HALFP=triton.next_power_of_2(half),
        REST=rest, RESTP=triton.next_power_of_2(max(rest, 1)), TILE=tile, num_warps=4,
    )  # fmt: skip
