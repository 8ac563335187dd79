"""`slime.utils.processing_utils`: tokenizers, processors and images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.data.chat import encode
from slime_core.media.placing import bare
from slime_core.media.processor import MediaProcessor
from slime_core.media.references import picture, shown

DEFAULT_PATCH_SIZE = 14
MODALITIES = ("images_kwargs", "videos_kwargs", "audio_kwargs")
OPTIONS = {"return_tensors": (None, "pt"), "return_mm_token_type_ids": (None, False)}
"""Of a call of :class:`PictureProcessor`, with what they may be."""


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """A tokenizer by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """A model's processor; None where it has none.

    Of the families that train here it is a :class:`PictureProcessor`; of others transformers' own.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        tokenizer = load_tokenizer(name_or_path, **kwargs)
        media = MediaProcessor.of(tokenizer)
        if media is not None:
            return PictureProcessor(tokenizer, media)
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError, ImportError):
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


class PictureProcessor:
    """What a processor of transformers does with a text and its pictures, with the pixels that train here."""

    def __init__(self, tokenizer: Any, media: MediaProcessor) -> None:
        self.tokenizer, self.media = tokenizer, media
        self.image_processor = media.image_processor

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any) -> dict[str, Any]:
        """``input_ids`` and ``attention_mask``, lists of one row, and tensors by argument of the model's forward.

        Raises:
            DataError: DAT38 other placeholders than pictures, DAT39 to DAT41 pictures that cannot be used.
            ValueError: not one text, or an option that would change the ids or pixels that train.
        """
        import torch

        options = _options(kwargs)
        if images is not None and not isinstance(images, (list, tuple)):
            images = [images]
        inputs = {kind: list(items) for kind, items in (("images", images), ("videos", videos)) if items}
        texts = [text] if isinstance(text, str) else text or []
        if len(texts) != 1:
            raise ValueError(f"one text at a time, not {len(texts)}: call processor(text=..., images=...) for each")
        ids = self.media.expand(encode(self.tokenizer, texts[0]), inputs)
        rows: dict[str, Any] = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
        if options.get("return_tensors") == "pt":
            rows = {name: torch.tensor(values) for name, values in rows.items()}
        return rows | {name: torch.from_numpy(array) for name, array in self.media.arrays(inputs).items()}

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        """The tokenizer's, of messages whose parts may be pictures."""
        return self.tokenizer.apply_chat_template(bare(conversation), tokenize=tokenize, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """The tokenizer's."""
        return self.tokenizer.decode(*args, **kwargs)

    def batch_decode(self, *args: Any, **kwargs: Any) -> Any:
        """The tokenizer's."""
        return self.tokenizer.batch_decode(*args, **kwargs)


def prepare_model_inputs(
    messages: Any,
    tokenizer: Any,
    processor: Any,
    metadata: Mapping[str, Any] | None = None,
    apply_chat_template: bool = True,
    apply_chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], dict[str, Any]]:
    """Ids of messages, and with them the processor's other outputs, the text, and the ids once more."""
    renderer = processor if hasattr(processor, "apply_chat_template") else tokenizer
    text = messages
    if apply_chat_template or not isinstance(messages, str):
        options = (apply_chat_template_kwargs or {}) if apply_chat_template else {}
        text = renderer.apply_chat_template(messages, tokenize=False, **options)
    if processor is None:
        ids, rest = list(tokenizer.encode(text, add_special_tokens=False)), None
    else:
        media = process_vision_info(messages, processor)
        if not media.get("images") and (metadata or {}).get("images"):
            media["images"] = (metadata or {})["images"]
        output = processor(text=text, **media)
        ids = [int(token) for token in output["input_ids"][0]]
        rest = {name: value for name, value in output.items() if name not in ("input_ids", "attention_mask")}
    return ids, {"multimodal_inputs": rest, "prompt_text": text, "processor_input_ids": ids}


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
    """A PIL image, or a reference of a sample, as a ``data:`` address of its PNG."""
    image = _image(image)
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _images(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [_image(part["image"]) for part in parts if isinstance(part, Mapping) and part.get("image") is not None]


def _image(value: Any) -> Any:
    """A PIL image: itself, or the upright one of a file or of base64 with or without a ``data:`` head."""
    if not isinstance(value, str):
        return value
    is_file = not value.startswith("data:") and len(value) < 4096 and Path(value).is_file()
    return picture(Path(value).read_bytes() if is_file else base64.b64decode(value.rpartition(",")[2]), shown(value))


def _options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the text: a call's own and those under ``text_kwargs``.

    Raises:
        ValueError: one that is not in :data:`OPTIONS`, there or under another kind's.
    """
    plain = {name: value for name, value in kwargs.items() if name not in (*MODALITIES, "text_kwargs")}
    tables = [plain, *(kwargs.get(name) or {} for name in (*MODALITIES, "text_kwargs"))]
    for name, value in [pair for table in tables for pair in table.items()]:
        if value not in OPTIONS.get(name, (None,)):
            raise ValueError(
                f"{name} = {value!r} cannot be an option here: leave it out "
                "(pictures are as the model folder's preprocessor_config.json says; texts are neither cut nor padded)"
            )
    return plain | tables[-1]


__all__ = [
    "DEFAULT_PATCH_SIZE",
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "load_processor",
    "load_tokenizer",
    "prepare_model_inputs",
    "process_vision_info",
]
