"""The gated activation between the two products of an MLP (Shazeer 2020)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from slime_core.kernels import by_triton

Tensor = torch.Tensor
Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) * up, [N, I] from the joined [N, 2 I]; with gradient.

    The activation is computed in float32 and rounded before the product, as transformers does it.
    """
    if by_triton(gate_up):
        return _Gated.apply(gate_up, activation)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Activation) -> Tensor:
        from slime_core.kernels.rows_cuda import activate

        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return activate(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from slime_core.kernels.rows_cuda import activate_backward

        (gate_up,) = ctx.saved_tensors
        return activate_backward(grads[0].contiguous(), gate_up, ctx.activation), None
