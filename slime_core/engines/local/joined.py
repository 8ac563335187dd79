"""Logits of packed rows for Llama, Mistral, Qwen2 and Qwen3 through the kernels of `slime_core.kernels`.

    x -> norm -> [q k v] -> head norms, rotate, write -> attend -> out -> + , norm -> [gate up] -> silu * -> down

About nine launches a layer, nothing of which reads on the host. Weights of layers over one input are views of one
tensor (see `twin.Twin`), so nothing lies in memory twice and a load writes straight into what is multiplied.
Nothing here is trusted: the engine compares the logits with the module's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from slime_core.engines.local.adapters import LowRank, ServedAdapters
from slime_core.engines.local.attention import Form
from slime_core.engines.local.lean import check_family
from slime_core.engines.local.packed import Unfit
from slime_core.engines.local.pages import PagedCache, PagedTokens
from slime_core.engines.local.slots import LayerShape
from slime_core.kernels.cache import norm_rotate_store
from slime_core.kernels.gated import gated
from slime_core.kernels.linear import invariant_linear, joined
from slime_core.kernels.norm import add_rms_norm, rms_norm
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.kernels.rotary import tables
from slime_core.weights.build import attention_window

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class JoinedLinear:
    """Linear layers over the same input, whose weights lie one behind another, as one: [N, in] -> [N, sum of out].

    Weights in 4 or 8 bits are floats for the time of a product.
    """

    def __init__(self, *layers: Any, adapters: ServedAdapters | None = None) -> None:
        self._layers = layers
        self._low = LowRank(adapters, layers) if adapters is not None else None
        self.weight = torch.empty(0)  # sum of out, in
        self._quantised: list[torch.Tensor] = []
        self.bias: torch.Tensor | None = None

    def refresh(self) -> None:
        """Follow the parameters."""
        if self._low:
            self._low.refresh()
        weights = [layer.weight.detach() for layer in self._layers]
        self._quantised = weights if any(isinstance(one, QuantisedWeight) for one in weights) else []
        self.weight = joined(weights) if not self._quantised else torch.empty(0)
        biases = [layer.bias.detach() for layer in self._layers if layer.bias is not None]
        if biases and len(biases) < len(self._layers):
            raise Unfit("some of the joined layers have a bias")
        self.bias = joined(biases) if biases else None

    def release(self) -> None:
        """Let go of the parameters' memory."""
        if self._low:
            self._low.release()
        self.weight, self._quantised, self.bias = self.weight.new_empty(0), [], None

    def product(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """By ``linear``, and what the rows' adapters add."""
        y = linear(x, joined(self._quantised) if self._quantised else self.weight, self.bias)
        return self._low.add_to(y, x, self.bias) if self._low else y


class _JoinedLayer:
    """One decoder layer's matrices and vectors."""

    def __init__(self, module: Any, adapters: ServedAdapters | None) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.qkv = JoinedLinear(attention.q_proj, attention.k_proj, attention.v_proj, adapters=adapters)
        self.out = JoinedLinear(attention.o_proj, adapters=adapters)
        self.gate_up = JoinedLinear(mlp.gate_proj, mlp.up_proj, adapters=adapters)
        self.down = JoinedLinear(mlp.down_proj, adapters=adapters)
        self.matrices = self.qkv, self.out, self.gate_up, self.down
        self.norms = module.input_layernorm, module.post_attention_layernorm
        self.head_norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        self.form = Form(scale=float(attention.scaling), window=attention_window(attention))
        self.heads: torch.Tensor | None = None  # [Hq + Hkv, d]: weights of the head norms

    @torch.no_grad()
    def refresh(self, counts: tuple[int, int]) -> None:
        """Follow the parameters; what was copied stays where it is."""
        for matrix in self.matrices:
            matrix.refresh()
        if self.head_norms:
            parts = [norm.weight.expand(count, -1) for norm, count in zip(self.head_norms, counts, strict=True)]
            if self.heads is None:
                self.heads = torch.cat(parts)
            else:
                torch.cat(parts, out=self.heads)


class JoinedPlan:
    """The family's forward pass over pages.

    ``exact`` takes products and attention whose rows have the same bits in every pass, as the trainer's then has.

    Raises:
        Unfit: another family, or an option of it that is not written here.
    """

    name = "lean"
    hidden_widths = False

    def __init__(self, model: Any, adapters: ServedAdapters | None = None, *, exact: bool = False) -> None:
        self.linear: Linear = invariant_linear if exact else F.linear
        self.invariant = exact
        config = model.config
        check_family(type(model).__name__, config)
        self._model = model
        self._layers = [_JoinedLayer(layer, adapters) for layer in model.model.layers]
        self._head = JoinedLinear(model.lm_head)
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = model.model.layers[0].self_attn.head_dim
        self._eps = float(model.model.norm.variance_epsilon)
        self.shapes = [LayerShape(self._kv_heads, self._dim, self._dim)] * len(self._layers)
        self._cos = self._sin = torch.empty(0)
        self.reach(1)
        self.refresh()

    def refresh(self) -> None:
        """Follow the parameters."""
        for layer in self._layers:
            layer.refresh((self._heads, self._kv_heads))
        self._head.refresh()

    def release(self) -> None:
        """Let go of the parameters' memory until :meth:`refresh`."""
        for layer in self._layers:
            for matrix in layer.matrices:
                matrix.release()
        self._head.release()

    @torch.no_grad()
    def reach(self, positions: int) -> None:
        """Make the rotations of so many positions; what was captured over the ones before is void."""
        if positions <= len(self._cos):
            return
        like = self._model.model.embed_tokens.weight
        self._cos, self._sin = tables(self._model.model.rotary_emb, like, positions)

    def forward(self, rows: PagedTokens, cache: PagedCache, *, logits: bool = True) -> torch.Tensor | None:
        """One pass; logits [R, V] of the sampled rows, or None where they are not wanted."""
        linear, count = self.linear, len(rows)
        residual = F.embedding(rows.tokens, self._model.model.embed_tokens.weight)
        x = rms_norm(residual, self._layers[0].norms[0].weight, self._eps)
        for index, layer in enumerate(self._layers):
            if index:
                x, residual = add_rms_norm(x, residual, layer.norms[0].weight, self._eps)
            qkv = layer.qkv.product(linear, x).view(count, -1, self._dim)
            at = self._cos, self._sin, rows.positions, rows.places
            norm_rotate_store(qkv, layer.heads, self._eps, *at, cache.keys[index], cache.values[index], self._heads)
            mixed = rows.look(cache, index, qkv[:, : self._heads], layer.form)
            x = layer.out.product(linear, mixed.view(count, -1))
            x, residual = add_rms_norm(x, residual, layer.norms[1].weight, self._eps)
            x = layer.down.product(linear, gated(layer.gate_up.product(linear, x)))
        if not logits:
            return None
        if rows.sampled is not None:
            x, residual = x[rows.sampled], residual[rows.sampled]
        x, _ = add_rms_norm(x, residual, self._model.model.norm.weight, self._eps)
        return linear(x, self._head.weight, self._head.bias)
