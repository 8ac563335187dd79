"""Decoder layers of known shape on a GPU, forward and backward written out: Triton kernels between the products.

    x -> norm -> [q k v] -> (q, k norm) -> rotary -> attention -> o + x -> norm -> [gate up] -> silu * -> down + .

Projections of one input are one product, residuals are the beta of a product, and norms and the activation are made
again in the backward pass instead of being kept. Where a rank holds masters, gradients of matrices are added up in
float32 by the products that make them.

A layer is replaced only where its numbers and gradients were found to be the module's own (see `policy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime_core.kernels.linear import joined
from slime_core.trainers.flash import EIGHTS, FlashCall
from slime_core.trainers.fsdp.attention import PackSegments, attend, by_varlen
from slime_core.trainers.fsdp.fused import LayerWeights, Maybe, Shape, Tensor
from slime_core.trainers.fsdp.masters import Masters


class GpuPass:
    """See `fused.WrittenPass`."""

    reads_input = True

    def __init__(self, shape: Shape, segments: PackSegments, cos: Tensor, sin: Tensor) -> None:
        self.shape, self.segments, self.cos, self.sin = shape, segments, cos[:, 0], sin[:, 0]
        self.flash: FlashCall | None = None  # its rows lie end to end, shared prompts in each sequence
        if shape.dim % EIGHTS == 0 and by_varlen(self.cos, segments, shape.window):
            cu, longest, window = segments.cu_seqlens, segments.longest, shape.window
            self.flash = FlashCall(cu, cu, longest, longest, shape.scaling, -1 if window is None else window - 1)
        self.shared = segments.shared if self.flash is not None else None
        self.saved: tuple[Any, ...] = ()

    def run(self, x: Tensor, out: Tensor, tensors: Sequence[Maybe], keep: bool) -> None:
        """As in `fused.WrittenPass`."""
        from slime_core.kernels.rows_cuda import activate

        w = LayerWeights(*tensors)  # type: ignore[arg-type]
        qkv = product(self.norm(x, w.norm1), (w.q, w.k, w.v), (w.q_bias, w.k_bias, w.v_bias))
        o = self.attention_of(qkv, w, keep)
        y = torch.addmm(x, o, w.o.T)
        gate_up = product(self.norm(y, w.norm2), (w.gate, w.up))
        torch.addmm(y, activate(gate_up, "silu"), w.down.T, out=out)
        if keep:
            self.saved = (*self.saved, o, y, gate_up)

    def attention_of(self, qkv: Tensor, w: LayerWeights, keep: bool) -> Tensor:
        """[T, heads * d] of the joined product."""
        mixed = self._attend(self.shared.spread(qkv) if self.shared else qkv, w, keep)
        return (self.shared.pick(mixed) if self.shared else mixed).flatten(1)

    def _attend(self, qkv: Tensor, w: LayerWeights, keep: bool) -> Tensor:
        """[rows, heads, d]; what the backward pass reads is kept."""
        from slime_core.kernels.rows_cuda import norm, turn

        shape, segments = self.shape, self.segments
        q, k, v = self._heads(qkv)
        norms = (w.q_norm, w.k_norm) if w.q_norm is not None and w.k_norm is not None else None
        if norms is not None:
            q, k = (norm(x.contiguous(), None, one, shape.eps, 0.0)[0] for x, one in zip((q, k), norms))
        q, k = turn(q, k, *self._tables(), back=False)
        leaves = [q, k, v]
        if self.flash is not None:
            mixed = self.flash.forward(q, k, v)
        else:
            with torch.set_grad_enabled(keep):
                leaves = [x.detach().requires_grad_(keep) for x in (q, k, v)]
                mixed = attend(leaves[0], leaves[1], leaves[2], segments, shape.scaling, shape.window)
        if keep:
            self.saved = (leaves, mixed, None if norms is None else qkv)  # which v holds anyway
        return mixed.detach()

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, heads, d] of the joined product."""
        shape = self.shape
        q, k, v = qkv.unflatten(1, (-1, shape.dim)).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        return q, k, v

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rows of attention."""
        return self.segments.tables(self.cos, self.sin) if self.shared else (self.cos, self.sin)

    def gradients(self, d_out: Tensor, x: Maybe, tensors: Sequence[Maybe]) -> tuple[Maybe, ...]:
        """As in `fused.WrittenPass`; None of weights whose gradients went into masters."""
        from slime_core.kernels.rows_cuda import activate, activate_backward, norm_backward

        assert x is not None
        w, masters = LayerWeights(*tensors), self.shape.masters  # type: ignore[arg-type]
        leaves, mixed, qkv, o, y, gate_up = self.saved
        self.saved = ()
        eps = self.shape.eps
        d_down = _gradients(masters, (w.down,), d_out, activate(gate_up, "silu"))
        d_gate_up = activate_backward(d_out @ w.down, gate_up, "silu")
        d_gate, d_up = _gradients(masters, (w.gate, w.up), d_gate_up, self.norm(y, w.norm2))
        d_h = d_gate_up @ joined((w.gate, w.up))
        del gate_up, d_gate_up
        d_y, d_norm2 = norm_backward(d_h, d_out, y, w.norm2, eps, 0.0)
        d_o = _gradients(masters, (w.o,), d_y, o)
        d_qkv, d_heads = self.attention_backward(d_y @ w.o, leaves, mixed, qkv, w)
        d_matrices = _gradients(masters, (w.q, w.k, w.v), d_qkv, self.norm(x, w.norm1))
        d_biases: tuple[Maybe, ...] = (None, None, None)
        if w.q_bias is not None:
            d_biases = d_qkv.sum(0).split([len(one) for one in (w.q, w.k, w.v)])
        d_x, d_norm1 = norm_backward(d_qkv @ joined((w.q, w.k, w.v)), d_y, x, w.norm1, eps, 0.0)
        return d_x, d_norm1, *d_matrices, *d_biases, *d_heads, *d_o, d_norm2, d_gate, d_up, *d_down

    def attention_backward(
        self, d_o: Tensor, leaves: list[Tensor], mixed: Tensor, qkv: Maybe, w: LayerWeights
    ) -> tuple[Tensor, tuple[Maybe, Maybe]]:
        """Gradients of [q k v] of the pack's rows, and of the head norms."""
        from slime_core.kernels.rows_cuda import norm_backward, turn

        d_mixed = (self.shared.pick_backward(d_o) if self.shared else d_o).view(mixed.shape)
        if self.flash is not None:
            d_q, d_k, d_v = self.flash.backward(d_mixed, leaves[0], leaves[1], leaves[2], mixed)
        else:
            d_q, d_k, d_v = torch.autograd.grad(mixed, leaves, d_mixed)
        d_q, d_k = turn(d_q, d_k, *self._tables(), back=True)
        d_norms: tuple[Maybe, Maybe] = (None, None)
        if qkv is not None:
            assert w.q_norm is not None
            assert w.k_norm is not None
            q, k = (x.contiguous() for x in self._heads(qkv)[:2])
            d_q, d_q_norm = norm_backward(d_q, None, q, w.q_norm, self.shape.eps, 0.0)
            d_k, d_k_norm = norm_backward(d_k, None, k, w.k_norm, self.shape.eps, 0.0)
            d_norms = d_q_norm, d_k_norm
        d_qkv = torch.cat((d_q, d_k, d_v), 1).flatten(1)
        return (self.shared.spread_backward(d_qkv) if self.shared else d_qkv), d_norms

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normed rows."""
        from slime_core.kernels.rows_cuda import norm

        return norm(x, None, weight, self.shape.eps, 0.0)[0]


def product(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Maybe, ...] = ()) -> Tensor:
    """Several linear layers of one input, side by side."""
    if biases and biases[0] is not None:
        return torch.addmm(torch.cat([bias for bias in biases if bias is not None]), x, joined(weights).T)
    return x @ joined(weights).T


def _gradients(masters: Masters | None, weights: tuple[Tensor, ...], d_out: Tensor, x: Tensor) -> tuple[Maybe, ...]:
    """Gradients of several layers' weights, or None of each where they went into ``masters``."""
    if masters is not None and masters.add_product(weights, d_out, x):
        return (None,) * len(weights)
    gradients: tuple[Tensor, ...] = (d_out.T @ x).split([len(weight) for weight in weights])
    return gradients
