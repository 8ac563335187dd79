"""Files of a worker's state: what they are called, and what stands in them; `checkpoint` says of which parts.

parameters moments (moment1.NAME, moment2.NAME) router_biases reference reference_router_biases critic critic_moments,
each one file KIND.safetensors or, written by W ranks, files KIND-R-of-W.safetensors of slices (`slices`)
trainer.json   generators.json or -R-of-W.json
With adapters, of each NAME: adapter.NAME adapter.NAME.moments, and for all base.json, the checksums of their base.

No element of a tensor stands in two files: `torch.distributed.checkpoint` reads the folder with its
HuggingFaceStorageReader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slime_core.durable import storage_error
from slime_core.errors import DataError, StorageError, TrainerError
from slime_core.trainers.fsdp.model import Tensors
from slime_core.trainers.fsdp.shards import first, local
from slime_core.trainers.fsdp.slices import SavedTensor, saved_tensors

FORMAT = 3
READABLE = (2, FORMAT)  # 2: several ranks wrote whole tensors
PARAMETERS, MOMENTS, REFERENCE, CRITIC, CRITIC_MOMENTS = (
    "parameters",
    "moments",
    "reference",
    "critic",
    "critic_moments",
)
BIASES, REFERENCE_BIASES = "router_biases", "reference_router_biases"
PREFIXES = {REFERENCE: "reference.", REFERENCE_BIASES: "reference.", CRITIC: "critic.", CRITIC_MOMENTS: "critic."}
"""Of names in the files of a kind; files of older versions have none."""
STATE, GENERATORS = "trainer.json", "generators"
SCALES = "scale1", "scale2"
"""Of moments of 8 bits: whole tensors of a rank, moment1's scale1.NAME, of several ranks scale1-R-of-W.NAME."""
OF_SCALES = re.compile(r"scale[12](-[0-9]+-of-[0-9]+)?\.")
SHOWN = 4  # differences of each sort in a message


def file_name(kind: str, rank: int, world: int, suffix: str = ".safetensors") -> str:
    """What a rank calls its file of a kind."""
    return f"{kind}{suffix}" if world == 1 else f"{kind}-{rank + 1}-of-{world}{suffix}"


def kinds_of(adapter: str) -> tuple[str, str]:
    """Of the files with what a learner of the policy learns, and its moments: of an adapter by name, or of all."""
    return (f"adapter.{adapter}", f"adapter.{adapter}.moments") if adapter else (PARAMETERS, MOMENTS)


def tensors_of(path: Path, kind: str) -> dict[str, SavedTensor]:
    """All tensors of a kind, whichever ranks wrote them, by name without the kind's prefix.

    Raises:
        StorageError: STO111 there is none or not all of one, STO112 a file is damaged.
    """
    form = re.compile(rf"{re.escape(kind)}(-[0-9]+-of-[0-9]+)?\.safetensors")
    try:
        files = sorted(file for file in path.iterdir() if form.fullmatch(file.name))
        if not files:
            raise StorageError(f"there is no {kind}.safetensors", code="STO111", where=str(path))
        tensors = saved_tensors(files)
    except DataError as error:
        raise StorageError(error.what, code="STO112", where=error.where, why=error.why) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, path, f"{kind}.safetensors cannot be read") from error
    return {name.removeprefix(PREFIXES.get(kind, "")): tensor for name, tensor in tensors.items()}


def check_fit(
    path: Path,
    kind: str,
    saved: Mapping[str, SavedTensor],
    parameters: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Refuse a file that is of another model: every difference in one message.

    Raises:
        TrainerError: TRN108 names, shapes or dtypes that differ.
    """
    missing = [f"{name} is not in the checkpoint" for name in parameters if name not in saved]
    extra = [f"{name} is not in the model" for name in saved if not (name in parameters or OF_SCALES.match(name))]
    if any(map(OF_SCALES.match, missing)):
        raise _other_ranks(path)
    other: list[str] = []
    for name in sorted(saved.keys() & parameters.keys()):
        shape, want = list(saved[name].shape), list(parameters[name].shape)
        if shape != want:
            other.append(f"{name} is {shape} in the checkpoint and {want} in the model")
        dtype = "U8" if dtypes and dtypes.get(name) == torch.uint8 else "F32"
        if saved[name].dtype != dtype:
            other.append(f"{name} is {saved[name].dtype} in the checkpoint and {dtype} in the model")
    if missing or extra or other:
        shown = [line for lines in (missing, extra, other) for line in lines[:SHOWN]]
        count = len(missing) + len(extra) + len(other)
        raise TrainerError(
            f"{kind} of the checkpoint and the model differ in {count} places",
            code="TRN108",
            where=str(path),
            why="; ".join(shown) + (f"; and {count - len(shown)} more" if count > len(shown) else ""),
            fix="resume with the model folder that the run started from",
        )


def _other_ranks(path: Path) -> TrainerError:
    return TrainerError(
        "moments of 8 bits were saved by another optimizer or number of ranks",
        code="TRN108",
        where=str(path),
        why="their scales are of blocks of a rank's shard",
        fix="resume with the optimizer and the ranks that saved them",
    )


def read_shards(
    path: Path,
    kind: str,
    parameters: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Tensors:
    """This rank's part of every tensor of a kind, on its device; ``parameters`` says how each is cut.

    Args:
        dtypes: of those that are not float32

    Raises:
        StorageError: STO111, STO112 files missing or damaged.
        TrainerError: TRN108 other names, shapes or dtypes.
    """
    saved = tensors_of(path, kind)
    check_fit(path, kind, saved, parameters, dtypes)
    shards: Tensors = {}
    for name, parameter in parameters.items():
        shard = local(parameter.detach())
        try:
            shards[name] = saved[name].read(first(parameter), shard.shape).to(shard.device)
        except DataError as error:
            raise StorageError(error.what, code="STO112", where=error.where, why=error.why) from error
    return shards


def state_text(state: Mapping[str, Any]) -> bytes:
    """The content of trainer.json."""
    return (json.dumps({"format": FORMAT, **state}, indent=2) + "\n").encode()


def read_state(path: Path) -> dict[str, Any]:
    """Read trainer.json.

    Raises:
        StorageError: it is missing, damaged, or STO113 of another format.
    """
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{path.name} cannot be read", where=str(path), why=str(error)) from error
    if state.get("format") not in READABLE:
        readable = " or ".join(map(str, READABLE))
        raise StorageError(
            f"{path.name} has format {state.get('format')}, not {readable}", code="STO113", where=str(path)
        )
    return state
