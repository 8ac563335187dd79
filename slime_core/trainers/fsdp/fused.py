"""Decoder layers of known shape with their forward and backward written out, for a CPU, which is bound by memory.

A GPU's are in `fused_cuda`.

    x -> norm -> [q k v] -> (q, k norm) -> rotary -> attention -> o + x -> norm -> [gate up] -> silu * -> down + .

Norm weights are folded into the next matrix, projections of one input are one product, residuals are the beta of a
product, and each array is read and written as seldom as it can be.

A layer is replaced only where its numbers and gradients were found to be the module's own (see `policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from slime_core.trainers.fsdp.attention import Attention, PackSegments
from slime_core.trainers.fsdp.low_rank import adapters_of, factors_of
from slime_core.weights.build import attention_window

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.masters import Masters

KNOWN = (
    *("Qwen3DecoderLayer", "Qwen3VLTextDecoderLayer"),
    *("Qwen2DecoderLayer", "Qwen2VLDecoderLayer", "Qwen2_5_VLDecoderLayer", "LlamaDecoderLayer"),
)
KNOWN_ON_GPU = (*KNOWN, "MistralDecoderLayer")
Tensor = torch.Tensor
Maybe = torch.Tensor | None


@dataclass(slots=True, frozen=True)
class Shape:
    """What the tensors of a layer do not tell."""

    heads: int
    kv_heads: int
    dim: int  # of a head
    scaling: float
    eps: float
    recompute: bool  # keep nothing but the input, and make the rest again in the backward pass
    window: int | None = None  # rows that a row sees, on a GPU alone; all before it where it is None
    masters: Masters | None = None  # that gradients are added to, on a GPU alone
    adapters: float = 0.0  # scaling of their products


class LayerWeights(NamedTuple):
    """Parameters of a layer; biases and head norms where the family has them."""

    norm1: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Maybe
    k_bias: Maybe
    v_bias: Maybe
    q_norm: Maybe
    k_norm: Maybe
    o: Tensor
    norm2: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Folded(NamedTuple):
    """Matrices as the products use them."""

    qkv: Tensor  # [q k v rows, hidden], input norm folded in
    bias: Maybe
    heads: Maybe  # [heads + kv heads, d], norm weight of each head
    gate_up: Tensor  # [2 * intermediate, hidden], norm folded in

    @classmethod
    def of(cls, w: LayerWeights, shape: Shape) -> Folded:
        """From a layer's parameters."""
        heads, bias = head_norms(w, shape), None
        if w.q_bias is not None and w.k_bias is not None and w.v_bias is not None:
            bias = torch.cat((w.q_bias, w.k_bias, w.v_bias))
        return cls(torch.cat((w.q, w.k, w.v)).mul_(w.norm1), bias, heads, torch.cat((w.gate, w.up)).mul_(w.norm2))


def head_norms(w: LayerWeights, shape: Shape) -> Maybe:
    """Norm weights of query and key heads, [heads + kv heads, d], where the family has them."""
    if w.q_norm is None or w.k_norm is None:
        return None
    return torch.cat((w.q_norm.expand(shape.heads, -1), w.k_norm.expand(shape.kv_heads, -1)))


class GradientSums(NamedTuple):
    """Gradients of the folded matrices."""

    qkv: Tensor
    bias: Tensor
    heads: Maybe
    o: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, w: LayerWeights, folded: Folded) -> GradientSums:
        """Room for them."""
        empty = torch.empty_like
        heads = empty(folded.heads) if folded.heads is not None else None
        bias = folded.qkv.new_empty(len(folded.qkv))
        return cls(empty(folded.qkv), bias, heads, empty(w.o), empty(folded.gate_up), empty(w.down))

    def gradients(self, w: LayerWeights, shape: Shape) -> tuple[Maybe, ...]:
        """Gradients of the layer's parameters, in their order: a folded matrix is weight * norm."""
        sizes = (len(w.q), len(w.k), len(w.v))
        d_norm1 = torch.linalg.vecdot(self.qkv, torch.cat((w.q, w.k, w.v)), dim=0)
        d_norm2 = torch.linalg.vecdot(self.gate_up, torch.cat((w.gate, w.up)), dim=0)
        biases: tuple[Maybe, ...] = self.bias.split(sizes) if w.q_bias is not None else (None, None, None)
        heads: tuple[Maybe, ...] = (None, None)
        if self.heads is not None:
            heads = (self.heads[: shape.heads].sum(0), self.heads[shape.heads :].sum(0))
        return (
            d_norm1, *self.qkv.mul_(w.norm1).split(sizes), *biases, *heads,
            self.o, d_norm2, *self.gate_up.mul_(w.norm2).chunk(2), self.down,
        )  # fmt: skip


class SavedActivations(NamedTuple):
    """What the backward pass reads."""

    h: Tensor  # normed input
    r: Tensor  # its factor
    n: Tensor  # q and k, normed where the family does
    rn: Maybe  # their factor
    o: Tensor  # attention's output
    h2: Tensor
    r2: Tensor
    gu: Tensor  # gate and up


class Pass:
    """See `WrittenPass`."""

    reads_input = False

    def __init__(self, shape: Shape, segments: PackSegments, cos: Tensor, sin: Tensor) -> None:
        self.shape, self.cos, self.sin = shape, cos, sin
        self.attention = [Attention(run, shape.scaling) for run in segments.runs]
        self.saved: SavedActivations | None = None

    def run(self, x: Tensor, out: Tensor, tensors: Sequence[Maybe], keep: bool) -> None:
        """As in `WrittenPass`."""
        w = LayerWeights(*tensors)  # type: ignore[arg-type]
        f, eps = Folded.of(w, self.shape), self.shape.eps
        h, r = normed(x, eps)
        flat = torch.addmm(f.bias, h, f.qkv.T) if f.bias is not None else h @ f.qkv.T
        n, rn, o = self.attention_of(flat, f.heads, keep)
        y = torch.addmm(x, o, w.o.T)
        h2, r2 = normed(y, eps)
        gu = h2 @ f.gate_up.T
        gate, up = gu.chunk(2, dim=1)
        torch.addmm(y, nn.functional.silu(gate).mul_(up), w.down.T, out=out)
        if keep:
            self.saved = SavedActivations(h, r, n, rn, o, h2, r2, gu)

    def attention_of(self, flat: Tensor, heads: Maybe, keep: bool) -> tuple[Tensor, Maybe, Tensor]:
        """Queries and keys, normed where the family does, their factor, and what attention makes of [q k v]."""
        both = self.shape.heads + self.shape.kv_heads
        qkv = flat.unflatten(1, (-1, self.shape.dim))
        n, rn = normed(qkv[:, :both], self.shape.eps) if heads is not None else (qkv[:, :both], None)
        rotated = _rotate(n if heads is None else n * heads, self.cos, self.sin)
        mixed = self._attend(rotated[:, : self.shape.heads], rotated[:, self.shape.heads :], qkv[:, both:], keep)
        return n, rn, mixed.flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, keep: bool) -> Tensor:
        """[T, heads, d]."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for one in self.attention:
            by_heads = [one.run.fill(t).transpose(1, 2).contiguous() for t in (q, k, v)]
            one.run.put(one.forward(by_heads[0], by_heads[1], by_heads[2], keep).transpose(1, 2), out)
        return out

    def gradients(self, d_out: Tensor, x: Maybe, tensors: Sequence[Maybe]) -> tuple[Maybe, ...]:
        """As in `WrittenPass`."""
        assert self.saved is not None
        w = LayerWeights(*tensors)  # type: ignore[arg-type]
        f = Folded.of(w, self.shape)
        sums = GradientSums.of(w, f)
        (h, r, n, rn, o, h2, r2, gu), self.saved = self.saved, None
        d_gu = self._mlp_backward(d_out, gu, w, sums)
        torch.mm(d_gu.T, h2, out=sums.gate_up)
        d_y = normed_backward(d_gu @ f.gate_up, h2, r2).add_(d_out)
        torch.mm(d_y.T, o, out=sums.o)
        d_qkv = self.attention_backward(d_y @ w.o, n, rn, f.heads, sums.heads)
        torch.mm(d_qkv.T, h, out=sums.qkv)
        if w.q_bias is not None:
            torch.sum(d_qkv, 0, out=sums.bias)
        d_x = normed_backward(d_qkv @ f.qkv, h, r).add_(d_y)
        return d_x, *sums.gradients(w, self.shape)

    def _mlp_backward(self, d_out: Tensor, gu: Tensor, w: LayerWeights, sums: GradientSums) -> Tensor:
        """Gradient of [gate up], in place of ``gu``: fresh memory costs as much as what is done in it."""
        gate, up = gu.chunk(2, dim=1)
        silu = nn.functional.silu(gate)
        act = silu * up
        torch.mm(d_out.T, act, out=sums.down)
        return swiglu_backward(d_out @ w.down, gu, silu, act)

    def attention_backward(self, d_o: Tensor, n: Tensor, rn: Maybe, heads: Maybe, d_heads: Maybe) -> Tensor:
        """Gradient of [q k v], before head norms and rotary; that of the norms fills ``d_heads`` where it is given."""
        both, dim = self.shape.heads + self.shape.kv_heads, self.shape.dim
        d_rows = d_o.unflatten(1, (-1, dim))
        d_all = d_o.new_zeros(len(d_o), both + self.shape.kv_heads, dim)
        for one in self.attention:
            grads = one.backward(one.run.fill_gradient(d_rows).transpose(1, 2))
            one.run.add(torch.cat(grads, dim=1).transpose(1, 2), d_all)
        d_qk = d_all[:, :both]
        d_m = _rotate(d_qk, self.cos, -self.sin)
        if heads is not None:
            assert rn is not None
            if d_heads is not None:
                torch.sum(d_m * n, 0, out=d_heads)
            d_m = normed_backward(d_m.mul_(heads), n, rn)
        d_qk.copy_(d_m)
        return d_all.flatten(1)


class WrittenPass(Protocol):
    """One pack through a layer, forward and then backward; it keeps what the backward pass reads."""

    shape: Shape
    reads_input: bool  # in the backward pass

    def run(self, x: Tensor, out: Tensor, tensors: Sequence[Maybe], keep: bool) -> None:
        """Fill ``out`` [T, hidden]; ``tensors`` are the layer's weights, and factors of its adapters behind them."""

    def gradients(self, d_out: Tensor, x: Maybe, tensors: Sequence[Maybe]) -> tuple[Maybe, ...]:
        """Gradients of x and of ``tensors``; what was kept is given back."""


class WrittenLayer(torch.autograd.Function):
    """One layer on x [T, hidden], by a `WrittenPass` that may be made once more in the backward pass."""

    @staticmethod
    def forward(ctx: Any, one: WrittenPass, x: Tensor, *tensors: Maybe) -> Tensor:
        keep, recompute = any(ctx.needs_input_grad), one.shape.recompute
        out = x.new_empty(1, *x.shape)  # with the batch axis from the start: FSDP's hooks want no view
        one.run(x, out[0], tensors, keep and not recompute)
        if keep:
            ctx.one, ctx.tensors = one, tensors
            ctx.save_for_backward(x if recompute or one.reads_input else None)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Maybe, ...]:
        (x,), one = ctx.saved_tensors, ctx.one
        ctx.one = None
        if one.shape.recompute:
            one.run(x, torch.empty_like(x), ctx.tensors, True)
        return None, *one.gradients(grads[0][0], x, ctx.tensors)


MakePass = Callable[[Shape, PackSegments, Tensor, Tensor], WrittenPass]


def swiglu_backward(d_act: Tensor, gu: Tensor, silu: Tensor, room: Tensor) -> Tensor:
    """Gradient of [gate up] from that of silu(gate) * up, in place of ``gu``; ``room`` is used up."""
    gate, up = gu.chunk(2, dim=1)
    d_silu = torch.mul(d_act, up, out=room)
    torch.mul(d_act, silu, out=up)
    torch.ops.aten.silu_backward.grad_input(d_silu, gate, grad_input=gate)
    return gu


def normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square along the last axis, and the factor."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * r).to(x.dtype), r


def normed_backward(d_h: Tensor, h: Tensor, r: Tensor) -> Tensor:
    """Gradient of x where h = x * r(x), in place of ``d_h``: r (d_h - h mean(d_h h))."""
    mean = torch.linalg.vecdot(d_h, h, dim=-1)[..., None].div_(h.shape[-1])
    return d_h.addcmul_(h, mean, value=-1).mul_(r)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Maybe = None) -> Tensor:
    """Rotary embedding of [T, heads, d]; cos and sin are [T, 1, d]. With -sin it is the gradient's."""
    half = x.shape[-1] // 2
    out = torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def fuse(
    layer: nn.Module,
    config: Any,
    on_gpu: MakePass | None = None,
    with_adapters: tuple[MakePass, MakePass] | None = None,
) -> Callable[..., Tensor] | None:
    """A forward that replaces the layer's own, or None where the layer is not of a known shape.

    It takes what transformers' models hand to a layer (hidden states [1, T, hidden], ``position_embeddings``), and
    ``segments``, ``recompute`` and, on a GPU, ``masters`` that gradients are added to. ``on_gpu`` is the pass there,
    `fused_cuda.GpuPass`, and ``with_adapters`` are those of layers with adapters, on a CPU and on a GPU.
    """
    by_triton = any(parameter.is_cuda for parameter in layer.parameters())
    if (
        type(layer).__name__ not in (KNOWN_ON_GPU if by_triton else KNOWN)
        or getattr(config, "hidden_act", "") != "silu"
    ):
        return None
    block: Any = layer
    attention, mlp = block.self_attn, block.mlp
    biased = [attention.q_proj, attention.k_proj, attention.v_proj]
    plain = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    adapters = adapters_of((*biased, *plain))
    if any(type(m) is not nn.Linear for m in (*biased, *plain)) and (adapters is None or with_adapters is None):
        return None
    if any(m.bias is not None for m in plain):
        return None
    window = attention_window(attention) or None
    if window is not None and not by_triton:
        return None
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]

    def forward(
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        segments: PackSegments,
        recompute: bool,
        masters: Masters | None = None,
        **_: Any,
    ) -> Tensor:
        shape = Shape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=attention.head_dim,
            scaling=attention.scaling,
            eps=config.rms_norm_eps,
            recompute=recompute,
            window=window,
            masters=masters,
            adapters=adapters.spec.scaling if adapters is not None else 0.0,
        )
        cos, sin = (table[0, :, None, :] for table in position_embeddings)
        norms = [norm.weight if norm is not None else None for norm in head_norms]
        weights = (
            block.input_layernorm.weight, *(m.weight for m in biased), *(m.bias for m in biased), *norms,
            attention.o_proj.weight, block.post_attention_layernorm.weight, *(m.weight for m in plain[1:]),
        )  # fmt: skip
        make: MakePass = on_gpu if on_gpu is not None and hidden_states.is_cuda else Pass
        factors: list[Maybe] = []
        if adapters is not None and with_adapters is not None:
            make, factors = with_adapters[hidden_states.is_cuda], factors_of((*biased, *plain))
        out: Tensor = WrittenLayer.apply(make(shape, segments, cos, sin), hidden_states[0], *weights, *factors)
        return out

    return forward
