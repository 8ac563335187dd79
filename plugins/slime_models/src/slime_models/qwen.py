"""Qwen2.5 (biases on q, k, v) and Qwen3 (norms on q, k instead)."""

from __future__ import annotations

from slime_core.weights.bridge import Bridge, Given
from slime_models.fields import DECODER, ONLY, no_scaling
from slime_models.rows import ATTENTION, ENDS, MLP, NORMS, QK_NORMS, QKV_BIAS

QWEN2 = Bridge(
    family="qwen2",
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
