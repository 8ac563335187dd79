"""Rotary position embedding (Su et al. 2021) of queries and keys, in the layout of transformers: halves, not pairs."""

from __future__ import annotations

from typing import Any

import torch

from slime_core.kernels import by_triton

Tensor = torch.Tensor


ROTATIONS = 1024
"""Positions whose angles are computed at once."""


def tables(rotary: Any, like: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [at least ``count``, r] of a model's rotary module, of the dtype and device of ``like``.

    Always made of as many positions at once, so that a position's bits do not depend on ``count``.
    """
    starts = range(0, max(count, 1), ROTATIONS)
    ids = [torch.arange(start, start + ROTATIONS, device=like.device)[None] for start in starts]
    pairs = [rotary(like.new_zeros(1, 1), positions) for positions in ids]
    cos, sin = (torch.cat([part[0] for part in parts]) for parts in zip(*pairs, strict=True))
    return cos, sin


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the first r numbers of every head, x * cos + (-x2, x1) * sin, and copy the others; with gradient.

    Args:
        q: [N, Hq, d]
        k: [N, Hk, d]
        cos: [N, r], of each row's position; r may be less than d
        sin: [N, r]

    Returns:
        Both, contiguous, in their dtypes; products and sums are rounded to them, as transformers does it.
    """
    if by_triton(q):
        return _Rotate.apply(q, k, cos, sin)  # type: ignore[no-any-return]
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    turning = x[..., :width]
    first, second = turning.chunk(2, -1)
    cos, sin = (table.to(x.dtype)[:, None] for table in (cos, sin))
    return torch.cat((turning * cos + torch.cat((-second, first), -1) * sin, x[..., width:]), -1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from slime_core.kernels.rows_cuda import turn

        ctx.save_for_backward(cos, sin)
        return turn(q, k, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from slime_core.kernels.rows_cuda import turn

        return *turn(*grads, *ctx.saved_tensors, back=True), None, None
