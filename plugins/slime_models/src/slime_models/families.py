"""Every family here, by the ``model_type`` of its config.json."""

from __future__ import annotations

from slime_models.deepseek import DEEPSEEK_V3, GLM4_MOE_LITE
from slime_models.glm4 import GLM4, GLM4_MOE
from slime_models.llama import LLAMA, MISTRAL
from slime_models.qwen import QWEN2, QWEN3, QWEN3_MOE

BRIDGES = {
    bridge.family: bridge
    for bridge in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, GLM4, GLM4_MOE, GLM4_MOE_LITE, DEEPSEEK_V3)
}
