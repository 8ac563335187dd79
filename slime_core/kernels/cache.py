"""Writing keys and values into a paged cache, alone or in one pass with head norms and rotary embedding."""

from __future__ import annotations

import torch

from slime_core.kernels import by_triton

Tensor = torch.Tensor


def store(keys: Tensor, values: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Write ``key`` [N, Hkv, D] and ``value`` [N, Hkv, Dv] into their pages.

    Args:
        keys: [P, page, Hkv, D]
        values: [P, page, Hkv, Dv]
        places: [N] int64, page * page size + offset; a row with a negative place is left out
    """
    if by_triton(key):
        from slime_core.kernels.cache_cuda import store as kernel

        kernel(keys, values, places, key, value)
        return
    rows = (places >= 0).nonzero()[:, 0]
    for pool, new in ((keys, key), (values, value)):
        pool.flatten(0, 1)[places[rows]] = new[rows].to(pool.dtype)


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
    """Normalise and rotate the heads of a joined projection in place, and write keys and values into their pages.

    The norm is that of transformers: in float32, rounded, times its weight, rounded. Then
    x * cos + rotate_half(x) * sin in float32, rounded once.

    Args:
        qkv: [N, heads + 2 * Hkv, D], contiguous: queries, keys and values of a row; queries are changed in place,
            keys and values stay unspecified
        head_norms: [heads + Hkv, D], RMS norm weights of the query and key heads; None is no norm
        cos, sin: [positions, r] tables, contiguous, both halves filled; r <= D is the rotated part of a head
        positions: [N] int64, rows of the tables
        places: as for :func:`store`
        heads: query heads
    """
    if by_triton(qkv):
        from slime_core.kernels.cache_cuda import norm_rotate_store as kernel

        kernel(qkv, head_norms, eps, cos, sin, positions, places, keys, values, heads)
        return
    kv_heads = keys.shape[2]
    both = qkv[:, : heads + kv_heads]
    if head_norms is not None:
        wide = both.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        both = wide.to(qkv.dtype) * head_norms.to(qkv.dtype)
    r = cos.shape[1]
    c, s = (table[positions].float()[:, None] for table in (cos, sin))
    x = both[..., :r].float()
    half_turned = torch.cat([-x[..., r // 2 :], x[..., : r // 2]], -1)
    qkv[:, : heads + kv_heads] = torch.cat([(x * c + half_turned * s).to(qkv.dtype), both[..., r:]], -1)
    store(keys, values, places, qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :])
