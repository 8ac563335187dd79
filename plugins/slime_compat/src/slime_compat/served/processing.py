"""`slime.utils.processing_utils`."""

from __future__ import annotations

from typing import Any


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """A tokenizer by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """A processor by transformers; None where the model has none."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


__all__ = ["load_processor", "load_tokenizer"]
