"""A worker's state in a folder: safetensors by parameter name, and JSON; and the model folder at the end of a run.

parameters moments (moment1.NAME, moment2.NAME) router_biases reference reference_router_biases critic critic_moments,
each one file KIND.safetensors or, written by W ranks, files KIND-R-of-W.safetensors of whole tensors
trainer.json   generators.json or -R-of-W.json

No name stands in two files, so `torch.distributed.checkpoint` reads the folder with its HuggingFaceStorageReader.

save: gather each tensor on the rank that owns it -> host memory -> return; files are written behind (`offload`)
restore: this rank's rows of every tensor, whatever the number of ranks that wrote them
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime_core import durable
from slime_core.durable import storage_error
from slime_core.errors import DataError, StorageError, TrainerError
from slime_core.seeds import generators, set_generators
from slime_core.trainers.fsdp.model import Tensors
from slime_core.trainers.fsdp.shards import first, full, like, local
from slime_core.trainers.offload import FileLayout
from slime_core.weights.shards import Shards, TensorInfo, read_header

if TYPE_CHECKING:
    from slime_core.trainers.fsdp.model import FsdpLearner
    from slime_core.trainers.worker import Worker

FORMAT = 2
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
SHOWN = 4  # differences of each sort in a message


@dataclass(slots=True, frozen=True)
class StatePart:
    """A tensor of a rank's state: this rank's ``shard`` of it, cut like ``parameter``.

    Parts with the same ``owner`` are written by the same rank: a parameter with its moments.
    """

    kind: str  # of the file
    name: str  # in the file, behind the prefix of the kind
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


def owners(parts: Sequence[StatePart], world: int) -> dict[str, int]:
    """Which rank writes what, so that each has about as many bytes; the same answer on every rank."""
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.owner] = sizes.get(part.owner, 0) + part.nbytes
    loads, owner_of = [0] * world, {}
    for owner in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        owner_of[owner] = rank
        loads[rank] += sizes[owner]
    return owner_of


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
    owner = owners(parts, worker.world)
    layouts = _layouts(worker, [part for part in parts if owner[part.owner] == worker.rank])
    staging.plan(list(layouts.values()))
    starts = {kind: layout.starts() for kind, layout in layouts.items()}
    for part in parts:
        local_parts = owner[part.owner] == worker.rank
        tensor = worker.offload.readable(part.shard)
        if worker.world > 1:
            tensor = full(like(tensor.to(worker.device), part.parameter))
        if local_parts:
            staging.copy(
                starts[part.kind][PREFIXES.get(part.kind, "") + part.name], tensor, temporary=worker.world > 1
            )
    name = file_name(GENERATORS, worker.rank, worker.world, ".json")
    texts = {name: json.dumps(generators()).encode()}
    if worker.rank == 0:
        texts[STATE] = state_text(_state(worker))
    staging.write(path, texts)


def reserve(worker: Worker) -> None:
    """Make the host memory of a save before it is due."""
    parts = _parts(worker)
    frozen = worker.policy.frozen()
    moments = sum(p.nbytes for p in parts if p.kind in (PARAMETERS, CRITIC) and p.name not in frozen)
    fixed = sum(part.nbytes for part in parts if part.kind not in (MOMENTS, CRITIC_MOMENTS))
    worker.staging.reserve((fixed + 2 * moments) // worker.world)


def _parts(worker: Worker) -> list[StatePart]:
    """The state's tensors in an order that is the same on every rank."""
    parts = _of(worker.actor, PARAMETERS, MOMENTS)
    if worker.critic is not None:
        parts += _of(worker.critic.learner, CRITIC, CRITIC_MOMENTS)
    if worker.frozen.reference is not None:
        reference = worker.frozen.reference
        for name, parameter in worker.actor.parameters().items():
            parts.append(StatePart(REFERENCE, name, f"{REFERENCE}.{name}", reference[name], parameter))
    for kind, biases in _biases(worker).items():
        parts += [StatePart(kind, name, kind, bias, bias) for name, bias in biases.items()]
    return parts


def _biases(worker: Worker) -> dict[str, Tensors]:
    """Router biases of the policy and of the reference, by the kind of their file."""
    biases, reference = worker.actor.biases(), worker.frozen.reference
    if reference is None:
        return {BIASES: biases}
    return {BIASES: biases, REFERENCE_BIASES: {name: reference[name] for name in biases}}


def _of(learner: FsdpLearner, kind: str, moments: str) -> list[StatePart]:
    parameters, shards = learner.parameters(), learner.locals()
    parts = [StatePart(kind, name, f"{kind}.{name}", shards[name], parameters[name]) for name in parameters]
    if learner.optimizer.steps:  # what had no gradient yet, or is empty on this rank, has moments of 0
        learning = [name for name in parameters if name not in learner.module.frozen()]
        for which, state in (("moment1", learner.optimizer.moment1), ("moment2", learner.optimizer.moment2)):
            for name in learning:
                moment = state[name] if name in state else torch.zeros_like(shards[name])
                parts.append(StatePart(moments, f"{which}.{name}", f"{kind}.{name}", moment, parameters[name]))
    return parts


def _layouts(worker: Worker, parts: list[StatePart]) -> dict[str, FileLayout]:
    layouts: dict[str, FileLayout] = {}
    for part in parts:
        if part.kind not in layouts:
            layouts[part.kind] = FileLayout(file_name(part.kind, worker.rank, worker.world), {})
        layouts[part.kind].tensors[PREFIXES.get(part.kind, "") + part.name] = (part.parameter.shape, part.shard.dtype)
    return layouts


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
    state = read_state(path / STATE)
    worker.staging.wait()
    actor = _read(path, worker.actor, PARAMETERS, MOMENTS, int(state["optimizer_steps"]))
    critic: tuple[Tensors, Tensors, Tensors] | None = None
    if worker.critic is not None:
        if "critic_optimizer_steps" not in state:
            raise TrainerError("the checkpoint holds no critic", code="TRN108", where=str(path))
        steps = int(state["critic_optimizer_steps"])
        critic = _read(path, worker.critic.learner, CRITIC, CRITIC_MOMENTS, steps)
    reference: Tensors | None = None
    if state["reference"] and worker.frozen.reference is not None:
        reference = read_shards(path, REFERENCE, worker.actor.parameters())
    biases = _read_biases(worker, path)
    random = _generators(worker, path)
    worker.staging.before_change()
    worker.actor.put(*actor, steps=int(state["optimizer_steps"]))
    if worker.critic is not None and critic is not None:
        worker.critic.learner.put(*critic, steps=int(state["critic_optimizer_steps"]))
    if reference is not None:
        worker.frozen.reference |= reference
    for bias, stored in biases:
        bias.copy_(stored)
    worker.steps, worker.guard.in_a_row = int(state.get("steps", 0)), int(state.get("nonfinite_in_a_row", 0))
    set_generators(random)


def _read(path: Path, learner: FsdpLearner, kind: str, moments: str, steps: int) -> tuple[Tensors, Tensors, Tensors]:
    """Parameters and both moments, this rank's rows."""
    parameters = learner.parameters()
    stored = read_shards(path, kind, parameters)
    if not steps:
        return stored, {}, {}
    learning = [name for name in parameters if name not in learner.module.frozen()]
    both = {f"{which}.{name}": parameters[name] for which in ("moment1", "moment2") for name in learning}
    read = read_shards(path, moments, both)
    first, second = ({name: read[f"{which}.{name}"] for name in learning} for which in ("moment1", "moment2"))
    return stored, first, second


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


def tensors_of(path: Path, kind: str) -> dict[str, TensorInfo]:
    """Headers of all files of a kind, whoever wrote them, by name without the kind's prefix.

    Raises:
        StorageError: STO111 there is none, STO112 one is damaged.
    """
    form = re.compile(rf"{kind}(-[0-9]+-of-[0-9]+)?\.safetensors")
    try:
        files = sorted(file for file in path.iterdir() if form.fullmatch(file.name))
        if not files:
            raise StorageError(f"there is no {kind}.safetensors", code="STO111", where=str(path))
        infos: dict[str, TensorInfo] = {}
        for file in files:
            infos |= {name.removeprefix(PREFIXES.get(kind, "")): info for name, info in read_header(file).items()}
    except DataError as error:
        raise StorageError(error.what, code="STO112", where=error.where, why=error.why) from error
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, path, f"{kind}.safetensors cannot be read") from error
    return infos


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
    shards: Tensors = {}
    for name, parameter in parameters.items():
        local_shard = local(parameter.detach())
        try:
            shards[name] = _shard(infos[name], first(parameter), local_shard.shape).to(local_shard.device)
        except DataError as error:
            raise StorageError(error.what, code="STO112", where=error.where, why=error.why) from error
    return shards


def _shard(info: TensorInfo, starts: Sequence[int], shape: torch.Size) -> torch.Tensor:
    """The part of a stored tensor that begins at ``starts`` by axis; of other rows nothing is read."""
    if not shape:
        return Shards({info.name: info})[info.name]
    row = 4 * (torch.Size(info.shape).numel() // info.shape[0]) if info.shape[0] else 0
    begin = info.begin + starts[0] * row
    rows = replace(info, shape=(shape[0], *info.shape[1:]), begin=begin, end=begin + shape[0] * row)
    part = Shards({"rows": rows})["rows"]
    for axis, (start, size) in enumerate(zip(starts[1:], shape[1:]), 1):
        part = part.narrow(axis, start, size)
    return part.contiguous()


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
