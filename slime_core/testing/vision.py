"""Small folders of models that see pictures, made from a seed with nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from slime_core.testing.models import VOCAB, char_tokenizer

VisionFamily = Literal["qwen2_5_vl", "qwen3_vl", "smolvlm"]

_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SMOL_ROWS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_SMOL_TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *_SMOL_ROWS)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.1}
_QWEN_TOWER = _TOWER | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "spatial_merge_size": 2}
_SMOL_TOWER = _TOWER | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}


def _template(image: str, video: str) -> str:
    """A chat template whose messages hold text, or parts of text, images and videos."""
    return (
        "{%- for message in messages %}{{ message['role'] + ': ' }}"
        "{%- if message['content'] is string %}{{ message['content'] }}"
        "{%- else %}{%- for part in message['content'] %}"
        f"{{%- if part['type'] == 'image' %}}{{{{ '{image}' }}}}"
        f"{{%- elif part['type'] == 'video' %}}{{{{ '{video}' }}}}"
        "{%- elif part['type'] == 'text' %}{{ part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{ '\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"
    )


_QWEN_TEMPLATE = _template(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)


def tiny_vision_model(
    path: Path,
    family: VisionFamily = "qwen2_5_vl",
    seed: int = 0,
    *,
    vocab: str = VOCAB,
    tied: bool = False,
    context_len: int = 512,
    weights: bool = True,
) -> Path:
    """Write the folder of a vision-language model: config, char tokenizer, chat template, processor, safetensors.

    An image token stands for 28 by 28 pixels in ``qwen2_5_vl``, 32 by 32 in ``qwen3_vl``; ``smolvlm`` cuts a picture
    into tiles of 32 by 32 pixels, four tokens each, and adds the whole one where there are several tiles.

    Args:
        weights: whether to write safetensors, drawn from ``seed``

    Example:
        folder = ModelFolder.open(tiny_vision_model(tmp_path / "model", "qwen3_vl"))
    """
    from slime_core.weights.folder import ModelFolder

    path.mkdir(parents=True, exist_ok=True)
    smol = family == "smolvlm"
    tokenizer = char_tokenizer(vocab)
    tokenizer.add_special_tokens({"extra_special_tokens": list(_SMOL_TOKENS if smol else _QWEN_TOKENS)})
    tokenizer.chat_template = _template("<image>", "<video>") if smol else _QWEN_TEMPLATE
    tokenizer.save_pretrained(str(path))
    config = _smol_config(tokenizer, tied, context_len) if smol else _qwen_config(family, tokenizer, tied, context_len)
    config.save_pretrained(str(path))
    for name, values in (_smol_processor() if smol else _qwen_processor(family)).items():
        (path / name).write_text(json.dumps(values, indent=2) + "\n")
    if weights:
        model: Any = ModelFolder.open(path, init_weights="random").build_model(seed=seed)
        model.save_pretrained(str(path))
    return path


def _qwen_config(family: str, tokenizer: Any, tied: bool, context_len: int) -> Any:
    import transformers

    ids = tokenizer.convert_tokens_to_ids(list(_QWEN_TOKENS))
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    text: dict[str, Any] = _TEXT | {"vocab_size": len(tokenizer), "max_position_embeddings": context_len}
    tower: dict[str, Any]
    if family == "qwen3_vl":
        text |= {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_interleaved": True,
                "mrope_section": [4, 2, 2],
            },
        }
        tower = _QWEN_TOWER | {"patch_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        kind: Any = transformers.Qwen3VLConfig
    else:
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
        tower = _QWEN_TOWER | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        kind = transformers.Qwen2_5_VLConfig
    config = kind(text_config=text, vision_config=tower, tie_word_embeddings=tied, **dict(zip(names, ids)))
    config.architectures = [kind.__name__.removesuffix("Config") + "ForConditionalGeneration"]
    return config


def _qwen_processor(family: str) -> dict[str, dict[str, Any]]:
    patch, kind = (16, "Qwen3VL") if family == "qwen3_vl" else (14, "Qwen2_5_VL")
    tile, half = (2 * patch) ** 2, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    common: dict[str, Any] = {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": tile, "longest_edge": 16 * tile},
        "processor_class": f"{kind}Processor",
        **half,
    }
    video = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
    return {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **common},
        "video_preprocessor_config.json": {"video_processor_type": video, **common},
    }


def _smol_config(tokenizer: Any, tied: bool, context_len: int) -> Any:
    import transformers

    text = _TEXT | {"vocab_size": len(tokenizer), "max_position_embeddings": context_len, "model_type": "llama"}
    text |= {"tie_word_embeddings": tied}
    config: Any = transformers.SmolVLMConfig(
        text_config=text,
        vision_config=dict(_SMOL_TOWER),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=tied,
    )
    config.architectures = ["SmolVLMForConditionalGeneration"]
    return config


def _smol_processor() -> dict[str, dict[str, Any]]:
    tile = {"longest_edge": 32}
    return {
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "processor_class": "SmolVLMProcessor",
            "do_image_splitting": True,
            "do_pad": True,
            "size": {"longest_edge": 64},
            "max_image_size": tile,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    }
