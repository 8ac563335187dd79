"""A worker's state into a folder of `state_files` and back; and the model folder at the end of a run.

save: what this rank has of each tensor -> host memory -> return; files are written behind (`offload`)
restore: this rank's part of every tensor, whatever ranks wrote it
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core import durable
from slime_core.durable import storage_error
from slime_core.errors import StorageError, TrainerError
from slime_core.seeds import generators, set_generators
from slime_core.trainers import base_checksums
from slime_core.trainers.fsdp.model import Tensors
from slime_core.trainers.fsdp.shards import first, local, own_runs
from slime_core.trainers.fsdp.slices import slices_metadata
from slime_core.trainers.fsdp.state_files import (
    BIASES,
    CRITIC,
    CRITIC_MOMENTS,
    GENERATORS,
    PREFIXES,
    REFERENCE,
    REFERENCE_BIASES,
    SCALES,
    STATE,
    file_name,
    kinds_of,
    read_shards,
    read_state,
    state_text,
)
from slime_core.trainers.offload import FileLayout

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.model import FsdpLearner
    from slime_core.trainers.worker import Worker


@dataclass(slots=True, frozen=True)
class StatePart:
    """A tensor of a rank's state: this rank's ``shard`` of it, cut like ``parameter``.

    Of copies of a shard one is written, the same for all parts with the same ``owner``: a parameter with its moments.
    """

    kind: str  # of the file
    name: str  # behind the prefix of the kind
    owner: str
    shard: torch.Tensor
    parameter: torch.Tensor
    copy: tuple[int, int] = (0, 1)  # which, of how many that ranks have

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return self.parameter.numel() * self.shard.element_size()

    @property
    def full_name(self) -> str:
        """In the file."""
        return PREFIXES.get(self.kind, "") + self.name


def writers(parts: Sequence[StatePart]) -> dict[str, int]:
    """Which copy each owner's parts are written from, so that ranks with copies write about as many bytes each.

    The answer is the same on every rank.
    """
    sizes: dict[tuple[str, int], int] = {}
    for part in parts:
        key = part.owner, part.copy[1]
        sizes[key] = sizes.get(key, 0) + part.nbytes
    loads: dict[int, list[int]] = {count: [0] * count for _, count in sizes}
    copy_of: dict[str, int] = {}
    for (owner, count), size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load = loads[count]
        copy_of[owner] = load.index(min(load))
        load[copy_of[owner]] += size
    return copy_of


@torch.no_grad()
def save(worker: Worker, path: Path) -> None:
    """Copy what this rank has of the state and let it be written into ``path``, after a save that is under way.

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
    parts = _own_parts(worker)
    layouts = _layouts(worker, parts)
    staging.plan(list(layouts.values()))
    starts = {kind: layout.starts() for kind, layout in layouts.items()}
    for part in parts:
        staging.copy(starts[part.kind][part.full_name], worker.offload.readable(part.shard))
    name = file_name(GENERATORS, worker.rank, worker.world, ".json")
    texts = {name: json.dumps(generators()).encode()}
    if worker.rank == 0:
        texts[STATE] = state_text(_state(worker))
        if worker.base.sums:
            texts[base_checksums.FILE] = base_checksums.text(worker.base.sums)
    staging.write(path, texts)


def reserve(worker: Worker) -> None:
    """Make the host memory of a save before it is due."""
    parts, frozen = _own_parts(worker), worker.policy.frozen()
    kinds, moments = zip((CRITIC, CRITIC_MOMENTS), *map(kinds_of, worker.actors))
    learning = [p.shard for p in parts if p.kind in kinds and p.name not in frozen]
    fixed = sum(part.shard.nbytes for part in parts if part.kind not in moments)
    worker.staging.reserve(fixed + sum(map(worker.actor.optimizer.state_bytes, learning)))


def _own_parts(worker: Worker) -> list[StatePart]:
    """What this rank writes."""
    parts = _parts(worker)
    copy_of = writers(parts)
    parts = [part for part in parts if copy_of[part.owner] == part.copy[0]]
    return [part for part in parts if part.shard.numel() or not part.parameter.numel()]


def _parts(worker: Worker) -> list[StatePart]:
    """The state's tensors in an order that is the same on every rank."""
    parts = [part for name, actor in worker.actors.items() for part in _of(actor, *kinds_of(name))]
    if worker.critic is not None:
        parts += _of(worker.critic.learner, CRITIC, CRITIC_MOMENTS)
    if reference := _reference(worker):
        for name, parameter in worker.actor.parameters().items():
            owner, copy = f"{REFERENCE}.{name}", worker.policy.copy_of(name, parameter)
            parts.append(StatePart(REFERENCE, name, owner, reference[name], parameter, copy))
    copy = worker.rank, worker.world
    for kind, biases in _biases(worker).items():
        parts += [StatePart(kind, name, kind, bias, bias, copy) for name, bias in biases.items()]
    return parts


def _reference(worker: Worker) -> Tensors | None:
    """The reference's weights, where they are not the base of adapters or those of a folder in its place."""
    return worker.frozen.reference if worker.policy.adapters is None else None


def _biases(worker: Worker) -> dict[str, Tensors]:
    """Router biases of the policy and of the reference, by the kind of their file; a base's do not change."""
    if worker.policy.adapters is not None:
        return {}
    biases, reference = worker.actor.biases(), worker.frozen.reference
    if reference is None:
        return {BIASES: biases}
    return {BIASES: biases, REFERENCE_BIASES: {name: reference[name] for name in biases}}


def _of(learner: FsdpLearner, kind: str, moments: str) -> list[StatePart]:
    parameters, shards, parts = learner.parameters(), learner.locals(), []
    steps, frozen = learner.optimizer.steps, learner.module.frozen()
    for name, parameter in parameters.items():
        owner, copy, shard = f"{kind}.{name}", learner.module.copy_of(name, parameter), shards[name]
        parts.append(StatePart(kind, name, owner, shard, parameter, copy))
        if not steps or name in frozen:
            continue
        for which, state in learner.optimizer.states().items():
            if which in SCALES:
                parts += _scales(learner, moments, which, name, shard)
                continue
            empty = torch.zeros(shard.shape, dtype=learner.optimizer.moment_dtype(shard))  # what had no gradient yet
            parts.append(StatePart(moments, f"{which}.{name}", owner, state.get(name, empty), parameter, copy))
    return parts


def _scales(learner: FsdpLearner, kind: str, which: str, name: str, shard: torch.Tensor) -> list[StatePart]:
    """Scales of a moment of 8 bits: each rank's own, whose blocks are of its shard."""
    shape = learner.optimizer.scale_shape(shard)
    if not shape:
        return []
    scales = learner.optimizer.states()[which].get(name, torch.zeros(shape))
    full_name = f"{which}{_of_rank(learner)}.{name}"
    return [StatePart(kind, full_name, f"{kind}.{which}.{name}", scales, scales)]


def _of_rank(learner: FsdpLearner) -> str:
    return f"-{learner.rank + 1}-of-{learner.world}" if learner.world > 1 else ""


def _layouts(worker: Worker, parts: list[StatePart]) -> dict[str, FileLayout]:
    """This rank's files by kind; those of several ranks say where slices begin."""
    layouts: dict[str, FileLayout] = {}
    for kind in dict.fromkeys(part.kind for part in parts):
        of_kind = [part for part in parts if part.kind == kind]
        tensors = {part.full_name: (part.shard.shape, part.shard.dtype) for part in of_kind}
        layouts[kind] = FileLayout(file_name(kind, worker.rank, worker.world), tensors)
        if worker.world > 1:
            slices = {part.full_name: (first(part.parameter), part.parameter.shape) for part in of_kind}
            layouts[kind].metadata = slices_metadata(slices)
    return layouts


def _state(worker: Worker) -> dict[str, Any]:
    state: dict[str, Any] = {
        "world": worker.world,
        "dtype": str(worker.dtype).removeprefix("torch."),  # of compute; what is stored is float32
        "optimizer_steps": worker.actor.optimizer.steps,
        "steps": worker.steps,
        "nonfinite_in_a_row": worker.guard.in_a_row,
        "reference": _reference(worker) is not None,
    }
    if (adapters := worker.policy.adapters) is not None:
        state["adapters"] = {name: actor.optimizer.steps for name, actor in worker.actors.items()}
        state["base_weights"] = worker.train.base_weights
        state["lora"] = adapters.spec.to_peft(worker.config.rollout.hf_checkpoint)
    if worker.critic is not None:
        state["critic_optimizer_steps"] = worker.critic.learner.optimizer.steps
    return state


@torch.no_grad()
def restore(worker: Worker, path: Path) -> None:
    """Read what :func:`save` wrote; all of it is read before anything changes.

    Raises:
        StorageError: STO111, STO112 files missing or damaged, STO113 of another format.
        TrainerError: TRN108 of another model, without the critic that the stage has, or of full training where
            adapters learn, or the other way around; TRN116 another base of adapters.
    """
    state = read_state(path / STATE)
    worker.staging.wait()
    _check_kind(worker, state, path)
    steps = _steps(state)
    actors = {name: _read(path, one, *kinds_of(name), steps.get(name, 0)) for name, one in worker.actors.items()}
    critic: tuple[Tensors, dict[str, Tensors]] | None = None
    if worker.critic is not None:
        if "critic_optimizer_steps" not in state:
            raise TrainerError("the checkpoint holds no critic", code="TRN108", where=str(path))
        critic_steps = int(state["critic_optimizer_steps"])
        critic = _read(path, worker.critic.learner, CRITIC, CRITIC_MOMENTS, critic_steps)
    reference: Tensors | None = None
    if state["reference"] and _reference(worker) is not None:
        reference = read_shards(path, REFERENCE, worker.actor.parameters())
    biases = _read_biases(worker, path)
    random = _generators(worker, path)
    worker.staging.before_change()
    for name, one in actors.items():
        worker.actors[name].put(*one, steps=steps.get(name, 0))
    if worker.critic is not None and critic is not None:
        worker.critic.learner.put(*critic, steps=int(state["critic_optimizer_steps"]))
    if reference is not None and worker.frozen.reference is not None:
        worker.frozen.reference |= reference
    for bias, stored in biases:
        bias.copy_(stored)
    worker.steps, worker.guard.in_a_row = int(state.get("steps", 0)), int(state.get("nonfinite_in_a_row", 0))
    set_generators(random)


def _check_kind(worker: Worker, state: Mapping[str, Any], path: Path) -> None:
    """Refuse adapters where the whole model learns, the whole model where adapters do, and another base.

    Raises:
        TrainerError: TRN108, TRN116.
    """
    saved, learning = "adapters" in state, worker.policy.adapters is not None
    if saved != learning:
        kinds = {True: "adapters", False: "the whole model"}
        raise TrainerError(
            f"the checkpoint is of {kinds[saved]}, and the run trains {kinds[learning]}",
            code="TRN108",
            where=str(path),
            why="a base and its adapters are stored apart, and moments are of what learnt",
            fix=f"--lora-rank {state['lora']['r'] if saved else 0}, as the run had it",
        )
    if saved:  # runs of older versions in bfloat16 had the router biases of some families in it
        rounded = {name: bias.bfloat16() for name, bias in worker.actor.biases().items()}
        older = base_checksums.sums_of(own_runs(rounded, worker.world), worker.world) if rounded else {}
        base_checksums.compare_saved(path, state, worker, older)


def _steps(state: Mapping[str, Any]) -> dict[str, int]:
    """Optimizer steps by learner of the policy."""
    steps = state.get("adapters") or {"": state["optimizer_steps"]}
    return {name: int(count) for name, count in steps.items()}


def _read(path: Path, learner: FsdpLearner, kind: str, moments: str, steps: int) -> tuple[Tensors, dict[str, Tensors]]:
    """Parameters and the optimizer's states by kind, this rank's rows."""
    parameters = learner.parameters()
    stored = read_shards(path, kind, parameters)
    states: dict[str, Tensors] = {which: {} for which in learner.optimizer.states()}
    if not steps:
        return stored, states
    expected, places = dict[str, torch.Tensor](), dict[str, tuple[str, str]]()
    for name, shard in learner.locals().items():
        for which in states if name not in learner.module.frozen() else ():
            if which in SCALES:
                like, full_name = (
                    torch.empty(learner.optimizer.scale_shape(shard)),
                    f"{which}{_of_rank(learner)}.{name}",
                )
            else:
                like, full_name = parameters[name], f"{which}.{name}"
            if which not in SCALES or like.ndim:
                expected[full_name], places[full_name] = like, (which, name)
    dtypes = {
        full_name: learner.optimizer.moment_dtype(local(parameters[name]))
        for full_name, (which, name) in places.items()
        if which not in SCALES
    }
    for full_name, tensor in read_shards(path, moments, expected, dtypes).items():
        which, name = places[full_name]
        states[which][name] = tensor.to(local(parameters[name]).device)
    return stored, states


def _read_biases(worker: Worker, path: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Router biases, each with what is stored: nothing where none is, as in checkpoints of older versions."""
    pairs = []
    for kind, biases in _biases(worker).items():
        if biases and any(path.glob(f"{kind}*.safetensors")):
            stored = read_shards(path, kind, biases)
            pairs += [(bias, stored[name]) for name, bias in biases.items()]
    return pairs


def _generators(worker: Worker, path: Path) -> dict[str, Any]:
    """This rank's generators; none where another number of ranks wrote them."""
    file = path / file_name(GENERATORS, worker.rank, worker.world, ".json")
    if not file.is_file():
        return {}
    try:
        states: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise StorageError(f"{file.name} cannot be read", code="STO112", where=str(file), why=str(error)) from error
    return states


def write_folder(path: Path, hf: Any, tensors: Tensors, tokenizer: Any) -> None:
    """A Hugging Face folder: config, model.safetensors, tokenizer; tied tensors once. Prints nothing.

    Raises:
        StorageError: it cannot be written.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        path.mkdir(parents=True, exist_ok=True)
        hf.save_pretrained(str(path), state_dict=tensors)
        tokenizer.save_pretrained(str(path))
    except OSError as error:
        raise StorageError("the model folder cannot be written", where=str(path), why=str(error)) from error
    finally:
        if shown:
            logging.enable_progress_bar()
