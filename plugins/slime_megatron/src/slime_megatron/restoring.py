"""What `saving` wrote, read by any number of ranks at any layout: all of it first, then all ranks change or none.

Each rank reads the boxes that its shards are made of, of whichever ranks wrote them. Filling of the vocabulary, which
depends on the layout, is 0 in weights and moments alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime_convert.bridge import Entry, whole_shape
from slime_core.durable import storage_error
from slime_core.errors import DataError, SlimeError, StorageError, TrainerError
from slime_core.seeds import set_generators
from slime_core.trainers import base_checksums
from slime_megatron.convert.dist import METADATA, DistFolder
from slime_megatron.convert.dist_keys import BESIDE, OPTIMIZER, DistPlace, places
from slime_megatron.dist_files import read_box
from slime_megatron.masters import MASTER, MOMENTS, masters, prepare
from slime_megatron.saving import (
    FORMAT,
    REFERENCE,
    STATE,
    Learned,
    counter,
    generators_name,
    learned,
    piece_of,
    stored_reference,
)

if TYPE_CHECKING:
    from slime_megatron.tensors import LocalTensor, Tensors
    from slime_megatron.worker import MegatronWorker

SHOWN = 4  # differences of each sort in a message
Values = dict[str, torch.Tensor]


@dataclass(slots=True)
class RestoredModel:
    """A model's state on the host: shards by name, and (master, moments) in the order of `masters`."""

    weights: Values
    states: list[tuple[torch.Tensor, Values]]
    steps: int


@torch.no_grad()
def restore(worker: MegatronWorker, path: Path) -> None:
    """Read what was saved; a collective. Nothing has changed on any rank where one of them raises.

    Raises:
        StorageError: STO111, STO112 files missing or damaged, STO113 of another format.
        TrainerError: TRN108 of another model, or without the critic that the stage has; TRN116 another base.
    """
    worker.staging.wait()
    for one in learned(worker):
        one.learner.settle()
    failed: SlimeError | None = None
    try:
        state, states, reference, random = _read(worker, path)
    except SlimeError as error:
        failed = error
    _agree(failed, path)
    worker.staging.before_change()
    for one, model_state in zip(learned(worker), states, strict=True):
        _put(one, model_state)
    if reference is not None:
        worker.frozen.reference = {
            n: t.to(worker.policy.tensors.by_name[n].tensor.device) for n, t in reference.items()
        }
    worker.steps, worker.guard.in_a_row = int(state["steps"]), int(state["nonfinite_in_a_row"])
    set_generators(random)


def _agree(failed: SlimeError | None, path: Path) -> None:
    """Raise on every rank where one has failed."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, str(failed) if failed else "")
    if failed is not None:
        raise failed
    for rank, text in enumerate(everyone):
        if text:
            raise StorageError(f"rank {rank} cannot read the checkpoint", code="STO112", where=str(path), why=text)


def _read(
    worker: MegatronWorker, path: Path
) -> tuple[dict[str, Any], list[RestoredModel], Values | None, dict[str, Any]]:
    state = read_state(path)
    _check_files(path, state)
    with _as_storage(path):
        folder = DistFolder.open(path, trusted=True)  # read by a list of classes; the run's manifest has its hash
    models = learned(worker)
    for one in models:
        if one.prefix and counter(one) not in state:
            raise TrainerError("the checkpoint holds no critic", code="TRN108", where=str(path))
    _check_fit(path, folder, models)
    if worker.base.sums:
        base_checksums.compare_saved(path, state, worker)
    with _as_storage(path):
        states = [_read_model(one, folder, int(state[counter(one)])) for one in models]
        reference: Values | None = None
        if state["reference"] and stored_reference(worker) is not None:
            tensors = worker.policy.tensors.of_model().by_name
            reference = {n: _shard(worker.policy.tensors, one, folder, REFERENCE) for n, one in tensors.items()}
    return state, states, reference, _generators(worker, path)


@contextmanager
def _as_storage(path: Path) -> Iterator[None]:
    try:
        yield
    except SlimeError as error:
        if not isinstance(error, DataError):
            raise
        raise StorageError(error.what, code="STO112", where=error.where, why=error.why, fix=error.fix) from error
    except OSError as error:
        raise storage_error(error, path, "the checkpoint cannot be read") from error


def read_state(path: Path) -> dict[str, Any]:
    """Read trainer.json.

    Raises:
        StorageError: STO111 it is missing, STO112 damaged, STO113 of another format.
    """
    file = path / STATE
    try:
        state: dict[str, Any] = json.loads(file.read_bytes())
        form = state.get("format")
    except FileNotFoundError:
        raise StorageError(
            f"there is no {STATE}",
            code="STO111",
            where=str(path),
            why="it holds the counters of the run that saved",
            fix="weights alone: slime convert dist-to-hf, then --hf-checkpoint",
        ) from None
    except (OSError, ValueError, AttributeError) as error:
        raise StorageError(f"{STATE} cannot be read", code="STO112", where=str(file), why=str(error)) from error
    if form != FORMAT:
        raise StorageError(
            f"{STATE} has format {form}, not {FORMAT}",
            code="STO113",
            where=str(file),
            why="another backend, or another slime, wrote it",
            fix="resume with what wrote it; or take its weights: slime convert fsdp-to-hf, then --hf-checkpoint",
        )
    return state


def _check_files(path: Path, state: Mapping[str, Any]) -> None:
    missing = [name for name in state.get("files", ()) if not (path / name).is_file()]
    if not missing:
        return
    reason = f"rank files hold the parts of tensors that {state.get('world')} ranks had, each once"
    if METADATA in missing:
        reason = f"{METADATA} alone says which bytes are which part of a tensor, at this or any other layout"
    raise StorageError(
        f"the checkpoint misses {len(missing)} of its files: {', '.join(missing[:SHOWN])}",
        code="STO111",
        where=str(path),
        why=reason,
        fix="take the checkpoint before it, or copy this one again with all files, those with a dot too",
    )


def _check_fit(path: Path, folder: DistFolder, models: list[Learned]) -> None:
    """Refuse another model: every difference in one message.

    Raises:
        TrainerError: TRN108.
    """
    missing, other, used = [], [], set[str]()
    for one in models:
        for entry in one.tensors.entries:
            of = _places(one.tensors, entry)
            used |= {one.prefix + place.key for place in of}
            key = one.prefix + of[0].key
            if key not in folder.tensors:
                missing.append(f"{key} is not in the checkpoint")
            elif entry.shapes and (text := _difference(one.tensors, entry, of[0], folder.tensors[key].shape)):
                other.append(f"{key} {text}")
    others = {key for key in folder.tensors if OPTIMIZER.match(key) or key.startswith(BESIDE)}
    extra = [f"{key} is not in the model" for key in folder.tensors if key not in used | others]
    kinds = [list(dict.fromkeys(kind)) for kind in (missing, extra, other)]
    if any(kinds):
        lines = [line for kind in kinds for line in _first(kind)]
        raise TrainerError("the checkpoint is of another model", code="TRN108", where=str(path), why="; ".join(lines))


def _first(lines: list[str]) -> list[str]:
    more = [f"{len(lines) - SHOWN} more like it"] if len(lines) > SHOWN else []
    return lines[:SHOWN] + more


def _difference(tensors: Tensors, entry: Entry, place: DistPlace, shape: tuple[int, ...]) -> str:
    whole = whole_shape(entry, tensors.sizes)
    want = (*place.of, *whole)
    lead = len(place.of)
    alike = shape[:lead] == place.of and shape[lead + 1 :] == whole[1:]
    if entry.kind == "vocabulary" and alike and shape[lead] >= tensors.sizes.vocab:
        return ""  # filled up for another layout
    return "" if shape == want else f"is {list(shape)} in the checkpoint and {list(want)} in the model"


def _places(tensors: Tensors, entry: Entry) -> list[DistPlace]:
    return places(entry, tensors.sizes, tensors.attention, tensors.layers_apart)


def _read_model(one: Learned, folder: DistFolder, steps: int) -> RestoredModel:
    weights = {name: _shard(one.tensors, shard, folder, one.prefix) for name, shard in one.tensors.by_name.items()}
    names = {id(shard.tensor): shard for shard in (*one.tensors.by_name.values(), *one.tensors.copies)}
    states = []
    for master in masters(one.learner.optimizer):
        shard = names[id(master.parameter)]
        place = _places(one.tensors, shard.entry)[0]
        key = f"{one.prefix}optimizer.state.%s.{place.key}"
        has_master = key % MASTER in folder.tensors
        values = _run(
            shard, folder, key % MASTER if has_master else one.prefix + place.key, place, master.begin, master.end
        )
        moments = {
            name: _run(shard, folder, key % name, place, master.begin, master.end)
            if steps
            else torch.zeros(master.end - master.begin)
            for name in MOMENTS
        }
        states.append((values.float(), moments))
    return RestoredModel(weights, states, steps)


def _shard(tensors: Tensors, shard: LocalTensor, folder: DistFolder, prefix: str) -> torch.Tensor:
    """A rank's shard of a weight; where it is float32, from its master if that was stored beside it."""
    place = _places(tensors, shard.entry)[0]
    key, shape = prefix + place.key, shard.tensor.shape
    master = f"{prefix}optimizer.state.{MASTER}.{place.key}"
    if shard.tensor.dtype == torch.float32 and master in folder.tensors:
        key = master
    return _run(shard, folder, key, place, 0, shape.numel()).view(shape).to(shard.tensor.dtype)


def _run(shard: LocalTensor, folder: DistFolder, key: str, place: DistPlace, begin: int, end: int) -> torch.Tensor:
    """Elements ``begin`` to ``end`` of a rank's shard, flat."""
    if key not in folder.tensors:
        raise DataError(f"{key} is not in {METADATA}", code="TOK201", where=str(folder.path))
    values = torch.zeros(end - begin, dtype=folder.tensors[key].dtype)
    for box in piece_of(shard).boxes(begin, end):
        read = read_box(folder, key, place.index, box.offsets, box.sizes)
        values[box.begin - begin : box.end - begin] = read.reshape(-1)
    return values


def _generators(worker: MegatronWorker, path: Path) -> dict[str, Any]:
    """This rank's generators; none where another number of ranks wrote them."""
    file = path / generators_name(worker.rank, worker.world)
    if not file.is_file():
        return {}
    try:
        generators: dict[str, Any] = json.loads(file.read_bytes())
    except ValueError as error:
        raise StorageError(f"{file.name} cannot be read", code="STO112", where=str(file), why=str(error)) from error
    except OSError as error:
        raise storage_error(error, file, f"{file.name} cannot be read") from error
    return generators


def _put(one: Learned, checkpoint: RestoredModel) -> None:
    for name, shard in one.tensors.by_name.items():
        shard.tensor.copy_(checkpoint.weights[name])
    one.model.spread_embedding()
    prepare(one.learner.optimizer, checkpoint.steps)
    for master, (values, moments) in zip(masters(one.learner.optimizer), checkpoint.states, strict=True):
        master.put(values, moments)
    one.learner.steps = checkpoint.steps
