"""Adapters in a checkpoint: merged into their base, or as an adapter folder in peft's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from slime_convert.adapter_to_hf import merge
from slime_convert.folder_writing import Done, How, check_apart, write_folder
from slime_convert.job import Job, PlannedFile
from slime_convert.rows import MemoryRows, StoredRows, TensorRows, blocks, cast, nbytes
from slime_convert.source import manifest_of, step_of
from slime_convert.trained_base import AdaptedModel, TrainedBase
from slime_core import durable
from slime_core.errors import ConfigError
from slime_core.lora.folder import CONFIG, PREFIX, SHOWN, WEIGHTS, BaseForm, Factors, to_peft
from slime_core.lora.layers import LoraExperts
from slime_core.lora.spec import LoraSpec
from slime_core.trainers import base_checksums
from slime_core.trainers.fsdp import state_files as files
from slime_core.trainers.fsdp.slices import SavedTensor
from slime_core.weights.shards import header, read_header


class SavedAdapter(Protocol):
    """One of the adapters in a checkpoint of any trainer."""

    @property
    def config(self) -> dict[str, Any]:
        """adapter_config.json's."""

    @property
    def base(self) -> BaseForm:
        """What it was trained on."""

    @property
    def files(self) -> set[Path]:
        """Where its tensors lie."""

    def factors(self, model: AdaptedModel) -> dict[str, Factors]:
        """By weight, in the order of the model."""


def record_of(path: Path, state: Mapping[str, Any], adapter: str, whole: str) -> tuple[str, dict[str, Any], BaseForm]:
    """What a checkpoint says of an adapter, the only one where none is named: its name, its config, its base.

    Args:
        path: of the trainer's files
        state: that the trainer stored beside them
        whole: the word of `slime convert` for a checkpoint of full training

    Raises:
        ConfigError: CFG05 it has no such adapter, or several and none is named. StorageError: STO112.
    """
    names = list(state.get("adapters", ()))
    if not names:
        raise ConfigError(
            "the checkpoint is of full training",
            code="CFG05",
            where=str(path),
            why="it has no adapters",
            fix=f"slime convert {whole} CHECKPOINT DST",
        )
    if adapter not in names and (adapter or len(names) > 1):
        raise ConfigError(
            f"the checkpoint has no adapter {adapter!r}" if adapter else f"the checkpoint has {len(names)} adapters",
            code="CFG05",
            where=str(path),
            why=f"its adapters are {', '.join(names)}",
            fix="   or   ".join(f"--adapter {one}" for one in names[:SHOWN]),
        )
    of_run = manifest_of(step_of(path)).get("config", {}).get("train", {})  # older states do not say it
    base = BaseForm(state.get("base_weights") or of_run.get("base_weights", "auto"), state["dtype"])
    return adapter or names[0], state["lora"], base


@dataclass(slots=True, frozen=True)
class FsdpAdapter:
    """A `SavedAdapter` of the FSDP trainer."""

    name: str
    config: dict[str, Any]
    base: BaseForm
    tensors: Mapping[str, SavedTensor]

    @classmethod
    def of(cls, trainer: Path, name: str = "") -> FsdpAdapter:
        """Raises as `record_of`, and StorageError: STO111, STO112 files are missing or damaged."""
        chosen, config, base = record_of(trainer, files.read_state(trainer / files.STATE), name, "fsdp-to-hf")
        return cls(chosen, config, base, files.tensors_of(trainer, files.kinds_of(chosen)[0]))

    @property
    def files(self) -> set[Path]:
        """Where its tensors lie."""
        return {file for tensor in self.tensors.values() for file in tensor.files}

    def factors(self, model: AdaptedModel) -> dict[str, Factors]:
        """By weight, in the order of the model."""
        factors = {}
        for weight, (module, key) in model.adapters.weights().items():
            inside = f"{key}." if isinstance(module, LoraExperts) else ""
            place = weight.removesuffix(f".{key}")
            names = [f"{place}.{kind}.{inside}{self.name}" for kind in ("lora_A", "lora_B", "lora_magnitude_vector")]
            a, b, *rest = (self._whole(name) for name in names if name in self.tensors)
            factors[weight] = Factors(a, b, *rest)
        return factors

    def _whole(self, name: str) -> torch.Tensor:
        saved = self.tensors[name]
        return saved.read((0,) * len(saved.shape), saved.shape)


def has_adapters(trainer: Path) -> bool:
    """Whether a checkpoint is of adapters."""
    return any(trainer.glob("adapter.*.safetensors"))


def merged_checkpoint(
    kind: str, saved: SavedAdapter, trainer: Path, target: Path, base: Path, how: How, form: str = ""
) -> Done:
    """Write a model folder of an adapter's base with the adapter, in the dtype that the run computed in.

    Args:
        kind: the word of `slime convert`
        trainer: where the checksums of the run's base lie
        form: of the base that it is merged into, as `train.base_weights`; empty: that of the run

    Raises:
        TrainerError: TRN116 another base than the run's.
    """
    model, dtype = AdaptedModel.of(base, LoraSpec.from_peft(saved.config)), getattr(torch, saved.base.dtype)
    trained = TrainedBase(model, saved.base.form, dtype, how.workers)
    trained.check(base_checksums.read(trainer))
    if form and form != saved.base.form:
        trained = TrainedBase(model, form, dtype, how.workers)
    return merge(kind, trained, saved.factors(model), saved.files, target, how)


def adapter_folder(kind: str, saved: SavedAdapter, target: Path, base: Path, how: How) -> Done:
    """Write an adapter folder in peft's format; ``kind`` is the word of `slime convert`."""
    check_apart(target, saved.files)
    factors = saved.factors(AdaptedModel.of(base, LoraSpec.from_peft(saved.config)))
    rows = [MemoryRows(PREFIX + name, one.contiguous()) for name, one in to_peft(factors).items()]
    tensors: list[TensorRows] = [cast(one, how.torch_dtype) for one in rows]
    head = header(((one.name, one.dtype, one.shape) for one in tensors), saved.base.metadata())

    def parts() -> Iterator[bytes | memoryview]:
        yield head
        for one in tensors:
            yield from blocks(one)

    def finish(job: Job) -> None:
        (job.aside / CONFIG).unlink(missing_ok=True)
        durable.write_file(job.aside / CONFIG, [(json.dumps(saved.config, indent=2) + "\n").encode()])

    def pairs(job: Job) -> list[tuple[TensorRows, TensorRows]]:
        infos = read_header(job.aside / WEIGHTS)
        return [(StoredRows(infos[one.name]), one) for one in tensors]

    file = PlannedFile(name=WEIGHTS, size=len(head) + sum(map(nbytes, tensors)), parts=parts)
    return write_folder(
        kind, target, [file], how, used=saved.files, config=base, tensors=len(tensors),
        finish=finish, pairs=pairs,
    )  # fmt: skip
