"""Training state in a folder: safetensors by parameter name, and JSON. What is read does not depend on who wrote it.

parameters moments (moment1.NAME, moment2.NAME) reference critic critic_moments, each one file KIND.safetensors or,
written by W ranks, files KIND-R-of-W.safetensors of whole tensors   trainer.json   generators.json or -R-of-W.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slime_core.durable import storage_error
from slime_core.errors import DataError, StorageError, TrainerError
from slime_core.trainers.fsdp.sharding import first_row, local
from slime_core.weights.shards import Shards, TensorInfo, read_header

FORMAT = 2
PARAMETERS, MOMENTS, REFERENCE, CRITIC, CRITIC_MOMENTS = (
    "parameters",
    "moments",
    "reference",
    "critic",
    "critic_moments",
)
STATE, GENERATORS = "trainer.json", "generators"
SHOWN = 4  # differences of each sort in a message
Tensors = dict[str, torch.Tensor]


@dataclass(slots=True, frozen=True)
class Part:
    """A tensor of a rank's state: this rank's ``shard`` of it, cut like ``parameter``.

    Parts with the same ``owner`` are written by the same rank: a parameter with its moments.
    """

    kind: str  # of the file
    name: str  # in the file
    owner: str
    shard: torch.Tensor
    parameter: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.parameter.numel() * self.shard.element_size()


def file_name(kind: str, rank: int, world: int, suffix: str = ".safetensors") -> str:
    """What a rank calls its file of a kind."""
    return f"{kind}{suffix}" if world == 1 else f"{kind}-{rank + 1}-of-{world}{suffix}"


def owners(parts: Sequence[Part], world: int) -> dict[str, int]:
    """Which rank writes what, so that each has about as many bytes; the same answer on every rank."""
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.owner] = sizes.get(part.owner, 0) + part.nbytes
    loads, found = [0] * world, {}
    for owner in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        found[owner] = rank
        loads[rank] += sizes[owner]
    return found


def tensors_of(path: Path, kind: str) -> dict[str, TensorInfo]:
    """Headers of all files of a kind, whoever wrote them.

    Raises:
        StorageError: STO111 there is none, STO112 one is damaged.
    """
    form = re.compile(rf"{kind}(-[0-9]+-of-[0-9]+)?\.safetensors")
    try:
        files = sorted(file for file in path.iterdir() if form.fullmatch(file.name))
        if not files:
            raise StorageError(f"there is no {kind}.safetensors", code="STO111", where=str(path))
        found: dict[str, TensorInfo] = {}
        for file in files:
            found |= read_header(file)
    except DataError as error:
        raise StorageError(error.what, code="STO112", where=error.where, why=error.why) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, path, f"{kind}.safetensors cannot be read") from error
    return found


def check_fit(path: Path, kind: str, infos: Mapping[str, TensorInfo], parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse a file that is of another model: every difference in one message.

    Raises:
        TrainerError: TRN108 names, shapes or dtypes that differ.
    """
    missing = [f"{name} is not in the checkpoint" for name in parameters if name not in infos]
    extra = [f"{name} is not in the model" for name in infos if name not in parameters]
    other: list[str] = []
    for name in sorted(infos.keys() & parameters.keys()):
        shape, want = list(infos[name].shape), list(parameters[name].shape)
        if shape != want:
            other.append(f"{name} is {shape} in the checkpoint and {want} in the model")
        if infos[name].dtype != "F32":
            other.append(f"{name} is {infos[name].dtype} in the checkpoint and F32 in the model")
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


def read_shards(path: Path, kind: str, parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """This rank's part of every tensor of a kind, on its device; ``parameters`` says how each is cut.

    Raises:
        StorageError: STO111, STO112 files missing or damaged.
        TrainerError: TRN108 other names, shapes or dtypes.
    """
    infos = tensors_of(path, kind)
    check_fit(path, kind, infos, parameters)
    found: Tensors = {}
    for name, parameter in parameters.items():
        mine = local(parameter.detach())
        try:
            found[name] = Shards({name: _rows(infos[name], first_row(parameter), mine.shape)})[name].to(mine.device)
        except DataError as error:
            raise StorageError(error.what, code="STO112", where=error.where, why=error.why) from error
    return found


def _rows(info: TensorInfo, first: int, shape: torch.Size) -> TensorInfo:
    """The bytes of some rows of a stored tensor; ``shape`` is theirs."""
    row = 4 * (shape.numel() // shape[0]) if shape and shape[0] else 0
    begin = info.begin + first * row
    return replace(info, shape=tuple(shape), begin=begin, end=begin + 4 * shape.numel())


def write_folder(path: Path, hf: Any, whole: Tensors, tokenizer: Any) -> None:
    """A Hugging Face folder: config, model.safetensors, tokenizer; tied tensors once. Prints nothing.

    Raises:
        StorageError: it cannot be written.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        path.mkdir(parents=True, exist_ok=True)
        hf.save_pretrained(str(path), state_dict=whole)
        tokenizer.save_pretrained(str(path))
    except OSError as error:
        raise StorageError("the model folder cannot be written", where=str(path), why=str(error)) from error
    finally:
        if shown:
            logging.enable_progress_bar()


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
    if state.get("format") != FORMAT:
        raise StorageError(
            f"{path.name} has format {state.get('format')}, not {FORMAT}", code="STO113", where=str(path)
        )
    return state
