"""Qwen2.5 (biases on q, k, v), Qwen3 (norms on q, k instead), and Qwen3 with experts."""

from __future__ import annotations

from dataclasses import replace

from slime_convert.bridge import Bridge, Given
from slime_models.fields import DECODER, ONLY, no_scaling
from slime_models.routing import QWEN3_EXPERTS
from slime_models.rows import AHEAD, ATTENTION, ENDS, EXPERTS, MLP, NORMS, QK_NORMS, QKV_BIAS, ROUTER

MTP = "model.mtp_layers.{ahead}"
ENORM, HNORM, PROJECTION, FINAL_NORM = AHEAD

QWEN2 = Bridge(
    family="qwen2",
    ahead=(  # MiMo's; its projection has the columns of hidden states first
        replace(ENORM, hf=(f"{MTP}.token_layernorm.weight",)),
        replace(HNORM, hf=(f"{MTP}.hidden_layernorm.weight",)),
        replace(PROJECTION, hf=(f"{MTP}.input_proj.weight",), kind="halves"),
        replace(FINAL_NORM, hf=(f"{MTP}.final_layernorm.weight",)),
    ),
    ahead_layer=MTP,
    rows=(*ENDS, *NORMS, *ATTENTION, QKV_BIAS, *MLP),
    fields={**DECODER, "add_qkv_bias": Given(True), "rope_scaling": no_scaling},
    only=ONLY,
)

QWEN3 = Bridge(
    family="qwen3",
    rows=(*ENDS, *NORMS, *ATTENTION, *QK_NORMS, *MLP),
    fields={**DECODER, "qk_layernorm": Given(True), "rope_scaling": no_scaling},
    only={**ONLY, "attention_bias": (False,)},
)

QWEN3_MOE = Bridge(
    family="qwen3_moe",
    rows=(*QWEN3.rows, ROUTER, *EXPERTS),
    fields={**QWEN3.fields, **QWEN3_EXPERTS},
    only=QWEN3.only,
)
