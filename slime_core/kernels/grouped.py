"""Products of runs of rows, each by its own matrix, and a mixture's experts made of them.

Rows are sorted by expert and ``ends`` [E] int32 says where each expert's end. Nothing waits for the counts. Products
are torch's; gradients are added to float32 ones by a Triton kernel in half precision, on GPUs from Hopper on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from slime_core.kernels import by_triton

Tensor = torch.Tensor


def multiply(rows: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    """Multiply each run of ``rows`` [T, in] by its matrix of ``weight`` [E, out, in]: [T, out]; no gradient.

    With ``transposed`` the matrices are [E, in, out]. Both axes of a matrix are multiples of 16 bytes.
    """
    if not len(rows):  # a rank to which no token came
        return rows.new_zeros(0, weight.shape[2 if transposed else 1])
    return _torch_product(rows.contiguous(), weight if transposed else weight.transpose(1, 2), ends)


def gradient(grad: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Gradient [E, out, in] of the matrices, of ``grad`` [T, out] and ``rows`` [T, in]; 0 for those without rows."""
    if not len(rows):
        return rows.new_zeros(len(ends), grad.shape[1], rows.shape[1])
    return _torch_product(grad.contiguous().t(), rows.contiguous(), ends)


def add_gradient(total: Tensor, grad: Tensor, rows: Tensor, ends: Tensor) -> None:
    """Add :func:`gradient` to ``total`` [E, out, in] float32, whose matrices are contiguous, unrounded on a GPU."""
    if not len(rows):
        return
    if not _by_kernel(rows):
        total += gradient(grad, rows, ends)
        return
    from slime_core.kernels.grouped_cuda import add_gradient as by_kernel

    by_kernel(total, grad.contiguous(), rows.contiguous(), ends)


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """:func:`multiply` by ``weight`` [E, out, in], with gradients of both: [T, out]."""
    return _GroupedProduct.apply(rows, weight, ends)  # type: ignore[no-any-return]


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return multiply(rows, weight, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        of_rows = multiply(grads[0], weight, ends, transposed=True) if ctx.needs_input_grad[0] else None
        return of_rows, gradient(grads[0], rows, ends) if ctx.needs_input_grad[1] else None, None


def grouped_experts(x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """What the experts of each token add up to: sum_k weights * down(silu(gate x) * up x), [T, h].

    Args:
        x: [T, h]
        index: [T, k], experts of each token
        weights: [T, k], the router's
        gate_up: [E, 2 f, h], down: [E, h, f]
    """
    experts, order = index.flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(len(down), device=experts.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    rows: Tensor = _RowPerExpert.apply(x, order, place, index.shape[1])
    hidden = weighted_swiglu(grouped_product(rows, gate_up, ends), weights.flatten()[order])
    return _SumOverExperts.apply(grouped_product(hidden, down, ends), order, place, index.shape[1])  # type: ignore[no-any-return]


class _RowPerExpert(torch.autograd.Function):
    """A row for each expert of a token, in the order of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.count = count
        return x[order // count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return torch.ops.slime.sum_rows(grads[0], place, ctx.count), None, None, None


class _SumOverExperts(torch.autograd.Function):
    """The sum of a token's rows, from the order of experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.count = count
        result: Tensor = torch.ops.slime.sum_rows(rows, place, count)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0][order // ctx.count], None, None, None


@torch.library.custom_op("slime::sum_rows", mutates_args=())
def _sum_rows(rows: Tensor, place: Tensor, count: int) -> Tensor:
    if by_triton(rows) and len(rows):
        from slime_core.kernels.grouped_cuda import sum_rows

        return sum_rows(rows.contiguous(), place, count)
    return rows[place].view(-1, count, rows.shape[1]).sum(1, dtype=torch.float32).to(rows.dtype)


@_sum_rows.register_fake
def _(rows: Tensor, place: Tensor, count: int) -> Tensor:
    return rows.new_empty(len(place) // count, rows.shape[1])


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) * up * weight, [T, f] from the joined [T, 2 f] and [T] (Shazeer 2020), with gradients."""
    return _WeightedSwiglu.apply(gate_up, weights)  # type: ignore[no-any-return]


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        result: Tensor = torch.ops.slime.weighted_swiglu(gate_up, weights)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.slime.weighted_swiglu_backward(grads[0], *ctx.saved_tensors)  # type: ignore[no-any-return]


@torch.library.custom_op("slime::weighted_swiglu", mutates_args=())
def _weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    if by_triton(gate_up) and len(gate_up):
        from slime_core.kernels.grouped_cuda import weighted_swiglu as by_kernel

        return by_kernel(gate_up.contiguous(), weights.contiguous())
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up * weights[:, None]).to(gate_up.dtype)


@_weighted_swiglu.register_fake
def _(gate_up: Tensor, weights: Tensor) -> Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@torch.library.custom_op("slime::weighted_swiglu_backward", mutates_args=())
def _weighted_swiglu_backward(grad: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    if by_triton(gate_up) and len(gate_up):
        from slime_core.kernels.grouped_cuda import weighted_swiglu_backward as by_kernel

        return by_kernel(grad.contiguous(), gate_up.contiguous(), weights.contiguous())
    gate, up = gate_up.float().chunk(2, -1)
    share, activated, back = torch.sigmoid(gate), F.silu(gate), grad.float()
    weighted = back * weights[:, None]
    parts = weighted * up * share * (1 + gate * (1 - share)), weighted * activated
    return torch.cat(parts, -1).to(gate_up.dtype), (back * activated * up).sum(-1).to(weights.dtype)


@_weighted_swiglu_backward.register_fake
def _(grad: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(weights)


def _by_kernel(rows: Tensor) -> bool:
    if not by_triton(rows):
        return False
    return not rows.is_cuda or (rows.element_size() == 2 and _copies_tiles(rows.device.index))


@cache
def _copies_tiles(device: int | None) -> bool:
    """Whether the GPU has an engine that copies tiles: from Hopper on."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _torch_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """[T, in] x [E, in, out] -> [T, out], or [out, T] x [T, in] -> [E, out, in]."""
    kernel = getattr(F, "grouped_mm", None) or torch._grouped_mm
    result: Tensor = kernel(left, right, offs=ends)
    return result
