"""Layers of `fused_cuda` whose weights are frozen and whose linear layers have adapters.

What a backward pass of the base needs beside its input is the attention's output alone: no weight has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_core.kernels.linear import joined
from slime_core.trainers.fsdp.fused import LayerWeights, Maybe, Tensor
from slime_core.trainers.fsdp.fused_adapters import WEIGHTS
from slime_core.trainers.fsdp.fused_cuda import GpuPass, product
from slime_core.trainers.fsdp.low_rank import LayerAdapters


class AdaptedGpuPass(GpuPass):
    """See `fused.WrittenPass`."""

    adapters: LayerAdapters  # of both passes
    lows: tuple[Maybe, ...] = ()  # what adapters keep

    def run(self, x: Tensor, out: Tensor, tensors: Sequence[Maybe], keep: bool) -> None:
        """As in `fused.WrittenPass`."""
        from slime_core.kernels.rows_cuda import activate

        w = LayerWeights(*tensors[:WEIGHTS])  # type: ignore[arg-type]
        adapters = self.adapters = LayerAdapters.of(w, tensors[WEIGHTS:], self.shape.adapters, x.dtype)
        rows = self.norm(x, w.norm1)
        qkv = product(rows, (w.q, w.k, w.v), (w.q_bias, w.k_bias, w.v_bias))
        low_qkv = adapters.qkv.add(qkv, rows)
        o = self.attention_of(qkv, w, keep)
        y = torch.addmm(x, o, w.o.T)
        low_o = adapters.o.add(y, o)
        rows = self.norm(y, w.norm2)
        gate_up = product(rows, (w.gate, w.up))
        low_gu = adapters.gate_up.add(gate_up, rows)
        act = activate(gate_up, "silu")
        torch.addmm(y, act, w.down.T, out=out)
        low_down = adapters.down.add(out, act)
        if keep:
            self.saved = (*self.saved, o, y, gate_up)
            self.lows = low_qkv, low_o, low_gu, low_down

    def gradients(self, d_out: Tensor, x: Maybe, tensors: Sequence[Maybe]) -> tuple[Maybe, ...]:
        """As in `fused.WrittenPass`; weights have none."""
        from slime_core.kernels.rows_cuda import activate, activate_backward, norm_backward

        assert x is not None
        w, adapters = LayerWeights(*tensors[:WEIGHTS]), self.adapters  # type: ignore[arg-type]
        leaves, mixed, qkv, o, y, gate_up = self.saved
        self.saved = ()
        low_qkv, low_o, low_gu, low_down = self.lows
        eps = self.shape.eps
        d_act = d_out @ w.down
        of_down = adapters.down.backward(d_out, activate(gate_up, "silu"), low_down, d_act)
        d_gate_up = activate_backward(d_act, gate_up, "silu")
        d_h = d_gate_up @ joined((w.gate, w.up))
        of_gate_up = adapters.gate_up.backward(d_gate_up, self.norm(y, w.norm2), low_gu, d_h)
        del gate_up, d_gate_up, d_act
        d_y, _ = norm_backward(d_h, d_out, y, w.norm2, eps, 0.0)
        d_o = d_y @ w.o
        of_o = adapters.o.backward(d_y, o, low_o, d_o)
        d_qkv, _ = self.attention_backward(d_o, leaves, mixed, qkv, w)
        d_h = d_qkv @ joined((w.q, w.k, w.v))
        of_qkv = adapters.qkv.backward(d_qkv, self.norm(x, w.norm1), low_qkv, d_h)
        d_x, _ = norm_backward(d_h, d_y, x, w.norm1, eps, 0.0)
        return d_x, *(None,) * WEIGHTS, *of_qkv, *of_o, *of_gate_up, *of_down
