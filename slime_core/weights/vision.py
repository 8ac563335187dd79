"""Models that see pictures: which configs are such models'."""

from __future__ import annotations

from typing import Any


def sees(config: Any) -> bool:
    """Whether a config is that of a model of pictures and text, whose text model is not trained alone.

    Args:
        config: in transformers' form
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    kind = config.model_type
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
