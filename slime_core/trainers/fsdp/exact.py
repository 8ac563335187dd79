"""The policy's pass in the arithmetic of the embedded engine, so that its log-probs have the bits of those sampled.

    embed -> norm -> [q k v] -> head norms, rotate -> attend -> out -> + , norm -> [gate up] -> silu * -> down -> +

The kernels and their order are those of `engines.local.joined`; each row has its bits whatever lies beside it.
Gradients are summed in fixed orders: they repeat bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from slime_core.algorithms.shared.logprobs import HeadKernels
from slime_core.errors import ConfigError
from slime_core.kernels.attention import varlen_attention
from slime_core.kernels.cache import norm_rotate_store
from slime_core.kernels.gated import gated
from slime_core.kernels.linear import invariant_linear
from slime_core.kernels.norm import add_rms_norm, rms_norm
from slime_core.kernels.rotary import rotate, tables
from slime_core.kernels.sampling import log_softmax_at
from slime_core.trainers.fsdp.attention import PackSegments, as_packed, end_to_end, take
from slime_core.weights.build import attention_window

Tensor = torch.Tensor
FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class PackRows:
    """What every layer of a pass reads beside its input. No dataclass, which FSDP would cast.

    Rows of its attention are those of all sequences end to end, shared prompts in each.
    """

    __slots__ = ("cos", "places", "positions", "segments", "sin")

    def __init__(self, positions: Tensor, segments: PackSegments, cos: Tensor, sin: Tensor) -> None:
        self.segments, self.cos, self.sin = segments, cos, sin  # tables by position
        self.positions = positions if segments.shared is None else segments.shared.spread(positions)
        self.places = torch.arange(len(self.positions), device=positions.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Causal attention within each sequence, for rows of the pack: [N, Hq, d]."""
        cu, longest = self.segments.cu_seqlens, self.segments.longest
        out = varlen_attention(q, k, v, cu, longest, scale=scale, window=window, invariant=True)
        return as_packed(self.segments, out)


class ExactPass:
    """Replaces the layers' forwards of a `model.FsdpPolicy`, whose model no longer runs without it.

    Raises:
        ConfigError: CFG04 a family, or an option of it, whose arithmetic the engine has not written out.
    """

    def __init__(self, policy: Any) -> None:
        hf = policy.hf
        config, kind = hf.config, type(hf).__name__
        if kind not in FAMILIES or config.hidden_act != "silu" or not policy.packs or not policy.linear_head:
            raise ConfigError(
                f"{kind} cannot be trained with train.true_on_policy_mode",
                code="CFG04",
                where="train.true_on_policy_mode",
                why=f"its arithmetic is written out for {', '.join(FAMILIES)} with silu alone",
                fix="--no-true-on-policy-mode",
            )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch warns in `fixed_sums`
        self.hf = hf
        self.eps = float(hf.model.norm.variance_epsilon)
        self._cos = self._sin = torch.empty(0)
        for number, layer in enumerate(hf.model.layers):
            layer.forward = partial(self._layer, policy, number, layer)

    def hidden(self, tokens: Tensor, positions: Tensor, segments: PackSegments, predict: Tensor) -> Tensor:
        """Normed hidden states [R, hidden] of the rows ``predict`` of a pack."""
        model = self.hf.model
        weight = model.embed_tokens.weight
        if len(self._cos) < segments.longest or self._cos.dtype != weight.dtype:
            with torch.no_grad():
                self._cos, self._sin = tables(model.rotary_emb, weight.detach(), segments.longest)
        rows = PackRows(positions, segments, self._cos, self._sin)
        state: Any = None, F.embedding(tokens, weight)
        for layer in model.layers:
            state = layer(*state, rows)
        x, residual = (take(one, predict) for one in state)
        return add_rms_norm(x, residual, model.norm.weight, self.eps)[0]

    def head(self, rows: Any) -> HeadKernels:
        """Logits and log-probs of `model.ResponseTokens` as the engine computes them."""

        def log_probs(logits: Tensor, part: slice) -> Tensor:
            temperature = None if rows.temperature is None else rows.temperature[part]
            return log_softmax_at(logits, rows.target[part], temperature)

        return HeadKernels(invariant_linear, log_probs)

    def _layer(
        self, policy: Any, number: int, layer: Any, x: Tensor | None, residual: Tensor, rows: PackRows
    ) -> tuple[Tensor, Tensor]:
        if number < policy.recompute and torch.is_grad_enabled():
            with policy.saving(number, x, residual):
                return checkpoint(self._run, layer, x, residual, rows, use_reentrant=False)  # type: ignore[no-any-return]
        return self._run(layer, x, residual, rows)

    def _run(self, layer: Any, x: Tensor | None, residual: Tensor, rows: PackRows) -> tuple[Tensor, Tensor]:
        attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm.weight
        if x is None:
            x = rms_norm(residual, norm, self.eps)
        else:
            x, residual = add_rms_norm(x, residual, norm, self.eps)
        window = attention_window(attention)
        (qkv,) = end_to_end(rows.segments, _joined(x, attention.q_proj, attention.k_proj, attention.v_proj))
        qkv = qkv.unflatten(1, (-1, attention.head_dim))
        q, k, v = _Heads.apply(qkv, *_head_norms(attention), self.eps, self.hf.config.num_attention_heads, rows)
        mixed = rows.attend(q, k, v, float(attention.scaling), window).flatten(1)
        x = invariant_linear(mixed, attention.o_proj.weight, attention.o_proj.bias)
        x, residual = add_rms_norm(x, residual, layer.post_attention_layernorm.weight, self.eps)
        x = gated(_joined(x, mlp.gate_proj, mlp.up_proj))
        return invariant_linear(x, mlp.down_proj.weight, mlp.down_proj.bias), residual


@contextmanager
def fixed_sums(needed: bool) -> Iterator[None]:
    """Have torch's own sums on a GPU repeat bit for bit inside the block, where ``needed``."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if needed:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(needed or before[0], warn_only=needed or before[1])
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _joined(x: Tensor, *layers: nn.Linear) -> Tensor:
    """The product of several layers of one input, side by side."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return invariant_linear(x, [layer.weight for layer in layers], torch.cat(biases) if biases else None)


def _head_norms(attention: Any) -> tuple[Tensor | None, Tensor | None]:
    return (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)


class _Heads(torch.autograd.Function):
    """Queries, keys and values [N, heads, d] of a joined product, by the kernel that writes the engine's pages."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        heads: int,
        rows: PackRows,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, total, dim = qkv.shape
        kv_heads = (total - heads) // 2
        norms = None
        if q_norm is not None and k_norm is not None:
            norms = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
        out = qkv.clone()
        keys, values = qkv.new_empty(2, 1, count, kv_heads, dim).unbind()
        at = rows.cos, rows.sin, rows.positions, rows.places
        norm_rotate_store(out, norms, eps, *at, keys, values, heads)
        ctx.save_for_backward(qkv if norms is not None else None, q_norm, k_norm)
        ctx.eps, ctx.heads, ctx.rows = eps, heads, rows
        return out[:, :heads], keys[0], values[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, *norms = ctx.saved_tensors
        rows: PackRows = ctx.rows
        cos, sin = rows.cos[rows.positions], rows.sin[rows.positions]
        turned = rotate(grads[0], grads[1], cos, -sin)
        if qkv is None:
            return torch.cat((*turned, grads[2]), 1), None, None, None, None, None
        heads, stop = ctx.heads, qkv.shape[1] - grads[2].shape[1]
        parts = [part.contiguous().requires_grad_() for part in (qkv[:, :heads], qkv[:, heads:stop])]
        weights = [norm.detach().requires_grad_() for norm in norms]
        with torch.enable_grad():
            normed = [rms_norm(part, weight, ctx.eps) for part, weight in zip(parts, weights, strict=True)]
        d_q, d_k, d_q_norm, d_k_norm = torch.autograd.grad(normed, [*parts, *weights], turned)
        return torch.cat((d_q, d_k, grads[2]), 1), d_q_norm, d_k_norm, None, None, None
