"""GLM-4-9B (norms before and after attention and MLP, half of each head rotated in pairs) and GLM-4.5 with experts."""

from __future__ import annotations

from dataclasses import replace

from slime_convert.bridge import Bridge, BridgeRow, Given
from slime_models.fields import DECODER, ONLY, no_scaling, rotated_part
from slime_models.routing import DEEPSEEK_EXPERTS
from slime_models.rows import (
    AHEAD,
    ATTENTION,
    ENDS,
    EXPERT_BIAS,
    EXPERTS,
    MLP,
    NORMS,
    OF,
    QK_NORMS,
    QKV_BIAS,
    ROUTER,
    SHARED_EXPERTS,
    TO,
)

GLM4 = Bridge(
    family="glm4",
    rows=(
        *ENDS,
        *NORMS,
        BridgeRow(f"{TO}.post_self_attn_layernorm.weight", (f"{OF}.post_self_attn_layernorm.weight",), shape="hidden"),
        BridgeRow(f"{TO}.post_mlp_layernorm.weight", (f"{OF}.post_mlp_layernorm.weight",), shape="hidden"),
        *ATTENTION,
        replace(QKV_BIAS, when="attention_bias"),
        BridgeRow(
            f"{TO}.mlp.linear_fc1.weight", (f"{OF}.mlp.gate_up_proj.weight",), "gate_up", shape="ffn_twice hidden"
        ),
        BridgeRow(f"{TO}.mlp.linear_fc2.weight", (f"{OF}.mlp.down_proj.weight",), "columns", shape="hidden ffn"),
    ),
    fields={
        **DECODER,
        "add_qkv_bias": "attention_bias",
        "rotary_percent": rotated_part(0.5),
        "rotary_interleaved": Given(True),
        "rope_scaling": no_scaling,
    },
    sandwich=True,
    only=ONLY,
)

GLM4_MOE = Bridge(
    family="glm4_moe",
    ahead=AHEAD,
    rows=(
        *ENDS,
        *NORMS,
        *ATTENTION,
        replace(QKV_BIAS, when="attention_bias"),
        *(replace(row, when="use_qk_norm") for row in QK_NORMS),
        *MLP,
        ROUTER,
        EXPERT_BIAS,
        *EXPERTS,
        *SHARED_EXPERTS,
    ),
    fields={
        **DECODER,
        **DEEPSEEK_EXPERTS,
        "add_qkv_bias": "attention_bias",
        "qk_layernorm": "use_qk_norm",
        "rotary_percent": rotated_part(0.5),
        "rope_scaling": no_scaling,
    },
    defaults={"attention_bias": False, "use_qk_norm": False, "routed_scaling_factor": 1.0},
    only=ONLY,
)
"""GLM-4.5, 4.5-Air, 4.6 and 4.7: DeepSeek's experts behind grouped attention, half of each head rotated."""
