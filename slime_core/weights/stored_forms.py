"""Which quantised model folders load, by their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import DataError
from slime_core.weights.fp8 import BlockFormat
from slime_core.weights.int4 import PackedFormat
from slime_core.weights.nf4 import Nf4Format

StoredForm = BlockFormat | PackedFormat | Nf4Format
"""How the quantised weights of a folder are stored."""


def storage_form(config: Mapping[str, Any]) -> StoredForm | None:
    """How the quantised weights of a config.json are stored; None where it has none, or others than load here."""
    return BlockFormat.of(config) or PackedFormat.of(config) or Nf4Format.of(config)


def refuse_quantised(folder: Path, raw: Mapping[str, Any]) -> None:
    """Refuse the content of a folder's config.json that states another form.

    Raises:
        DataError: TOK48.
    """
    config = raw.get("quantization_config")
    if not config or storage_form(raw):
        return
    method, reason = config, ""
    if isinstance(config, dict):
        method = config.get("quant_method", "unknown method")
        if config.get("load_in_8bit"):
            method, reason = "LLM.int8 of bitsandbytes", "it rounds activations too, which no float weights compute; "
        elif config.get("load_in_4bit"):
            method = f"{config.get('bnb_4bit_quant_type', 'fp4')} of bitsandbytes"
    raise DataError(
        f"{folder.name} is quantised ({method})",
        code="TOK48",
        where=f"{folder / 'config.json'}: quantization_config",
        why=f"{reason}loadable are float weights, fp8 with weight_block_size (DeepSeek V3, Qwen3-*-FP8), nf4 of "
        "bitsandbytes, and symmetric int4 of compressed-tensors in groups of adjacent columns (actorder null, static "
        "or weight)",
        fix="name the unquantised model",
    )
