"""A linear layer each of whose rows has the same bits alone, in any batch, and whatever other rows hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from slime_core.kernels import by_triton

Tensor = torch.Tensor


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, summed in float32 in one fixed order; with gradient, by plain products.

    An output's bits depend on its row of ``x``, its row of ``weight`` and its bias: a joined matrix gives the bits of
    its parts. On a CPU the promise is not made; `engines.local.attention` measures there which counts of rows keep it.

    Args:
        x: [N, in]
        weight: [out, in]
        bias: [out]
    """
    if by_triton(x):
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from slime_core.kernels.linear_cuda import product

        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        return (
            grad @ weight if ctx.needs_input_grad[0] else None,
            grad.T @ x if ctx.needs_input_grad[1] else None,
            grad.sum(0) if ctx.needs_input_grad[2] else None,
        )
