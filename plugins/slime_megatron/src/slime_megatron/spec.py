"""A bridge's layers as megatron-core builds them: its modules, our core attention and, without Apex, our norms."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from slime_megatron.attention import CoreAttention
from slime_megatron.balance import BalancedRouter
from slime_megatron.experts import grouped_spec
from slime_megatron.latent import EPSILON, LatentAttention
from slime_megatron.linear_attention import LinearAttention
from slime_megatron.norms import Norm, SharedNorm, wide_add

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from slime_convert.bridge import Bridge

NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm")


class SandwichLayer(TransformerLayer):  # type: ignore[misc]
    """A layer that norms what attention and MLP give, before it is added to the residual (GLM-4)."""

    def __init__(self, config: TransformerConfig, submodules: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, **kwargs)
        self.post_self_attn_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attention.register_forward_hook(lambda *call: self._normed("post_self_attn_layernorm", call[-1]))
        self.mlp.register_forward_hook(lambda *call: self._normed("post_mlp_layernorm", call[-1]))

    def _normed(self, norm: str, out: tuple[Any, Any]) -> tuple[Any, Any]:
        hidden, bias = out
        return getattr(self, norm)(hidden if bias is None else hidden + bias), None


class WideNormAttention(SelfAttention):  # type: ignore[misc]
    """Attention that norms the queries of all heads together, and their keys (MiniMax-M2)."""

    def __init__(self, config: TransformerConfig, submodules: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        tp = self.pg_collection.tp
        self.q_norm = SharedNorm(config, config.num_attention_heads * config.kv_channels, tp)
        self.k_norm = SharedNorm(config, config.num_query_groups * config.kv_channels, tp)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """q [T, 1, heads, d], k and v [T, 1, groups, d] of this rank, before they are turned."""
        query, key, value = super().get_query_key_value_tensors(*args, **kwargs)
        return self.q_norm(query.flatten(2)).view_as(query), self.k_norm(key.flatten(2)).view_as(key), value


class ExpertRouter(BalancedRouter):
    """megatron-core 0.16's own gate calls Transformer Engine, also where that is not installed."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits [T, 1, experts] in ``moe_router_dtype``, or the input's dtype."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        bias = self.bias.to(dtype) if self.bias is not None else None
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias)


def block_spec(config: TransformerConfig, bridge: Bridge, chunk: int | None = None) -> Any:
    """The decoder's layers of this pipeline stage, or of a chunk of it, and the last norm."""
    shown = copy(config)
    engine = config.transformer_impl == "transformer_engine"
    grouped = config.moe_grouped_gemm and not engine
    if grouped:
        shown.moe_grouped_gemm = False  # megatron-core's own keeps all experts in one tensor, and is given up there
    block = get_gpt_decoder_block_spec(
        shown,
        use_transformer_engine=engine,
        normalization=config.normalization,
        vp_stage=chunk,
    )
    for layer in block.layer_specs:
        if bridge.sandwich:
            layer.module = SandwichLayer
        if config.fp32_residual_connection:
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = wide_add
        if bridge.wide_qk_norms:
            attention = layer.submodules.self_attention
            attention.module = WideNormAttention
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = IdentityOp
        latent = not engine or config.layernorm_epsilon != EPSILON
        _replace(layer, grouped=grouped, latent=latent, engine=engine)
    if not engine:
        block.layer_norm = Norm
    if config.linear_attention_freq:
        first = get_transformer_layer_offset(config, vp_stage=chunk)
        linear = config.linear_attention_freq[first : first + len(block.layer_specs)]
        specs = zip(block.layer_specs, linear, strict=True)
        block.layer_specs = [_linear(layer, bridge) if is_linear else layer for layer, is_linear in specs]
    return block


def _linear(layer: ModuleSpec, bridge: Bridge) -> ModuleSpec:
    """The layer with linear attention, whose norm is within."""
    attention = ModuleSpec(LinearAttention, params={"apart": bridge.linear_apart})
    return replace(layer, submodules=replace(layer.submodules, input_layernorm=IdentityOp, self_attention=attention))


def _replace(spec: Any, *, grouped: bool, latent: bool, engine: bool) -> None:
    """Our modules in a layer's tree of specs; ``latent``: our latent attention too.

    Args:
        engine: whether linear layers, norms and experts are Transformer Engine's
    """
    submodules = spec.submodules
    if spec.module is MLASelfAttention and latent:
        spec.module = LatentAttention
    if not engine:
        for name in NORMS:
            if getattr(submodules, name, IdentityOp) is not IdentityOp and hasattr(submodules, name):
                setattr(submodules, name, Norm)
        if grouped and hasattr(submodules, "experts"):
            submodules.experts = grouped_spec()
    if hasattr(submodules, "router"):
        submodules.router = BalancedRouter if engine else ExpertRouter
    if hasattr(submodules, "core_attention"):
        submodules.core_attention = CoreAttention
    for child in vars(submodules).values():
        if isinstance(child, ModuleSpec) and child.submodules is not None:
            _replace(child, grouped=grouped, latent=latent, engine=engine)
