"""Root mean square norm (Zhang and Sennrich 2019), alone and behind the sum of a residual stream.

A row's bits depend on that row alone. Sums are float32; a Llama norm is rounded to the input's dtype before its weight
is applied, as transformers does it, a Gemma norm (``offset`` 1) after.
"""

from __future__ import annotations

from typing import Any

import torch

from slime_core.kernels import by_triton

Tensor = torch.Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in the dtype of ``x``; with gradient.

    Args:
        x: [..., width]
        weight: [width]
        eps: added to the mean square
        offset: added to the weight in float32; not 0 means that nothing is rounded before the product
    """
    if by_triton(x):
        return _Norm.apply(x, weight, eps, offset)  # type: ignore[no-any-return]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)
    return (normed.to(x.dtype) * weight).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, rounded to their dtype; both [..., width], with gradient."""
    if by_triton(x):
        return _AddNorm.apply(x, residual, weight, eps, offset)  # type: ignore[no-any-return]
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        from slime_core.kernels.rows_cuda import norm

        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        return norm(x, None, weight, eps, offset)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from slime_core.kernels.rows_cuda import norm_backward

        x, weight = ctx.saved_tensors
        return *norm_backward(grads[0], None, x, weight, ctx.eps, ctx.offset), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        from slime_core.kernels.rows_cuda import norm

        normed, total = norm(x.contiguous(), residual.contiguous(), weight, eps, offset)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.offset = eps, offset
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from slime_core.kernels.rows_cuda import norm_backward

        total, weight = ctx.saved_tensors
        d_x, d_weight = norm_backward(grads[0], grads[1], total, weight, ctx.eps, ctx.offset)
        return d_x, d_x, d_weight, None, None
