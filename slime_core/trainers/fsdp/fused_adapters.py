"""Layers of `fused` whose weights are frozen and whose linear layers have adapters, on a CPU.

No weight of the base has a gradient, so nothing is folded: norm weights multiply the normed rows, projections of one
input are one product of weights that lie side by side, and their adapters are another, of a few columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slime_core.kernels.linear import joined
from slime_core.trainers.fsdp.attention import PackSegments
from slime_core.trainers.fsdp.fused import (
    LayerWeights,
    Maybe,
    Pass,
    SavedActivations,
    Shape,
    Tensor,
    head_norms,
    normed,
    normed_backward,
    swiglu_backward,
)
from slime_core.trainers.fsdp.fused_cuda import product
from slime_core.trainers.fsdp.low_rank import LayerAdapters

WEIGHTS = len(LayerWeights._fields)


class AdaptedPass(Pass):
    """One pack through a layer with adapters, forward and then backward."""

    lows: tuple[Maybe, ...] = ()  # what adapters keep

    def run(self, x: Tensor, out: Tensor, w: LayerWeights, adapters: LayerAdapters, keep: bool) -> None:
        """Fill ``out`` [T, hidden]."""
        h, r = normed(x, self.shape.eps)
        rows = h * w.norm1
        qkv = product(rows, (w.q, w.k, w.v), (w.q_bias, w.k_bias, w.v_bias))
        low_qkv = adapters.qkv.add(qkv, rows)
        n, rn, o = self.attention_of(qkv, head_norms(w, self.shape), keep)
        y = torch.addmm(x, o, w.o.T)
        low_o = adapters.o.add(y, o)
        h2, r2 = normed(y, self.shape.eps)
        rows = h2 * w.norm2
        gu = product(rows, (w.gate, w.up))
        low_gu = adapters.gate_up.add(gu, rows)
        gate, up = gu.chunk(2, dim=1)
        act = nn.functional.silu(gate).mul_(up)
        torch.addmm(y, act, w.down.T, out=out)
        low_down = adapters.down.add(out, act)
        if keep:
            self.saved = SavedActivations(h, r, n, rn, o, h2, r2, gu)
            self.lows = low_qkv, low_o, low_gu, low_down

    def gradients(self, d_out: Tensor, w: LayerWeights, adapters: LayerAdapters) -> tuple[Tensor, tuple[Maybe, ...]]:
        """Gradients of x and of the factors, in their order; what was kept is given back."""
        assert self.saved is not None
        (h, r, n, rn, o, h2, r2, gu), self.saved = self.saved, None
        low_qkv, low_o, low_gu, low_down = self.lows
        gate, up = gu.chunk(2, dim=1)
        silu = nn.functional.silu(gate)
        act, d_act = silu * up, d_out @ w.down
        of_down = adapters.down.backward(d_out, act, low_down, d_act)
        d_gu = swiglu_backward(d_act, gu, silu, act)
        d_h2 = d_gu @ joined((w.gate, w.up))
        of_gate_up = adapters.gate_up.backward(d_gu, h2, low_gu, d_h2, w.norm2)
        d_y = normed_backward(d_h2.mul_(w.norm2), h2, r2).add_(d_out)
        d_o = d_y @ w.o
        of_o = adapters.o.backward(d_y, o, low_o, d_o)
        d_qkv = self.attention_backward(d_o, n, rn, head_norms(w, self.shape), None)
        d_h = d_qkv @ joined((w.q, w.k, w.v))
        of_qkv = adapters.qkv.backward(d_qkv, h, low_qkv, d_h, w.norm1)
        d_x = normed_backward(d_h.mul_(w.norm1), h, r).add_(d_y)
        return d_x, (*of_qkv, *of_o, *of_gate_up, *of_down)


class AdaptedLayer(torch.autograd.Function):
    """One layer on x [T, hidden], whose weights are frozen; the other arguments as `fused.fuse` collects them."""

    @staticmethod
    def forward(
        ctx: Any, scaling: float, shape: Shape, segments: PackSegments, cos: Tensor, sin: Tensor, x: Tensor,
        *rest: Maybe,
    ) -> Tensor:  # fmt: skip
        w = LayerWeights(*rest[:WEIGHTS])  # type: ignore[arg-type]
        keep = any(ctx.needs_input_grad)
        out = x.new_empty(1, *x.shape)  # with the batch axis from the start: FSDP's hooks want no view
        one = AdaptedPass(shape, segments, cos, sin)
        adapters = LayerAdapters.of(w, rest[WEIGHTS:], scaling, x.dtype)
        one.run(x, out[0], w, adapters, keep and not shape.recompute)
        if keep:
            ctx.one, ctx.scaling = one, scaling
            ctx.save_for_backward(x if shape.recompute else None, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Maybe, ...]:
        x, *rest = ctx.saved_tensors
        one, ctx.one = ctx.one, None
        w = LayerWeights(*rest[:WEIGHTS])
        d_out = grads[0][0]
        adapters = LayerAdapters.of(w, rest[WEIGHTS:], ctx.scaling, d_out.dtype)
        if one.shape.recompute:
            one.run(x, torch.empty_like(x), w, adapters, True)
        d_x, of_factors = one.gradients(d_out, w, adapters)
        return None, None, None, None, None, d_x, *(None,) * WEIGHTS, *of_factors
