"""Layers that predict tokens further ahead (DeepSeek V3, section 2.2), which a folder stores beside the model's own.

Only the Megatron trainer trains them, if it is told to. A folder that is written from another keeps those of its
layers that were not trained, and the layers for pictures of a model whose text part is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.durable import storage_error
from slime_core.weights.shards import INDEX, SINGLE, Shards
from slime_core.weights.tensor_info import TensorInfo

FIRST, FILE = "model-00001-of-00002.safetensors", "model-prediction-layers.safetensors"
BESIDE = {
    "qwen3_next": ("mtp.",),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), ("mtp.", "model.visual.")),
}
"""Of families whose config.json does not count them; those of pictures too, where the text model alone is trained."""


def layers(config: Any) -> int:
    """How many such layers a config states."""
    return int(getattr(config, "num_nextn_predict_layers", 0) or 0)


def prefixes(config: Any) -> tuple[str, ...]:
    """How names of such layers' tensors begin: ``model.layers.N.``, N from ``num_hidden_layers`` on, or as in MiMo.

    Others are in `BESIDE`.
    """
    if names := BESIDE.get(getattr(config, "model_type", "")):
        return names
    count = layers(config)
    if not count:  # a model of pictures and text has no layers of its own
        return ()
    first = config.num_hidden_layers
    return ("model.mtp_layers.", *(f"model.layers.{number}." for number in range(first, first + count)))


def stored(folder: Path, config: Any) -> dict[str, TensorInfo]:
    """The tensors of such layers in a model folder; most folders have none.

    Raises:
        DataError: TOK46 to TOK48, as :meth:`Shards.open`.
    """
    starts = prefixes(config)
    if not starts or not any(folder.glob("*.safetensors")):  # a folder may hold config and tokenizer alone
        return {}
    return {name: info for name, info in Shards.open(folder).infos.items() if name.startswith(starts)}


def carry(origin: Path, folder: Path, config: Any) -> None:
    """Put ``origin``'s layers into a model folder, but for tensors that it has, with an index of all files.

    A model of pictures and text has its whole config again, where the folder has that of its text part.

    Raises:
        StorageError: they cannot be written.
    """
    infos = stored(origin, config)
    if not infos:
        return
    trained = Shards.open(folder).infos
    infos = {name: info for name, info in infos.items() if name not in trained}
    if not infos:
        return
    try:
        _write(infos, folder)
        if getattr(config, "text_config", None) is not None:
            _write_config(origin, folder)
    except OSError as error:
        raise storage_error(error, folder, "the model folder cannot be written") from error


def _write(infos: Mapping[str, TensorInfo], folder: Path) -> None:
    from safetensors.torch import save_file

    shards = Shards(infos)
    files = {name: info.file.name for name, info in Shards.open(folder).infos.items()} | dict.fromkeys(infos, FILE)
    save_file({name: shards[name] for name in infos}, folder / FILE, metadata={"format": "pt"})
    if (folder / SINGLE).is_file():  # transformers reads a file of this name alone, whatever an index says
        (folder / SINGLE).replace(folder / FIRST)
        files = {name: FIRST if file == SINGLE else file for name, file in files.items()}
    total = sum(path.stat().st_size for path in {folder / name for name in files.values()})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_config(origin: Path, folder: Path) -> None:
    """The config of all layers, with the dtype of those that were written."""
    file = folder / "config.json"
    config, dtype = json.loads((origin / file.name).read_bytes()), json.loads(file.read_bytes()).get("dtype")
    if dtype:
        config["dtype"] = config["text_config"]["dtype"] = dtype
    file.write_text(json.dumps(config, indent=2) + "\n")
