"""Write a model folder of a GGUF file: weights dequantised, config, tokenizer and chat template from its metadata.

    metadata by gguf | model and tokenizer by transformers' reader | special tokens as the file numbers them | shards

transformers builds the model in memory in the dtype that is written, and its reader decides which architectures there
are. It gives some tokenizers another end token than the file states, so the file's ids count.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from slime_convert.folder_writing import Done, How, to_hf
from slime_convert.rows import MemoryRows, TensorRows
from slime_core.errors import ConfigError, DataError
from slime_core.weights.folder_layout import FolderLayout

SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens as transformers calls them, and what a GGUF file calls their ids."""
UNSAID = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""Keys of a config that speak of the file that was read."""


def gguf_to_hf(source: Path, target: Path, dtype: torch.dtype, how: How) -> Done:
    """Write a model folder of a GGUF file's weights, dequantised into ``dtype``.

    Raises:
        ConfigError: CFG05 no such file, CFG04 the package gguf is absent, CFG12 the target is there, CFG200 an
            architecture that transformers does not read.
        DataError: TOK47 not a GGUF file, or a damaged one. TOK46 it lacks weights. TOK00 no usable tokenizer.
    """
    ids = special_ids(source)
    model = _model(source, dtype)
    with tempfile.TemporaryDirectory() as folder:
        _write_config(model, ids, Path(folder))
        _write_tokenizer(source, ids, Path(folder))
        return to_hf("gguf-to-hf", _tensors(model), target, Path(folder), {source}, how)


def special_ids(source: Path) -> dict[str, int]:
    """Ids of the special tokens that the file's metadata states, by transformers' names of them (``eos``)."""
    fields = _metadata(source)
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in SPECIAL.items()}
    return {name: int(fields[key].contents()) for name, key in keys.items() if key in fields}


def _metadata(source: Path) -> dict[str, Any]:
    if not source.is_file():
        raise ConfigError(f"there is no file {source}", code="CFG05", where=str(source.absolute()))
    if absent := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ConfigError(
            f"transformers reads GGUF files with {' and '.join(absent)}, which is not installed",
            code="CFG04",
            where="command line: slime convert gguf-to-hf",
            fix="pip install gguf accelerate",
        )
    from gguf import GGUFReader

    try:
        return dict(GGUFReader(source).fields)
    except Exception as error:  # whatever numpy and struct raise on bytes that mean nothing
        raise DataError(
            f"{source.name} is not a GGUF file, or a damaged one",
            code="TOK47",
            where=str(source),
            why=f"{type(error).__name__}: {error}",
            fix="fetch the file again",
        ) from error


def _model(source: Path, dtype: torch.dtype) -> Any:
    """The model in memory, by transformers."""
    import transformers

    chosen: dict[str, Any] = {"pretrained_model_name_or_path": source.absolute().parent, "gguf_file": source.name}
    chosen |= {"dtype": dtype, "output_loading_info": True}
    try:
        with redirect_stderr(StringIO()):  # its progress bars
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(**chosen)
    except Exception as error:  # of the reader, or of the class of the model
        raise ConfigError(
            f"transformers {transformers.__version__} does not read the model in {source.name}",
            code="CFG200",
            where=str(source),
            why=f"{type(error).__name__}: {error}",
            fix="name the model's Hugging Face folder instead, or upgrade transformers",
        ) from error
    model, report = loaded
    if lacking := sorted(report["missing_keys"]):
        raise DataError(
            f"{source.name} lacks {len(lacking)} weights of its model: {', '.join(lacking[:3])}",
            code="TOK46",
            where=str(source),
            fix="fetch the file again; of a model in several files, name one that was merged",
        )
    return model


def _tensors(model: Any) -> list[TensorRows]:
    """What a model folder stores: tied weights once, each expert's matrices apart."""
    ties = set(getattr(model, "all_tied_weights_keys", None) or ())
    tensors = ((name, tensor.detach()) for name, tensor in model.state_dict().items() if name not in ties)
    parts = FolderLayout(model).parts
    return [MemoryRows(part.name, part.cut(t)) for name, t in tensors for part in parts(name, t.shape)]


def _write_config(model: Any, ids: dict[str, int], folder: Path) -> None:
    tokens = {f"{name}_token_id": number for name, number in ids.items() if name != "unk"}
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in UNSAID}
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")} | tokens
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(source: Path, ids: dict[str, int], folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.absolute().parent, gguf_file=source.name)
    except Exception as error:  # of the reader, or of tokenizers, which raises bare Exception
        raise DataError(
            f"{source.name} has no tokenizer that transformers can read",
            code="TOK00",
            where=str(source),
            why=f"{type(error).__name__}: {error}",
            fix="name the model's Hugging Face folder instead",
        ) from error
    for name, number in ids.items():
        setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False  # transformers' default here, which its decoder then ignores, aloud
    tokenizer.save_pretrained(folder)
