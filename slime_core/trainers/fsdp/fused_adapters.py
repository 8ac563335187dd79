"""Layers of `fused` whose weights are frozen and whose linear layers have adapters, on a CPU.

No weight of the base has a gradient, so nothing is folded: norm weights multiply the normed rows, projections of one
input are one product of weights that lie side by side, and their adapters are another, of a few columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from slime_core.kernels.linear import joined
from slime_core.trainers.fsdp.fused import (
    LayerWeights,
    Maybe,
    Pass,
    SavedActivations,
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
    """See `fused.WrittenPass`."""

    lows: tuple[Maybe, ...] = ()  # what adapters keep

    def run(self, x: Tensor, out: Tensor, tensors: Sequence[Maybe], keep: bool) -> None:
        """As in `fused.WrittenPass`."""
        w = LayerWeights(*tensors[:WEIGHTS])  # type: ignore[arg-type]
        adapters = LayerAdapters.of(w, tensors[WEIGHTS:], self.shape.adapters, x.dtype)
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

    def gradients(self, d_out: Tensor, x: Maybe, tensors: Sequence[Maybe]) -> tuple[Maybe, ...]:
        """As in `fused.WrittenPass`; weights have none."""
        assert self.saved is not None
        w = LayerWeights(*tensors[:WEIGHTS])  # type: ignore[arg-type]
        adapters = LayerAdapters.of(w, tensors[WEIGHTS:], self.shape.adapters, d_out.dtype)
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
        return d_x, *(None,) * WEIGHTS, *of_qkv, *of_o, *of_gate_up, *of_down
