"""Qwen2.5-VL and Qwen3-VL: Qwen2.5 and Qwen3 with a vision tower and positions of three axes (M-RoPE)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slime_convert.bridge import Given
from slime_models.fields import Fields, rope
from slime_models.qwen import QWEN2, QWEN3
from slime_models.rows import in_language_model


def sections(config: Any) -> list[int]:
    """Frequencies of a head that turn by time, height and width."""
    return list(rope(config)["mrope_section"])


AXES: Fields = {"position_embedding_type": Given("mrope"), "mrope_section": sections}

QWEN2_5_VL = replace(
    QWEN2,
    family="qwen2_5_vl",
    fields={**QWEN2.fields, **AXES},
    ahead=(),
    tower="visual.",
    parameter_names={"visual.": "model.visual.", "model.": "model.language_model."},
)

QWEN3_VL = replace(
    QWEN3,
    family="qwen3_vl",
    rows=in_language_model(QWEN3.rows),
    fields={**QWEN3.fields, **AXES},
    tower="model.visual.",
    interleaved_axes=True,
)
