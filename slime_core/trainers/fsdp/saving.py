"""A worker's state to a folder and back: parameters, moments, reference, critic, counters, and the rank's generators.

save: gather each tensor on the rank that owns it -> host memory -> return; files are written behind (`staging`)
restore: this rank's rows of every tensor, whatever the number of ranks that wrote them
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core import durable
from slime_core.durable import storage_error
from slime_core.errors import StorageError, TrainerError
from slime_core.seeds import generators, set_generators
from slime_core.trainers.fsdp import files
from slime_core.trainers.fsdp.files import Part
from slime_core.trainers.fsdp.sharding import full, like
from slime_core.trainers.staging import Layout

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.learner import Learner
    from slime_core.trainers.worker import Worker

Tensors = dict[str, torch.Tensor]


@torch.no_grad()
def save(worker: Worker, path: Path) -> None:
    """Copy the state and let it be written into ``path``; a collective. A save that is under way is waited for.

    What the trainer gave away is read where it is: the device need not have room for it.

    Raises:
        StorageError: the folder cannot be made.
    """
    staging = worker.staging
    staging.wait()
    try:
        durable.disk.make_folder(path)
    except FileExistsError:
        pass  # another rank made it
    except OSError as error:
        raise storage_error(error, path, "the trainer's state cannot be written") from error
    parts = _parts(worker)
    owner = files.owners(parts, worker.world)
    layouts = _layouts(worker, [part for part in parts if owner[part.owner] == worker.rank])
    staging.plan(list(layouts.values()))
    starts = {kind: layout.starts() for kind, layout in layouts.items()}
    for part in parts:
        mine = owner[part.owner] == worker.rank
        whole = worker.parking.seen(part.shard)
        if worker.world > 1:
            whole = full(like(whole.to(worker.device), part.parameter))
        if mine:
            staging.copy(starts[part.kind][part.name], whole, temporary=worker.world > 1)
    name = files.file_name(files.GENERATORS, worker.rank, worker.world, ".json")
    texts = {name: json.dumps(generators()).encode()}
    if worker.rank == 0:
        texts[files.STATE] = files.state_text(_state(worker))
    staging.write(path, texts)


def reserve(worker: Worker) -> None:
    """Make the host memory of a save before it is due."""
    parts = _parts(worker)
    moments = sum(part.nbytes for part in parts if part.kind in (files.PARAMETERS, files.CRITIC))
    known = sum(part.nbytes for part in parts if part.kind not in (files.MOMENTS, files.CRITIC_MOMENTS))
    worker.staging.reserve((known + 2 * moments) // worker.world)


def _parts(worker: Worker) -> list[Part]:
    """The state's tensors in an order that is the same on every rank."""
    found = _of(worker.actor, files.PARAMETERS, files.MOMENTS)
    if worker.critic is not None:
        found += _of(worker.critic.learner, files.CRITIC, files.CRITIC_MOMENTS)
    if worker.frozen.reference is not None:
        known = worker.actor.parameters()
        kind = files.REFERENCE
        found += [Part(kind, n, f"{kind}.{n}", t, known[n]) for n, t in worker.frozen.reference.items()]
    return found


def _of(learner: Learner, kind: str, moments: str) -> list[Part]:
    known, shards = learner.parameters(), learner.locals()
    found = [Part(kind, name, f"{kind}.{name}", shards[name], known[name]) for name in known]
    if learner.optimizer.steps:  # what had no gradient yet, or is empty on this rank, has moments of 0
        for which, held in (("moment1", learner.optimizer.moment1), ("moment2", learner.optimizer.moment2)):
            for name in known:
                moment = held[name] if name in held else torch.zeros_like(shards[name])
                found.append(Part(moments, f"{which}.{name}", f"{kind}.{name}", moment, known[name]))
    return found


def _layouts(worker: Worker, parts: list[Part]) -> dict[str, Layout]:
    found: dict[str, Layout] = {}
    for part in parts:
        if part.kind not in found:
            found[part.kind] = Layout(files.file_name(part.kind, worker.rank, worker.world), {})
        found[part.kind].tensors[part.name] = (part.parameter.shape, part.shard.dtype)
    return found


def _state(worker: Worker) -> dict[str, Any]:
    state: dict[str, Any] = {
        "world": worker.world,
        "dtype": str(worker.dtype).removeprefix("torch."),  # of compute; what is stored is float32
        "optimizer_steps": worker.actor.optimizer.steps,
        "steps": worker.steps,
        "nonfinite_in_a_row": worker.guard.in_a_row,
        "reference": worker.frozen.reference is not None,
    }
    if worker.critic is not None:
        state["critic_optimizer_steps"] = worker.critic.learner.optimizer.steps
    return state


@torch.no_grad()
def restore(worker: Worker, path: Path) -> None:
    """Read what :func:`save` wrote; all of it is read before anything changes.

    Raises:
        StorageError: STO111, STO112 files missing or damaged, STO113 of another format.
        TrainerError: TRN108 of another model, or without the critic that the stage has.
    """
    state = files.read_state(path / files.STATE)
    worker.staging.wait()
    actor = _read(path, worker.actor, files.PARAMETERS, files.MOMENTS, int(state["optimizer_steps"]))
    critic: tuple[Tensors, Tensors, Tensors] | None = None
    if worker.critic is not None:
        if "critic_optimizer_steps" not in state:
            raise TrainerError("the checkpoint holds no critic", code="TRN108", where=str(path))
        steps = int(state["critic_optimizer_steps"])
        critic = _read(path, worker.critic.learner, files.CRITIC, files.CRITIC_MOMENTS, steps)
    reference: Tensors | None = None
    if state["reference"] and worker.frozen.reference is not None:
        reference = files.read_shards(path, files.REFERENCE, worker.actor.parameters())
    random = _generators(worker, path)
    worker.staging.before_change()
    worker.actor.put(*actor, steps=int(state["optimizer_steps"]))
    if worker.critic is not None and critic is not None:
        worker.critic.learner.put(*critic, steps=int(state["critic_optimizer_steps"]))
    if reference is not None:
        worker.frozen.reference = reference
    worker.steps, worker.guard.in_a_row = int(state.get("steps", 0)), int(state.get("nonfinite_in_a_row", 0))
    set_generators(random)


def _read(path: Path, learner: Learner, kind: str, moments: str, steps: int) -> tuple[Tensors, Tensors, Tensors]:
    """Parameters and both moments, this rank's rows."""
    known = learner.parameters()
    stored = files.read_shards(path, kind, known)
    if not steps:
        return stored, {}, {}
    both = {f"{which}.{name}": parameter for which in ("moment1", "moment2") for name, parameter in known.items()}
    read = files.read_shards(path, moments, both)
    first, second = ({name: read[f"{which}.{name}"] for name in known} for which in ("moment1", "moment2"))
    return stored, first, second


def _generators(worker: Worker, path: Path) -> dict[str, Any]:
    """This rank's generators; none where another number of ranks wrote them."""
    file = path / files.file_name(files.GENERATORS, worker.rank, worker.world, ".json")
    if not file.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{file.name} cannot be read", code="STO112", where=str(file), why=str(error)) from error
    return found
