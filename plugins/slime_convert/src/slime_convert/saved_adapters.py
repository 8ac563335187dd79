"""Adapters in a checkpoint of the FSDP trainer: merged into their base, or as an adapter folder in peft's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(slots=True, frozen=True)
class SavedAdapter:
    """One of the adapters in a checkpoint."""

    name: str
    config: dict[str, Any]  # adapter_config.json's
    tensors: Mapping[str, SavedTensor]
    base: BaseForm  # that it was trained on

    @classmethod
    def of(cls, trainer: Path, name: str = "") -> SavedAdapter:
        """Read what a checkpoint says of an adapter, the only one where none is named.

        Raises:
            ConfigError: CFG05 it has no such adapter, or several and none is named.
            StorageError: STO111, STO112 files are missing or damaged.
        """
        state = files.read_state(trainer / files.STATE)
        names = list(state.get("adapters", ()))
        if not names:
            raise ConfigError(
                "the checkpoint is of full training",
                code="CFG05",
                where=str(trainer),
                why="it has no adapters",
                fix="slime convert fsdp-to-hf CHECKPOINT DST",
            )
        if name not in names and (name or len(names) > 1):
            raise ConfigError(
                f"the checkpoint has no adapter {name!r}" if name else f"the checkpoint has {len(names)} adapters",
                code="CFG05",
                where=str(trainer),
                why=f"its adapters are {', '.join(names)}",
                fix="   or   ".join(f"--adapter {one}" for one in names[:SHOWN]),
            )
        chosen = name or names[0]
        of_run = manifest_of(step_of(trainer)).get("config", {}).get("train", {})  # older states do not say it
        base = BaseForm(state.get("base_weights") or of_run.get("base_weights", "auto"), state["dtype"])
        return cls(chosen, state["lora"], files.tensors_of(trainer, files.kinds_of(chosen)[0]), base)

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


def merged_checkpoint(trainer: Path, target: Path, base: Path, name: str, how: How, form: str = "") -> Done:
    """Write a model folder of an adapter's base with the adapter, in the dtype that the run computed in.

    Args:
        form: of the base that it is merged into, as `train.base_weights`; empty: that of the run

    Raises:
        TrainerError: TRN116 another base than the run's. Others as `SavedAdapter.of`.
    """
    saved = SavedAdapter.of(trainer, name)
    model, dtype = AdaptedModel.of(base, LoraSpec.from_peft(saved.config)), getattr(torch, saved.base.dtype)
    trained = TrainedBase(model, saved.base.form, dtype, how.workers)
    trained.check(base_checksums.read(trainer))
    if form and form != saved.base.form:
        trained = TrainedBase(model, form, dtype, how.workers)
    return merge("fsdp-to-hf", trained, saved.factors(model), saved.files, target, how)


def adapter_folder(trainer: Path, target: Path, base: Path, name: str, how: How) -> Done:
    """Write an adapter folder in peft's format; errors as `SavedAdapter.of`."""
    saved = SavedAdapter.of(trainer, name)
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
        "fsdp-to-adapter", target, [file], how, used=saved.files, config=base, tensors=len(tensors),
        finish=finish, pairs=pairs,
    )  # fmt: skip
