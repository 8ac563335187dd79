"""Every family here, by the ``model_type`` of its config.json."""

from __future__ import annotations

from dataclasses import replace

from slime_models.deepseek import DEEPSEEK_V3, GLM4_MOE_LITE
from slime_models.glm4 import GLM4, GLM4_MOE
from slime_models.llama import LLAMA, MISTRAL
from slime_models.minimax import MINIMAX_M2
from slime_models.qwen import QWEN2, QWEN3, QWEN3_MOE
from slime_models.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from slime_models.qwen_vision import QWEN2_5_VL, QWEN3_VL

KIMI_K2 = replace(DEEPSEEK_V3, family="kimi_k2")
"""Kimi K2, whose config.json has a name of its own for DeepSeek V3's layers."""

MIMO = replace(QWEN2, family="mimo")
"""MiMo-7B: Qwen2's layers."""

FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIMO),
    *(QWEN2_5_VL, QWEN3_VL),
    *(QWEN3_NEXT, QWEN3_5, QWEN3_5_TEXT, QWEN3_5_MOE, QWEN3_5_MOE_TEXT),
    *(GLM4, GLM4_MOE, GLM4_MOE_LITE, DEEPSEEK_V3, KIMI_K2, MINIMAX_M2),
)
BRIDGES = {bridge.family: bridge for bridge in FAMILIES}
