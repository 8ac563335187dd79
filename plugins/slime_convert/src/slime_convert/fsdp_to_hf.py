"""Write a model folder from a checkpoint of the FSDP trainer, by rows: no model with weights is built.

checkpoints/step-N/trainer/{parameters,router_biases}*.safetensors (float32, of any number of ranks)
    -> names and shapes compared with the model's -> experts' stacks cut -> shards, index, config, tokenizer
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime_convert.folder_writing import Done, How, to_hf
from slime_convert.rows import Moved, StoredRows, TensorRows, cast, moves_of
from slime_convert.saved_adapters import FsdpAdapter, adapter_folder, has_adapters, merged_checkpoint
from slime_convert.source import ANOTHER, manifest_of, origin_of, step_of
from slime_core import durable
from slime_core.errors import ConfigError, StorageError
from slime_core.trainers.fsdp import state_files as files
from slime_core.trainers.fsdp.slices import SavedTensor
from slime_core.weights import prediction_layers
from slime_core.weights.build import Fit, misfit, skeleton
from slime_core.weights.folder import read_config
from slime_core.weights.folder_layout import FolderLayout
from slime_core.weights.shards import TORCH_NAMES, Shards
from slime_core.weights.tensor_info import TensorInfo

NAME_ONE = "name a run directory or checkpoints/step-N of the fsdp trainer; Megatron's: slime convert dist-to-hf"


@dataclass(slots=True, frozen=True)
class SavedRows:
    """A tensor of a checkpoint, in slices of any number of files; a stack's matrices one below the other."""

    saved: SavedTensor
    name: str
    stacked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """As in `TensorRows`."""
        shape = self.saved.shape or (1,)
        return (shape[0] * shape[1], *shape[2:]) if self.stacked else shape

    @property
    def dtype(self) -> torch.dtype:
        """As in `TensorRows`."""
        dtype: torch.dtype = getattr(torch, TORCH_NAMES[self.saved.dtype])
        return dtype

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `TensorRows`; TOK47 where a file is damaged."""
        rows, done = torch.frombuffer(into, dtype=self.dtype).view(count, *self.shape[1:]), 0
        axes = len(self.saved.shape)
        if not self.stacked:
            starts = (first, *[0] * (axes - 1)) if axes else ()
            rows.copy_(self.saved.read(starts, rows.shape if axes else ()))
            return
        inner, rest = self.saved.shape[1], self.saved.shape[2:]
        while done < count:
            matrix, row = divmod(first + done, inner)
            now = min(inner - row, count - done)
            rows[done : done + now] = self.saved.read((matrix, row, *[0] * len(rest)), (1, now, *rest))[0]
            done += now


def fsdp_to_hf(
    checkpoint: Path, target: Path, origin: Path | None, how: How, adapter: str = "", form: str = ""
) -> Done:
    """Write a model folder of a checkpoint's parameters, or of the base of its adapters with one of them.

    Args:
        checkpoint: `step-N`, its `trainer`, a run directory or its `checkpoints` (the newest is taken)
        origin: the folder of config and tokenizer, and of adapters' base; None takes the one that the run names
        adapter: which of several
        form: of the base that an adapter is merged into, as `train.base_weights`; empty: that of the run

    Raises:
        StorageError: STO111, STO112 files of the checkpoint are missing or damaged.
        TrainerError: TRN116 another base than that of the run's adapters.
        DataError: TOK46 parameters that are not those of the origin's model. ConfigError: CFG05, no origin.
    """
    step, trainer = _places(checkpoint)
    if has_adapters(trainer) or adapter or form:
        _check_marks(step, set(trainer.glob("adapter.*")), manifest_of(step), full=how.verify)
        saved_adapter = FsdpAdapter.of(trainer, adapter)
        base = origin or origin_of(step)
        return merged_checkpoint("fsdp-to-hf", saved_adapter, trainer, target, base, how, form)
    try:
        saved = files.tensors_of(trainer, files.PARAMETERS)
        if any(trainer.glob(f"{files.BIASES}*.safetensors")):
            saved |= files.tensors_of(trainer, files.BIASES)
    except StorageError as error:
        error.fix = NAME_ONE if error.code == "STO111" else ANOTHER
        raise
    written = {file for tensor in saved.values() for file in tensor.files}
    _check_marks(step, written, manifest_of(step), full=how.verify)
    folder = origin if origin is not None else origin_of(step)
    config = read_config(folder)
    model = skeleton(config)
    buffers = _check_fit(model, saved, folder, trainer)
    layout = FolderLayout(model)
    beside = [StoredRows(info) for info in [*buffers, *prediction_layers.stored(folder, config).values()]]
    tensors = [part for tensor in saved.values() for part in _parts(layout, tensor)]
    tensors = [cast(part, how.torch_dtype) for part in [*tensors, *beside]]
    used = written | {rows.info.file for rows in beside}
    return to_hf("fsdp-to-hf", tensors, target, folder, used, how)


def fsdp_to_adapter(checkpoint: Path, target: Path, origin: Path | None, how: How, adapter: str = "") -> Done:
    """Write one of the adapters of a checkpoint as an adapter folder; arguments as of :func:`fsdp_to_hf`.

    Raises:
        ConfigError: CFG05 no such adapter, or full training. StorageError: as :func:`fsdp_to_hf`.
    """
    step, trainer = _places(checkpoint)
    _check_marks(step, set(trainer.glob("adapter.*")), manifest_of(step), full=how.verify)
    return adapter_folder("fsdp-to-adapter", FsdpAdapter.of(trainer, adapter), target, origin or origin_of(step), how)


def _places(path: Path) -> tuple[Path, Path]:
    """The folder of one checkpoint, and of the trainer's files in it."""
    if not path.is_dir():
        raise ConfigError(f"there is no checkpoint {path}", code="CFG05", where=str(path.absolute()), fix=NAME_ONE)
    step = step_of(path)
    trainer = step / "trainer" if (step / "trainer").is_dir() else step
    if not any(trainer.glob(f"{files.PARAMETERS}*.safetensors")) and not has_adapters(trainer):
        raise StorageError(
            f"{path} is not a checkpoint of the fsdp trainer",
            code="STO111",
            where=str(trainer.absolute()),
            why=f"it has no {files.PARAMETERS}.safetensors, and none of adapters",
            fix=NAME_ONE,
        )
    return step, trainer


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


def _check_fit(model: Any, saved: Mapping[str, SavedTensor], folder: Path, trainer: Path) -> list[TensorInfo]:
    """Buffers that the model's folder stores and the checkpoint does not; names and shapes must be the model's."""
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in ties}
    parameters = {name for name, _ in model.named_parameters()} - set(ties)
    buffers = [name for name in expected if name not in parameters and name not in saved]
    fit = Fit(
        missing=sorted(name for name in expected if name in parameters and name not in saved),
        extra=sorted(name for name in saved if name not in expected),
        shapes=[(n, saved[n].shape, shape) for n, shape in expected.items() if n in saved and saved[n].shape != shape],
    )
    stored = Shards.open(folder).infos if buffers else {}
    fit.missing += [name for name in buffers if name not in stored]
    if not fit:
        raise misfit(fit, trainer, str(folder / "config.json"))
    return [stored[name] for name in buffers]


def _parts(layout: FolderLayout, saved: SavedTensor) -> list[TensorRows]:
    """What a parameter is in a model folder: one tensor, or the matrices of which it is a stack."""
    parts = layout.parts(saved.name, torch.Size(saved.shape))
    if parts[0].shape == saved.shape:
        return [SavedRows(saved, parts[0].name)]
    stacked, inner, *_ = saved.shape
    flat = SavedRows(saved, saved.name, stacked=True)
    numbers = torch.arange(stacked * inner).reshape(stacked, inner, 1)
    return [Moved(part.name, (flat,), moves_of(part.cut(numbers))) for part in parts]
