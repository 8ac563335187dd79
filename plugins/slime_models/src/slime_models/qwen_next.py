"""Qwen3-Next: three layers of four have linear attention (a gated delta net), the fourth gated full attention.

Norms but that of the delta net have weights around 0; a quarter of each head is rotated; every token passes a shared
expert behind a gate of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime_convert.bridge import Bridge, BridgeRow, Given
from slime_models.fields import DECODER, ONLY, no_scaling, rope
from slime_models.routing import QWEN3_EXPERTS
from slime_models.rows import ATTENTION, ENDS, EXPERTS, MLP, NORMS, OF, QK_NORMS, ROUTER, SHARED_EXPERTS, TO

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
