"""Qwen3-Next and Qwen3.5: linear attention (gated delta nets) in three layers of four, gated attention in the fourth.

Norms but that of the delta net have weights around 0; a quarter of each head is rotated. Where there are experts,
every token passes a shared one too, behind a gate of its own. Qwen3.5 is a model of pictures and text, of which the
text part is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime_convert.bridge import Bridge, BridgeRow, Given
from slime_models.fields import DECODER, ONLY, no_scaling, rope
from slime_models.routing import QWEN3_EXPERTS
from slime_models.rows import (
    ATTENTION,
    ENDS,
    EXPERTS,
    MLP,
    NORMS,
    OF,
    QK_NORMS,
    ROUTER,
    SHARED_EXPERTS,
    TO,
    in_language_model,
)

LINEAR = f"{TO}.self_attention.linear_attn"
HF_LINEAR = f"{OF}.linear_attn"


def linear_layers(config: Any) -> list[int]:
    """1 a layer of linear attention: by ``layer_types``, or all but every ``full_attention_interval``-th."""
    if kinds := getattr(config, "layer_types", None):
        return [int(kind == "linear_attention") for kind in kinds]
    interval = int(getattr(config, "full_attention_interval", None) or 4)
    return [int((layer + 1) % interval > 0) for layer in range(config.num_hidden_layers)]


def rotated_part(config: Any) -> float:
    """The part of each head that is rotated, a quarter where the config is silent."""
    return float(rope(config).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 0.25)))


def _linear(name: str, kind: Any, shape: str, sections: str = "") -> BridgeRow:
    """A tensor of the delta net, which has the same name on both sides."""
    return BridgeRow(f"{LINEAR}.{name}", (f"{HF_LINEAR}.{name}",), kind, on="linear", shape=shape, sections=sections)


DELTA_NET = (
    BridgeRow(
        f"{TO}.self_attention.input_layernorm.weight", (f"{OF}.input_layernorm.weight",), on="linear", shape="hidden"
    ),
    _linear("conv1d.weight", "sections", "linear_qkv one linear_conv", "linear_key linear_key linear_value"),
    _linear("dt_bias", "rows", "linear_heads"),
    _linear("A_log", "rows", "linear_heads"),
    _linear("norm.weight", "whole", "linear_head"),
    _linear("out_proj.weight", "columns", "hidden linear_value"),
)
"""What Qwen3-Next and Qwen3.5 share of it."""

FULL_ATTENTION = (
    replace(NORMS[0], on="full"),
    replace(ATTENTION[0], kind="gated_qkv", on="full", shape="q_gated hidden, kv hidden, kv hidden"),
    replace(ATTENTION[1], on="full"),
    *(replace(row, on="full") for row in QK_NORMS),
)

SHARED_EXPERT = (
    *(
        replace(row, hf=tuple(name.replace("shared_experts", "shared_expert") for name in row.hf))
        for row in SHARED_EXPERTS
    ),
    BridgeRow(
        f"{TO}.mlp.shared_experts.gate_weight", (f"{OF}.mlp.shared_expert_gate.weight",), on="moe", shape="one hidden"
    ),
)

HYBRID = {
    **DECODER,
    "layernorm_zero_centered_gamma": Given(True),
    "qk_layernorm": Given(True),
    "attention_output_gate": Given(True),
    "rotary_percent": rotated_part,
    "rope_scaling": no_scaling,
    "window_size": Given(None),
    "linear_attention_freq": linear_layers,
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
}
"""Fields of models with both kinds of attention."""

QWEN3_NEXT = Bridge(
    family="qwen3_next",
    rows=(
        *ENDS,
        NORMS[1],
        *DELTA_NET,
        _linear("in_proj_qkvz.weight", "rows", "linear_qkvz hidden"),
        _linear("in_proj_ba.weight", "rows", "linear_ba hidden"),
        *FULL_ATTENTION,
        *MLP,
        ROUTER,
        *EXPERTS,
        *SHARED_EXPERT,
    ),
    fields={
        **HYBRID,
        **QWEN3_EXPERTS,
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        "moe_shared_expert_gate": Given(True),
    },
    only={**ONLY, "attention_bias": (False,)},
)


def all_layers(config: Any) -> list[int]:
    """1 for every layer."""
    return [1] * int(config.num_hidden_layers)


APART = (
    _linear("in_proj_qkv.weight", "sections", "linear_qkv hidden", "linear_key linear_key linear_value"),
    _linear("in_proj_z.weight", "rows", "linear_value hidden"),
    _linear("in_proj_b.weight", "rows", "linear_heads hidden"),
    _linear("in_proj_a.weight", "rows", "linear_heads hidden"),
)

QWEN3_5_TEXT = Bridge(
    family="qwen3_5_text",
    rows=(*ENDS, NORMS[1], *DELTA_NET, *APART, *FULL_ATTENTION, *MLP),
    fields=HYBRID,
    linear_apart=True,
    only=QWEN3_NEXT.only,
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    family="qwen3_5_moe_text",
    rows=(*ENDS, NORMS[1], *DELTA_NET, *APART, *FULL_ATTENTION, ROUTER, *EXPERTS, *SHARED_EXPERT),
    fields={
        **QWEN3_NEXT.fields,
        "ffn_hidden_size": "moe_intermediate_size",
        "num_moe_experts": "num_experts",
        "moe_layer_freq": all_layers,
        "moe_router_pre_softmax": Given(False),  # weights are shares of the chosen experts
    },
)
QWEN3_5 = replace(QWEN3_5_TEXT, family="qwen3_5", rows=in_language_model(QWEN3_5_TEXT.rows))
QWEN3_5_MOE = replace(QWEN3_5_MOE_TEXT, family="qwen3_5_moe", rows=in_language_model(QWEN3_5_MOE_TEXT.rows))
