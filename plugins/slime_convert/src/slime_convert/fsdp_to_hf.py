"""Write a model folder from a checkpoint of the FSDP trainer, by rows: no model with weights is built.

checkpoints/step-N/trainer/{parameters,router_biases}*.safetensors (float32, whole tensors, of any number of ranks)
    -> names and shapes compared with the model's -> experts' stacks cut -> shards, index, config, tokenizer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slime_convert.folder_writing import Done, How, to_hf
from slime_convert.rows import Moved, StoredRows, TensorRows, cast, moves_of
from slime_convert.source import ANOTHER, manifest_of, origin_of, step_of
from slime_core import durable
from slime_core.errors import ConfigError, StorageError
from slime_core.trainers.fsdp import checkpoint as files
from slime_core.weights import prediction_layers
from slime_core.weights.build import Fit, misfit, skeleton
from slime_core.weights.folder import read_config
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.shards import Shards, TensorInfo

NAME_ONE = "name a run directory or checkpoints/step-N of the fsdp trainer; Megatron's: slime convert dist-to-hf"


def fsdp_to_hf(checkpoint: Path, target: Path, origin: Path | None, how: How) -> Done:
    """Write a model folder of a checkpoint's parameters.

    Args:
        checkpoint: `step-N`, its `trainer`, a run directory or its `checkpoints` (the newest is taken)
        origin: the folder of config and tokenizer; None takes the one that the run names

    Raises:
        StorageError: STO111, STO112 files of the checkpoint are missing or damaged.
        DataError: TOK46 parameters that are not those of the origin's model. ConfigError: CFG05, no origin.
    """
    step = _step(checkpoint)
    trainer = step / "trainer" if (step / "trainer").is_dir() else step
    try:
        infos = files.tensors_of(trainer, files.PARAMETERS)
        if any(trainer.glob(f"{files.BIASES}*.safetensors")):
            infos |= files.tensors_of(trainer, files.BIASES)
    except StorageError as error:
        error.fix = NAME_ONE if error.code == "STO111" else ANOTHER
        raise
    _check_marks(step, {info.file for info in infos.values()}, manifest_of(step), full=how.verify)
    folder = origin if origin is not None else origin_of(step)
    config = read_config(folder)
    stored = {name: StoredRows(info) for name, info in infos.items()}
    model = skeleton(config)
    stored |= _check_fit(model, infos, folder, trainer)
    layout = FolderLayout(model)
    beside = [StoredRows(info) for info in prediction_layers.stored(folder, config).values()]
    tensors = [part for rows in stored.values() for part in _parts(layout, rows)]
    tensors = [cast(part, how.torch_dtype) for part in [*tensors, *beside]]
    used = {rows.info.file for rows in [*stored.values(), *beside]}
    return to_hf("fsdp-to-hf", tensors, target, folder, used, how)


def _step(path: Path) -> Path:
    """The folder of one checkpoint."""
    if not path.is_dir():
        raise ConfigError(f"there is no checkpoint {path}", code="CFG05", where=str(path.absolute()), fix=NAME_ONE)
    return step_of(path)


def _check_marks(step: Path, used: set[Path], manifest: Mapping[str, Any], *, full: bool) -> None:
    """Compare files with the manifest: sizes, and with ``full`` hashes."""
    for name, mark in manifest.get("files", {}).items():
        file = step / name
        if file not in used and not file.name.startswith((files.PARAMETERS, files.BIASES)):
            continue
        if not file.is_file():
            raise StorageError(f"{step.name} lacks {name}", code="STO111", where=str(step), fix=ANOTHER)
        size = file.stat().st_size
        if size != mark["size"] or (full and durable.sha256_of(file).sha256 != mark["sha256"]):
            reason = (
                f"it has {size} bytes and {mark['size']} were written" if size != mark["size"] else "its hash differs"
            )
            raise StorageError(
                f"{file.name} is not what was written", code="STO112", where=str(file), why=reason, fix=ANOTHER
            )


def _check_fit(model: Any, infos: Mapping[str, TensorInfo], folder: Path, trainer: Path) -> dict[str, StoredRows]:
    """Buffers that the model's folder stores and the checkpoint does not; names and shapes must be the model's."""
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in ties}
    parameters = {name for name, _ in model.named_parameters()} - set(ties)
    buffers = [name for name in expected if name not in parameters and name not in infos]
    fit = Fit(
        missing=sorted(name for name in expected if name in parameters and name not in infos),
        extra=sorted(name for name in infos if name not in expected),
        shapes=[(n, infos[n].shape, shape) for n, shape in expected.items() if n in infos and infos[n].shape != shape],
    )
    stored = Shards.open(folder).infos if buffers else {}
    fit.missing += [name for name in buffers if name not in stored]
    if not fit:
        raise misfit(fit, trainer, str(folder / "config.json"))
    return {name: StoredRows(stored[name]) for name in buffers}


def _parts(layout: FolderLayout, rows: StoredRows) -> list[TensorRows]:
    """What a parameter is in a model folder: one tensor, or the matrices of which it is a stack."""
    parts = layout.parts(rows.name, torch.Size(rows.shape))
    if parts[0].shape == rows.shape:
        return [StoredRows(replace(rows.info, name=parts[0].name))]
    stacked, inner, *rest = rows.shape
    flat = StoredRows(replace(rows.info, shape=(stacked * inner, *rest)))  # one below the other
    numbers = torch.arange(stacked * inner).reshape(stacked, inner, 1)
    return [Moved(part.name, (flat,), moves_of(part.cut(numbers))) for part in parts]
