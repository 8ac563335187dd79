"""A worker's state to a folder and back, at any layout: weights, masters, moments, reference, counters, generators.

    __R_0.distcp    rank R's boxes of whole tensors         .metadata common.pt metadata.json  what makes it torch_dist
    base.json       checksums of the base, where an adapter learns
    trainer.json    counters, the layout, names of files    generators-R-of-W.json

Weights have the keys that Megatron-LM gives them, so its users and `slime convert dist-to-hf` read the folder; states
of the optimizer are `optimizer.state.{fp32_param,exp_avg,exp_avg_sq}.KEY` in the coordinates of whole tensors. Nothing
is gathered: each rank writes the rows that it alone has, and its share of those that others have too.

megatron-core's own `dist_checkpointing.save` is not called. It writes through processes that it forks, or waits until
all is on the disk; it syncs no folder, tells no hash of what was meant, and what it makes of a distributed optimizer
(fully_reshardable) gathers whole tensors on a rank first. Of the format itself only boxes and names are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime_core import durable
from slime_core.durable import storage_error
from slime_core.seeds import generators
from slime_core.trainers import base_checksums
from slime_megatron import dist_files
from slime_megatron.convert.dist import METADATA
from slime_megatron.convert.dist_keys import BESIDE, extra_states, places
from slime_megatron.dist_files import Archives, WrittenChunk
from slime_megatron.masters import MASTER, MOMENTS, masters
from slime_megatron.places import ShardPiece, share

if TYPE_CHECKING:
    from slime_megatron.learner import MegatronLearner
    from slime_megatron.model import Model
    from slime_megatron.tensors import LocalTensor, Tensors
    from slime_megatron.worker import MegatronWorker

FORMAT = "torch_dist-1"
STATE, GENERATORS = "trainer.json", "generators"
REFERENCE, CRITIC = BESIDE


@dataclass(slots=True, frozen=True)
class Learned:
    """A model, or an adapter of it, with its optimizer; ``prefix`` stands before its keys and its counters."""

    prefix: str
    model: Model
    learner: MegatronLearner

    @property
    def tensors(self) -> Tensors:
        """What of the model learns."""
        return self.model.tensors if self.learner.adapter is None else self.learner.adapter.tensors


@dataclass(slots=True, frozen=True)
class Item:
    """A run of a rank's shard that it writes: elements ``begin`` to ``end``, of which ``read`` gives all."""

    keys: tuple[str, ...]
    index: tuple[int, ...]
    of: tuple[int, ...]
    piece: ShardPiece
    begin: int
    end: int
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    first: int = 0  # the element of the shard that ``read`` begins with
    temporary: bool = False


@dataclass(slots=True)
class SavePlan:
    """A rank's file, and where each part of it comes from."""

    file: Archives
    copies: list[tuple[Item, int, int, str]] = field(default_factory=list)  # begin, end, name in the file

    def add(self, item: Item) -> None:
        """Put an item's boxes behind those that are there."""
        for box in item.piece.boxes(item.begin, item.end):
            name = self.file.add(
                item.keys,
                (*item.of, *item.piece.whole),
                (*item.index, *box.offsets),
                (*(1 for _ in item.of), *box.sizes),
                item.dtype,
            )
            self.copies.append((item, box.begin, box.end, name))


def learned(worker: MegatronWorker) -> list[Learned]:
    """Every model that learns, and every adapter."""
    learners = [Learned("", worker.policy, actor) for actor in worker.actors.values()]
    if worker.critic is not None:
        learners.append(Learned(CRITIC, worker.critic.model, worker.critic.learner))
    return learners


def piece_of(shard: LocalTensor) -> ShardPiece:
    """A rank's shard of a tensor."""
    return ShardPiece(shard.entry, tuple(shard.tensor.shape), shard.group.rank(), shard.group.size())


@torch.no_grad()
def save(worker: MegatronWorker, path: Path) -> None:
    """Copy the state and let it be written into ``path``; a collective. A save that is under way is waited for.

    What the trainer gave away is read where it is: the device need not have room for it. States that are kept in
    another form are the exception; they come back for as long as it takes to copy them.

    Raises:
        StorageError: the folder cannot be made.
    """
    staging, away = worker.staging, worker.offload.on_host
    staging.wait()
    for one in learned(worker) if "parameters" not in away else ():
        one.learner.settle()
    try:
        durable.disk.make_folder(path)
    except FileExistsError:
        pass  # another rank made it
    except OSError as error:
        raise storage_error(error, path, "the trainer's state cannot be written") from error
    first = dist_files.empty_state() if worker.rank == 0 else b""
    plan = SavePlan(Archives(f"__{worker.rank}_0.distcp", {}, first=first))
    items = list(_items(worker))
    for item in items:
        plan.add(item)
    staging.plan([plan.file])
    starts = plan.file.starts()
    latest: tuple[int, torch.Tensor] = -1, torch.empty(0)
    with worker.offload.loaded(away if any(item.temporary for item in items) else ()):
        for item, begin, end, name in plan.copies:
            if latest[0] != id(item):
                latest = id(item), worker.offload.readable(item.read().detach()).reshape(-1)
            staging.copy(starts[name], latest[1][begin - item.first : end - item.first], temporary=item.temporary)
    staging.write(path, _texts(worker, plan.file))


def reserve(worker: MegatronWorker) -> None:
    """Make the host memory of a save before it is due."""
    size = 0
    for item in _items(worker, moments=True):
        size += (item.end - item.begin) * item.dtype.itemsize
    worker.staging.reserve(size)


def _items(worker: MegatronWorker, *, moments: bool = False) -> Iterator[Item]:
    """All that this rank writes; with ``moments`` those too that will be there after a step."""
    for one in learned(worker):
        tensors = {name: shard.tensor for name, shard in one.tensors.by_name.items()}
        yield from _weights(one.tensors, tensors, one.prefix)
        yield from _states(one, moments)
    if (reference := stored_reference(worker)) is not None:
        yield from _weights(worker.policy.tensors.of_model(), reference, REFERENCE)


def stored_reference(worker: MegatronWorker) -> dict[str, torch.Tensor] | None:
    """The reference's weights, where they are not the base of an adapter or those of a folder in its place."""
    return worker.frozen.reference if worker.policy.adapter is None else None


def _weights(tensors: Tensors, values: dict[str, torch.Tensor], prefix: str) -> Iterator[Item]:
    for name, shard in tensors.by_name.items():
        piece, tensor = piece_of(shard), values[name]
        begin, end = share(0, tensor.numel(), piece.width, *shard.replicas)
        destinations = places(shard.entry, tensors.sizes, tensors.attention, tensors.layers_apart)
        keys = tuple(prefix + place.key for place in destinations)
        yield Item(
            keys, destinations[0].index, destinations[0].of, piece, begin, end, tensor.dtype, partial(_same, tensor)
        )


def _states(one: Learned, planned: bool) -> Iterator[Item]:
    """Masters, where the parameters are not their own, and moments, where there was a step."""
    by_id = {id(shard.tensor): shard for shard in one.tensors.by_name.values()}
    for master in masters(one.learner.optimizer):
        shard = by_id.get(id(master.parameter))
        if shard is None:
            continue  # a copy of what another stage writes
        piece, (number, count) = piece_of(shard), shard.replicas
        begin, end = master.begin, master.end
        if not master.sharded:
            begin, end = share(begin, end, piece.width, number, count)
        elif shard.entry.kind == "whole" and shard.group.rank():
            continue
        place = places(shard.entry, one.tensors.sizes, one.tensors.attention, one.tensors.layers_apart)[0]
        reads: dict[str, Callable[[], torch.Tensor]] = {}
        if not master.exact:
            reads[MASTER] = master.weights
        if one.learner.steps or planned:
            reads |= {name: partial(master.moment, name) for name in MOMENTS}
        for name, read in reads.items():
            key = f"{one.prefix}optimizer.state.{name}.{place.key}"
            yield Item(
                (key,),
                place.index,
                place.of,
                piece,
                begin,
                end,
                torch.float32,
                read,
                master.begin,
                master.is_converted,
            )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _texts(worker: MegatronWorker, file: Archives) -> dict[str, Any]:
    """The small files: this rank's generators, on rank 0 what makes all files a checkpoint too; a collective."""
    everyone: list[Any] = [None] * worker.world
    dist.gather_object(file.chunks, everyone if worker.rank == 0 else None)
    name = generators_name(worker.rank, worker.world)
    texts: dict[str, Any] = {name: json.dumps(generators()).encode()}
    if worker.rank == 0:
        chunks: list[WrittenChunk] = [chunk for texts_of_rank in everyone for chunk in texts_of_rank]
        if worker.base.sums:
            texts[base_checksums.FILE] = base_checksums.text(worker.base.sums)
        states = _empty_states(worker.policy.tensors)
        texts[METADATA] = partial(dist_files.metadata, chunks, states, (file.name, len(file.first)))
        texts |= dist_files.common(worker.policy.tensors.layers_apart, worker.actor.steps)
        names = [*texts, *(f"__{rank}_0.distcp" for rank in range(worker.world))]
        names += [generators_name(rank, worker.world) for rank in range(1, worker.world)]
        state = {"format": FORMAT, **_state(worker), "files": sorted(names)}
        texts[STATE] = (json.dumps(state, indent=2) + "\n").encode()
    return texts


def generators_name(rank: int, world: int) -> str:
    """What a rank calls the file of its generators."""
    return f"{GENERATORS}-{rank + 1}-of-{world}.json"


def _empty_states(tensors: Tensors) -> list[str]:
    """Keys that megatron-core's modules look for beside weights."""
    names = [
        extra_states(place)
        for entry in tensors.entries
        for place in places(entry, tensors.sizes, tensors.attention, tensors.layers_apart)
    ]
    return list(dict.fromkeys(filter(None, names)))


def _state(worker: MegatronWorker) -> dict[str, Any]:
    layout = worker.settings.layout
    state: dict[str, Any] = {
        "world": worker.world,
        "layout": {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp", "vp")},
        "dtype": worker.train.dtype,
        "steps": worker.steps,
        "nonfinite_in_a_row": worker.guard.in_a_row,
        "reference": stored_reference(worker) is not None,
    }
    if (adapter := worker.policy.adapter) is not None:
        state["adapters"] = list(worker.policy.adapters)
        state["base_weights"] = worker.train.base_weights
        state["lora"] = adapter.spec.to_peft(worker.config.rollout.hf_checkpoint)
    return state | {counter(one): one.learner.steps for one in learned(worker)}


def counter(one: Learned) -> str:
    """The name of a model's optimizer steps in trainer.json, and of each adapter's where there are several."""
    steps, adapter = one.prefix.replace(".", "_") + "optimizer_steps", one.learner.adapter
    return steps if adapter is None or len(one.model.adapters) == 1 else f"{steps}.{adapter.name}"
