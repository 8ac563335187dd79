"""A small trainer that keeps the protocol's hard promises: no torch, no model; a transfer may need both sides."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core import durable
from slime_core.durable import FileMark
from slime_core.errors import TrainerError
from slime_core.protocols import Role
from slime_core.testing.fakes import checksum
from slime_core.types import WeightUpdate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.types import Batch, Columns, WeightRoute

STATE = {"gradients", "optimizer", "parameters"}


class Rendezvous:
    """A transfer that needs both sides at once, as NCCL does: ``send`` ends only when ``receive`` has begun."""

    def __init__(self) -> None:
        self._arrived, self._sent = asyncio.Event(), asyncio.Event()
        self._tensors: dict[str, NDArray[Any]] = {}

    async def send(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """The trainer's side."""
        await self._arrived.wait()
        self._tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
        self._sent.set()

    async def receive(self) -> dict[str, NDArray[Any]]:
        """The engine's side."""
        self._arrived.set()
        await self._sent.wait()
        return self._tensors


def _write_fake(path: Path, parts: Mapping[str, bytes]) -> dict[str, FileMark]:
    try:
        if not path.exists():
            durable.disk.make_folder(path)
        return {f"{name}.bin": durable.write_file(path / f"{name}.bin", [data]) for name, data in parts.items()}
    except OSError as error:
        raise durable.storage_error(error, path, "the trainer's state cannot be written") from error


class FakeTrainer:
    """Two tensors, a step that is a plain function of the batch's advantages, and every role a trainer can score."""

    def __init__(self, *, rendezvous: bool = False, epoch: int = 1) -> None:
        self.weights = {"embed": np.zeros(4), "head": np.zeros(4)}
        self.stages: list[str] = []
        self.batches: list[list[str]] = []  # sample ids of each step
        self._rendezvous, self._epoch = rendezvous, epoch
        self._held = set(STATE)
        self._transfer: asyncio.Task[None] | None = None
        self._saving: tuple[Path, dict[str, bytes]] | None = None  # the copy that `saved` writes

    async def begin(self, stage: Config) -> None:
        """See `protocols.Trainer`."""
        self.stages.append(stage.train.loss_type)

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """See `protocols.Trainer`: log-probs are -1, the teacher's -2, values 0.5."""
        count = len(batch.loss_mask)
        level = {"policy": -1.0, "old_policy": -1.0, "reference": -1.0, "teacher": -2.0}
        level |= {"float32": -1.0, "bfloat16": -1.0}
        out: dict[str, Columns] = {
            role: {"log_probs": np.full(count, level[role], np.float32)} for role in roles if role != "values"
        }
        if "values" in roles:
            out["values"] = {"values": np.full(count, 0.5, np.float32)}
        return out

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        if self._held != STATE:
            raise TrainerError(f"a step ran while {sorted(STATE - self._held)} were released")
        if self._transfer is not None and not self._transfer.done():
            raise TrainerError("a step ran while a weight transfer was still under way")
        self.apply(self.gradient(batch))
        self.batches.append(list(batch.sample_ids))
        return {"loss": float(np.abs(self.weights["head"]).sum())}

    async def verify(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`: the whole gradient against the sum of each sample's."""
        fast = self.gradient(batch)
        slow = np.sum([self.gradient(batch, i, len(batch)) for i in range(len(batch))], axis=0)
        error = float(np.linalg.norm(fast - slow)) / max(float(np.linalg.norm(slow)), 1e-300)
        return {"gradient_error": error, "loss_error": 0.0, "limit": 1e-9, "gradient_error/head": error}

    def gradient(self, batch: Batch, rank: int = 0, world: int = 1) -> NDArray[np.float64]:
        """This rank's share of the step: samples rank, rank + world, ..."""
        out = np.zeros(4)
        advantages = batch.columns.get("advantages", batch.loss_mask)
        for index in range(rank, len(batch), world):
            part = slice(batch.response_offsets[index], batch.response_offsets[index + 1])
            tokens = batch.tokens[batch.offsets[index + 1] - (part.stop - part.start) : batch.offsets[index + 1]]
            np.add.at(out, tokens % 4, advantages[part] * batch.loss_mask[part])
        return out

    def apply(self, gradient: NDArray[np.float64]) -> None:
        """The optimizer: plain addition."""
        self.weights["embed"] = self.weights["embed"] + gradient
        self.weights["head"] = self.weights["head"] - gradient / 2

    async def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """See `protocols.Trainer`; with ``rendezvous`` the transfer ends only inside the engine's ``load``."""
        handle = None
        tensors: Mapping[str, NDArray[Any]] = dict(self.weights)
        if self._rendezvous:
            handle = Rendezvous()
            self._transfer = asyncio.create_task(handle.send(tensors))
            tensors = {}
        return WeightUpdate(
            version=version,
            epoch=self._epoch,
            transport="rendezvous" if self._rendezvous else "tensors",
            tensors=tensors,
            fingerprints={name: checksum(tensor) for name, tensor in self.weights.items()},
            handle=handle,
        )

    async def save(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        await self.saved()
        self._saving = path, {name: w.tobytes() for name, w in self.weights.items()}

    async def saved(self) -> dict[str, FileMark]:
        """See `protocols.Trainer`; a file a tensor."""
        if self._saving is None:
            return {}
        (path, parts), self._saving = self._saving, None
        return await asyncio.to_thread(_write_fake, path, parts)

    async def restore(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        self.weights = {name: np.frombuffer((path / f"{name}.bin").read_bytes()).copy() for name in self.weights}

    async def fingerprint(self) -> str:
        """See `protocols.Trainer`."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode() + b"\0" + self.weights[name].tobytes())
        return digest.hexdigest()

    async def export(self, path: Path) -> None:
        """See `protocols.Trainer`; not a Hugging Face folder, there is no model."""
        path.mkdir(parents=True, exist_ok=True)
        for name, tensor in self.weights.items():
            (path / f"{name}.bin").write_bytes(tensor.tobytes())

    async def release(self, what: set[str]) -> None:
        """See `protocols.Trainer`."""
        self._held -= what

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Trainer`."""
        self._held |= what & STATE


class RankedTrainer(FakeTrainer):
    """Several ranks behind one trainer: each computes its share, all apply the sum."""

    def __init__(self, world: int = 2) -> None:
        super().__init__()
        self.ranks = [FakeTrainer() for _ in range(world)]

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        total = sum(rank.gradient(batch, i, len(self.ranks)) for i, rank in enumerate(self.ranks))
        for rank in self.ranks:
            rank.apply(np.asarray(total))
        self.weights = dict(self.ranks[0].weights)
        self.batches.append(list(batch.sample_ids))
        return {"loss": float(np.abs(self.weights["head"]).sum())}

    async def restore(self, path: Path) -> None:
        """See `protocols.Trainer`; every rank reads."""
        await super().restore(path)
        for rank in self.ranks:
            await rank.restore(path)
