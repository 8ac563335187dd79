"""Every family here, by the ``model_type`` of its config.json."""

from __future__ import annotations

from slime_models.llama import LLAMA
from slime_models.qwen import QWEN2, QWEN3

BRIDGES = {bridge.family: bridge for bridge in (LLAMA, QWEN2, QWEN3)}
