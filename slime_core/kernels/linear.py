"""A linear layer each of whose rows has the same bits alone, in any batch, and whatever other rows hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from slime_core.kernels import by_triton
from slime_core.kernels.quantised import QuantisedWeight, dense

Tensor = torch.Tensor


def invariant_linear(x: Tensor, weight: Tensor | Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias, summed in float32 in one fixed order; with gradient, by plain products.

    An output's bits depend on its row of ``x``, its row of ``weight`` and its bias: a joined matrix gives the bits of
    its parts. On a CPU the promise is not made; `engines.local.row_counts` measures which counts of rows keep it.

    Args:
        x: [N, in]
        weight: [out, in]; several are joined, and no copy of them is kept for the backward pass
        bias: [out]
    """
    weights = (weight,) if isinstance(weight, Tensor) else tuple(weight)
    if by_triton(x):
        return _Linear.apply(x, bias, *weights)  # type: ignore[no-any-return]
    return F.linear(x, torch.cat(weights), bias)  # whose gradient goes to each


def adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors lie one behind another in one storage, each without gaps."""
    storage, end = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        if (tensor.untyped_storage().data_ptr(), tensor.data_ptr()) != (storage, end) or not tensor.is_contiguous():
            return False
        end += tensor.nbytes
    return True


def joined(matrices: Sequence[Tensor]) -> Tensor:
    """Matrices one above the other, or vectors one behind the other: a view where they lie so, else a copy."""
    if len(matrices) > 1 and all(isinstance(matrix, QuantisedWeight) for matrix in matrices):
        first, rows = matrices[0], [len(matrix) for matrix in matrices]
        out = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
        for matrix, part in zip(matrices, out.split(rows), strict=True):
            matrix.write(part)  # type: ignore[attr-defined]
        return out
    matrices = [dense(matrix) for matrix in matrices]
    if not adjacent(matrices):
        return torch.cat(matrices)
    first = matrices[0]
    return first.as_strided((sum(map(len, matrices)), *first.shape[1:]), first.stride())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        from slime_core.kernels.linear_cuda import product

        ctx.save_for_backward(x, *weights)
        return product(x, joined(weights), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        grad = grads[0]
        d_x = grad @ joined(weights) if ctx.needs_input_grad[0] else None
        d_bias = grad.sum(0) if ctx.needs_input_grad[1] else None
        d_weights: tuple[Tensor | None, ...] = (None,) * len(weights)
        if ctx.needs_input_grad[2]:
            d_weights = (grad.T @ x).split([len(weight) for weight in weights])
        return d_x, d_bias, *d_weights
