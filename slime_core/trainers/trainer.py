"""A backend's worker as a `protocols.Trainer`: every call runs on the process's torch thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.errors import TrainerError
from slime_core.peaks import PhasePeaks

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.durable import FileMark
    from slime_core.plugins import Plugins
    from slime_core.protocols import Role
    from slime_core.threads import TorchThread
    from slime_core.trainers.data_parallel import DataParallelRank, RankBatch
    from slime_core.types import Batch, Columns, WeightRoute, WeightUpdate
    from slime_core.weights.folder import ModelFolder

STATE = frozenset({"gradients", "optimizer", "parameters"})


class WorkerTrainer:
    """What a backend's trainer is but for its ``worker_class``, whose methods are the calls.

    Every rank makes its own with the same arguments, gets the same calls, and takes its part of a batch;
    ``rendezvous`` is a file that all see, for more than one. The answers of rank 0 count. ``errors`` is a folder for
    the sample ids of steps that were not finite, ``epoch`` counts the run's processes; updates carry it.
    """

    worker_class: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        config: Config,
        plugins: Plugins,
        folder: ModelFolder,
        *,
        thread: TorchThread,
        rank: int = 0,
        world: int = 1,
        device: str = "cpu",
        rendezvous: str | Path | None = None,
        errors: Path | None = None,
        epoch: int = 0,
    ) -> None:
        self._thread, self._epoch = thread, epoch
        self._resident = set(STATE)  # what is not released
        self._peaks = PhasePeaks(errors.parent / "memory" / f"rank-{rank}.json" if errors else None, device)
        self._worker: Any = thread.call(
            self.worker_class, config, plugins, folder, rank, world, device, rendezvous, errors
        )

    async def begin(self, stage: Config) -> None:
        """See `protocols.Trainer`: fresh optimizers and schedules; reference, teacher and critic
        where the stage's estimator or loss reads them.

        Raises:
            TrainerError: TRN104 a model of another vocabulary, or a reference of another architecture.
            ConfigError: CFG04 the layout does not divide the teacher or the critic.
        """
        await self._thread.run(self._worker.begin, stage)

    async def score(self, batch: Batch | RankBatch, roles: frozenset[Role]) -> dict[str, Columns]:
        """See `protocols.Trainer`; every role lives here, where the stage needs it.

        Of a rank batch that a driver sent to this rank: the columns of its rows, not checked. Nothing is answered
        by ranks that another of their data-parallel rank speaks for.
        """
        self._need({"parameters"}, "score")
        return await self._thread.run(self._peaks.during, "score", self._worker.score, batch, roles)

    @property
    def dp_rank(self) -> DataParallelRank:
        """Its data-parallel rank, by which a driver partitions batches."""
        dp_rank: DataParallelRank = self._worker.dp_rank
        return dp_rank

    async def step(self, batch: Batch | RankBatch) -> dict[str, float]:
        """See `protocols.Trainer`; on a rank batch too.

        Raises:
            TrainerError: TRN95 a loss or gradient that is not finite, with sample ids, after ``max_nonfinite_steps``
                of them in a row; TRN106 ranks with different batches. No weight has changed then.
        """
        self._need(STATE, "step")
        return await self._thread.run(self._peaks.during, "train", self._worker.step, batch)

    async def verify(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer` and `verify.verify`: the policy's gradients, not a critic's."""
        self._need(STATE, "verify")
        return await self._thread.run(self._worker.verify, batch)

    async def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """See `protocols.Trainer`."""
        self._need({"parameters"}, "publish")
        publish: Any = self._worker.publish
        update: WeightUpdate = await self._thread.run(self._peaks.during, "sync", publish, version, route)
        update.epoch = self._epoch
        return update

    async def save(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        await self._thread.run(self._worker.save, path)

    async def saved(self) -> dict[str, FileMark]:
        """See `protocols.Trainer`; of this rank's files."""
        return await asyncio.wrap_future(self._worker.staging.writing)

    def written(self) -> dict[str, FileMark] | None:
        """What :meth:`saved` answers, without waiting: None while files are being written."""
        writing = self._worker.staging.writing
        return writing.result() if writing.done() else None

    async def restore(self, path: Path) -> None:
        """See `protocols.Trainer`; after `begin` of the stage that saved, at any layout.

        Raises:
            StorageError: STO111, STO112 files missing or damaged, STO113 of another format. No rank has changed then.
            TrainerError: TRN108 of another model.
        """
        await self._thread.run(self._worker.restore, path)

    async def fingerprint(self) -> str:
        """See `protocols.Trainer` and `fingerprint.fingerprint`; a critic's parameters are part of it."""
        return await self._thread.run(self._worker.fingerprint)

    async def export(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        await self._thread.run(self._worker.export, path)

    async def release(self, what: set[str]) -> None:
        """See `protocols.Trainer`; on an accelerator, what is kept moves to the host.

        It can be saved, restored, exported and fingerprinted there.
        """
        await self._thread.run(self._worker.release, _checked(what) & self._resident)
        self._resident -= what

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Trainer`."""
        await self._thread.run(self._worker.reacquire, _checked(what) - self._resident)
        self._resident |= what

    def _need(self, what: Set[str], call: str) -> None:
        """Refuse a call whose state was released.

        Raises:
            TrainerError: with what to reacquire.
        """
        if missing := sorted(what - self._resident):
            raise TrainerError(f"{call} was called while {missing} were released", fix=f"reacquire({missing}) first")


def _checked(what: Set[str]) -> Set[str]:
    """The same names.

    Raises:
        TrainerError: a name that no trainer holds.
    """
    if unknown := what - STATE:
        raise TrainerError(f"a trainer holds {sorted(STATE)}, not {sorted(unknown)}")
    return what
