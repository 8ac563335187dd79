"""Logits of packed rows for Llama, Mistral, Qwen2 and Qwen3, with little Python a layer.

    x -> norm -> [q k v] -> (head norms) -> rotate -> write, attend -> + x -> norm -> [gate up] -> silu * -> + x

Products run over copies of the weights, joined and transposed once at every load, while the model is small; above
FUSE_BYTES over the module's own tensors. Nothing here is trusted: the engine compares the logits with the module's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from slime_core.engines.local.adapters import LowRank, ServedAdapters
from slime_core.engines.local.attention import Form, PackedTokens, StepAttention, look, write
from slime_core.engines.local.packed import Unfit
from slime_core.engines.local.row_counts import GRAIN, Product
from slime_core.engines.local.slots import KVCache, LayerShape
from slime_core.weights.build import attention_window

if TYPE_CHECKING:
    from torch import nn

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
FUSE_BYTES = 1 << 30
"""Parameters that take more are not copied."""

ROTATIONS = 1024
"""Positions whose angles are computed at once."""


class Matrix:
    """Linear layers over the same input, as one product: [N, in] -> [N, sum of out].

    ``norm`` holds the weights of the norm before it, which a fused float32 matrix takes in.
    """

    def __init__(
        self, layers: Sequence[nn.Linear], norm: Any = None, *, fused: bool, adapters: ServedAdapters | None = None
    ) -> None:
        self._layers = list(layers)
        self._fused = fused
        self._norm = norm
        self._takes_norm = norm is not None and fused and layers[0].weight.dtype == torch.float32
        self._low = LowRank(adapters, layers, norm if self._takes_norm else None) if adapters is not None else None
        self._weight = torch.empty(0)  # in, out
        self._bias: torch.Tensor | None = None

    def refresh(self) -> None:
        """Copy what the layers hold now."""
        if self._low:
            self._low.refresh()
        biases = [layer.bias for layer in self._layers]
        if any(bias is not None for bias in biases) and (self._fused or (self._low and self._low.scales)):
            zeros = self._layers[0].weight.new_zeros
            self._bias = torch.cat(
                [zeros(layer.out_features) if layer.bias is None else layer.bias for layer in self._layers]
            )
        if not self._fused:
            return
        width = sum(layer.out_features for layer in self._layers)
        like = self._layers[0].weight
        if self._weight.shape != (like.shape[1], width):
            self._weight = torch.empty(like.shape[1], width, dtype=like.dtype, device=like.device)
        torch.cat([layer.weight.t() for layer in self._layers], 1, out=self._weight)
        if self._takes_norm:
            self._weight.mul_(self._norm.weight[:, None])

    def release(self) -> None:
        """Drop the copies."""
        if self._low:
            self._low.release()
        self._weight, self._bias = torch.empty(0), None

    def after_norm(
        self, x: torch.Tensor, eps: torch.Tensor, into: _Normed, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The product of the norm of x."""
        return self(into.norm(x, None if self._takes_norm else self._norm.weight, eps), out)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y = self._base(x, out)
        return self._low.add_to(y, x, self._bias) if self._low else y

    def _base(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if not self._fused:
            parts = [F.linear(x, layer.weight, layer.bias) for layer in self._layers]
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1, out=out)
        if self._bias is not None:
            return torch.addmm(self._bias, x, self._weight, out=out)
        return torch.mm(x, self._weight, out=out)

    def add_to(self, base: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the product to ``base``."""
        if not self._fused or self._bias is not None or (self._low and self._low.scales):
            return base.add_(self(x))
        base.addmm_(x, self._weight)
        return self._low.add_to(base, x) if self._low else base

    def products(self) -> list[Product]:
        """For measuring how many rows they may have."""
        first = self._layers[0]
        width = sum(layer.out_features for layer in self._layers)
        products = [Product(first.in_features, width, first.weight.dtype, self, False)]
        if self._fused and len(self._layers) == 1:
            products.append(Product(first.in_features, width, first.weight.dtype, self._onto, False))
        return products

    def _onto(self, x: torch.Tensor) -> torch.Tensor:
        return self.add_to(x.sum(-1, keepdim=True).expand(-1, self._layers[0].out_features).contiguous(), x)


class _Layer:
    """One decoder layer's matrices and vectors."""

    def __init__(self, layer: Any, *, fused: bool, adapters: ServedAdapters | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        more: Any = {"fused": fused, "adapters": adapters}
        self.module = layer
        before = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = Matrix([attention.q_proj, attention.k_proj, attention.v_proj], before[0], **more)
        self.out = Matrix([attention.o_proj], **more)
        self.gate_up = Matrix([mlp.gate_proj, mlp.up_proj], before[1], **more)
        self.down = Matrix([mlp.down_proj], **more)
        self.head_norms = hasattr(attention, "q_norm")
        norms = [*before, attention.q_norm] if self.head_norms else before
        self.eps = [torch.tensor(norm.variance_epsilon, device=norm.weight.device) for norm in norms]
        self.window = attention_window(attention)
        self.heads = torch.empty(0)  # [Hq + Hkv, d]: the head norms' weights, queries scaled

    @property
    def matrices(self) -> list[Matrix]:
        return [self.qkv, self.out, self.gate_up, self.down]

    def refresh(self, heads: int, kv_heads: int, scale: float) -> None:
        for matrix in self.matrices:
            matrix.refresh()
        if self.head_norms:
            attention = self.module.self_attn
            query = (attention.q_norm.weight * scale).expand(heads, -1)
            self.heads = torch.cat([query, attention.k_norm.weight.expand(kv_heads, -1)])


class _Normed:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of [..., d].

    Few kernels, where F.rms_norm has a dozen calls.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._part = 1 / like.shape[-1]
        self._length, self._inverse = like.new_empty(2, *like.shape[:-1], 1)

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, eps: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The norm of x, in ``out`` where that is given."""
        if x.dtype != torch.float32:
            normed = F.rms_norm(x, (x.shape[-1],), None, float(eps))
            normed = normed if weight is None else normed * weight
            return normed if out is None else out.copy_(normed)
        length = torch.linalg.vector_norm(x, 2, -1, True, out=self._length)
        torch.addcmul(eps, length, length, value=self._part, out=self._inverse).rsqrt_()
        normed = torch.mul(x, self._inverse, out=out)
        return normed if weight is None else normed.mul_(weight)


class _Scratch:
    """What passes of ``count`` rows write into, with its views: they cost as much as what a small pass does there."""

    def __init__(self, layer: _Layer, count: int, heads: int, kv_heads: int, dim: int) -> None:
        make, both = layer.module.mlp.gate_proj.weight.new_empty, heads + kv_heads
        self.normed = _Normed(make(count, layer.module.mlp.gate_proj.in_features))
        self.count, half = count, dim // 2
        self.qkv = make(count, (both + kv_heads) * dim)
        by_head = self.qkv.view(count, -1, dim)
        self.turning, self.query = by_head[:, :both], by_head[:, :heads]
        self.heads = _Normed(self.turning)
        self.grouped = self.query.view(count, kv_heads, heads // kv_heads, dim)
        self.keys_values = by_head[:, heads:].view(count, 2, kv_heads, dim)
        self.swapped = make(count, both, dim)  # halves of each head
        self.swaps = (
            (self.swapped[..., :half], self.turning[..., half:]),
            (self.swapped[..., half:], self.turning[..., :half]),
        )
        self.gate_up = make(count, 2 * layer.module.mlp.gate_proj.out_features)
        self.gate, self.up = self.gate_up.chunk(2, -1)


class LeanPlan:
    """The family's forward pass.

    Raises:
        Unfit: another family, or an option of it that is not written here.
    """

    name = "lean"
    hidden_widths = False

    def __init__(self, model: Any, adapters: ServedAdapters | None = None) -> None:
        self._model = model
        config = model.config
        check_family(type(model).__name__, config)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        fused = size <= FUSE_BYTES
        self._layers = [_Layer(layer, fused=fused, adapters=adapters) for layer in self._model.model.layers]
        self._head = Matrix([self._model.lm_head], self._model.model.norm, fused=fused)
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = self._model.model.layers[0].self_attn.head_dim
        self._scale = float(self._model.model.layers[0].self_attn.scaling)
        norm = self._model.model.norm
        self._eps = torch.tensor(norm.variance_epsilon, device=norm.weight.device)
        self._cos, self._sin = self._rotations(0)
        self._scratch: _Scratch | None = None  # of the last pass
        self._step: StepAttention | None = None  # of the last decode step
        self.shapes = [LayerShape(self._kv_heads, self._dim, self._dim)] * len(self._layers)
        self._forms = [
            Form(scale=1.0 if layer.head_norms else self._scale, window=layer.window) for layer in self._layers
        ]
        self.refresh()

    def products(self) -> list[Product]:
        """Every product of a pass."""
        first = self._layers[0]
        return [product for matrix in (*first.matrices, self._head) for product in matrix.products()]

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow the parameters."""
        for layer in self._layers:
            layer.refresh(self._heads, self._kv_heads, self._scale)
        self._head.refresh()

    def release(self) -> None:
        """Drop every copy."""
        self._scratch = self._step = None
        for layer in self._layers:
            layer.heads = torch.empty(0)
            for matrix in layer.matrices:
                matrix.release()
        self._head.release()

    def forward(self, rows: PackedTokens, cache: KVCache, *, logits: bool) -> torch.Tensor | None:
        """One pass; the logits [N, V] of every row, or None where they are not wanted."""
        x = F.embedding(rows.tokens, self._model.model.embed_tokens.weight)
        while len(self._cos) < cache.length:
            more = self._rotations(len(self._cos))
            self._cos, self._sin = (torch.cat(pair) for pair in zip((self._cos, self._sin), more, strict=True))
        turn = self._cos.index_select(0, rows.positions), self._sin.index_select(0, rows.positions)
        scratch = self._space(len(rows))
        for index, layer in enumerate(self._layers):
            self._project(layer, x, scratch, *turn)
            write(cache, index, rows, scratch.keys_values)
            if not logits and index == len(self._layers) - 1:
                return None
            layer.out.add_to(x, self._look(cache, index, rows, scratch))
            layer.gate_up.after_norm(x, layer.eps[1], scratch.normed, scratch.gate_up)
            layer.down.add_to(x, _gated(scratch.gate, scratch.up))
        return self._head.after_norm(x, self._eps, scratch.normed)

    def _space(self, count: int) -> _Scratch:
        if self._scratch is None or self._scratch.count != count:
            self._scratch = None  # its memory first
            self._scratch = _Scratch(self._layers[0], count, self._heads, self._kv_heads, self._dim)
        return self._scratch

    def _look(self, cache: KVCache, index: int, rows: PackedTokens, scratch: _Scratch) -> torch.Tensor:
        """Attention of a layer, [N, Hq * d]."""
        form = self._forms[index]
        if rows.segments is not None:
            return look(cache, index, rows, scratch.query, form).view(len(rows), -1)
        if self._step is None or self._step.size != (len(rows), rows.short):
            self._step = StepAttention(len(rows), self._heads, self.shapes[0], rows.short)
        query = self._step.query.copy_(scratch.grouped)
        if form.scale != 1.0:
            query.mul_(form.scale)
        return self._step.look(cache, index, rows, form).to(scratch.qkv.dtype)

    def _project(self, layer: _Layer, x: torch.Tensor, into: _Scratch, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Queries, keys and values of a layer, queries and keys turned."""
        layer.qkv.after_norm(x, layer.eps[0], into.normed, into.qkv)
        if layer.head_norms:
            into.heads.norm(into.turning, layer.heads, layer.eps[2], into.turning)
        for half, other in into.swaps:
            half.copy_(other)
        into.turning.mul_(cos).addcmul_(into.swapped, sin)

    @torch.no_grad()
    def _rotations(self, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[ROTATIONS, 1, d] each; the sine's first half negated, so that a roll stands for rotate-half.

        Always as many from ``begin``: a table of another length would round the tails of threads' shares differently.
        """
        like = self._model.model.embed_tokens.weight
        positions = torch.arange(begin, begin + ROTATIONS, device=like.device)[None]
        cos, sin = self._model.model.rotary_emb(like.new_zeros(1, 1), positions)
        if cos.shape[-1] != self._dim:
            raise Unfit("only a part of each head is rotated")
        half = self._dim // 2
        sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        return cos[0][:, None].contiguous(), sin[:, None].contiguous()


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [N, I]; on one thread a block, so that no thread's share ends inside a row."""
    if torch.get_num_threads() <= 2 or gate.numel() <= GRAIN:
        return F.silu(gate).mul_(up)
    rows = max(1, GRAIN // gate.shape[1])
    return torch.cat([F.silu(g).mul_(u) for g, u in zip(gate.split(rows), up.split(rows), strict=True)])


def check_family(kind: str, config: Any) -> None:
    """Raises Unfit for families, and options of them, that are not written here."""
    if kind not in FAMILIES:
        raise Unfit(f"there is no lean plan for {kind}")
    if config.hidden_act != "silu":
        raise Unfit(f"the activation is {config.hidden_act}")
