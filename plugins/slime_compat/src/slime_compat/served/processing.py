"""`slime.utils.processing_utils`: tokenizers, processors and images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DEFAULT_PATCH_SIZE = 14
MODALITIES = ("images_kwargs", "videos_kwargs", "audio_kwargs")


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


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of a processor's call: its inputs, token ids as lists, and media as tensors."""
    kwargs = dict(multimodal_inputs or {})
    text = {"return_tensors": None, "return_mm_token_type_ids": False}
    forced = {"text_kwargs": text} | {name: {"return_tensors": "pt"} for name in MODALITIES}
    return kwargs | {name: {**kwargs.get(name, {}), **values} for name, values in forced.items()}


def process_vision_info(prompt: Any, processor: Any) -> dict[str, Any]:
    """``images`` and ``videos`` of messages, by qwen_vl_utils where it is installed; else images alone, by PIL."""
    try:
        from qwen_vl_utils import process_vision_info as by_qwen
    except ImportError:
        return {"images": _images(prompt) or None, "videos": None}
    size = getattr(processor.image_processor, "patch_size", DEFAULT_PATCH_SIZE)
    images, videos = by_qwen(prompt, image_patch_size=size)
    return {"images": images, "videos": videos}


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as a ``data:`` address of its PNG."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _images(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [_image(part["image"]) for part in parts if isinstance(part, Mapping) and part.get("image") is not None]


def _image(value: Any) -> Any:
    """A PIL image: itself, of a file, or of base64 with or without a ``data:`` head."""
    from PIL import Image

    if not isinstance(value, str):
        return value
    is_file = not value.startswith("data:") and len(value) < 4096 and Path(value).is_file()
    data = Path(value).read_bytes() if is_file else base64.b64decode(value.rpartition(",")[2])
    return Image.open(io.BytesIO(data))


__all__ = [
    "DEFAULT_PATCH_SIZE",
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "load_processor",
    "load_tokenizer",
    "process_vision_info",
]
