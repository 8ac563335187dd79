"""Where a run stands: what its checkpoints hold beside the trainer, when one is due, and how it goes on from one.

    found -> Progress: stage, step, version, collector -> the ordinary loop -> step_done -> checkpoint, or Preempted

There is no replay code. The loop runs on from the checkpoint; the ledger gives what was finished since, forces the
composition of steps that were journaled, and refuses weights other than those that were recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.checkpoint import CheckpointMetadata, Checkpoints, LoadedCheckpoint, check_state
from slime_core.clusters.machine import machine_facts
from slime_core.config.dump import redacted
from slime_core.errors import Preempted
from slime_core.ledger.ledger import conservation
from slime_core.seeds import set_generators

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.evaluate import Evaluations
    from slime_core.plugins import Plugins
    from slime_core.protocols import RunComponents
    from slime_core.report import Report
    from slime_core.rollout.groups import GroupSource

T = TypeVar("T")


class Stop:
    """One flag that says that a run should end in order: set by a signal or a clock, looked at wherever the run waits.

    Asked once, it stays asked. `ask` may be called from a signal handler of the event loop.

    Example:
        stop = Stop()
        groups = await stop.unless(collector.take(32))     # None where the run was asked to stop first
    """

    def __init__(self) -> None:
        self.reason = ""  # empty while the run goes on
        self.checkpoint_seconds = 0.0  # the longest one so far: who stops in time asks that much earlier
        self._asked = asyncio.Event()

    def ask(self, reason: str) -> None:
        """End at the next point where the state is whole; the first reason stands."""
        self.reason = self.reason or reason
        self._asked.set()

    async def unless(
        self, work: Coroutine[Any, Any, T], evaluations: Evaluations | None = None, *, heeded: bool = True
    ) -> T | None:
        """The answer of ``work``; None where the run was asked to stop first and cancelling ``work`` ended it.

        Raises at once what one of the ``evaluations`` runs into meanwhile. Not ``heeded``, the flag is not looked at.
        """
        if heeded and self.reason:
            work.close()
            return None
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            while not task.done() and not (heeded and stopped.done()):
                evaluation = evaluations.task if evaluations is not None else None
                others = {other for other in (stopped if heeded else None, evaluation) if other is not None}
                await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
                if evaluations is not None and evaluation is not None:
                    evaluations.look()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])  # what it has by now is not lost: groups that were handed over
            return None if task.cancelled() else task.result()
        finally:
            for one in (task, stopped):
                one.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


@dataclass(slots=True, kw_only=True)
class Progress:
    """The run between two steps. ``stage`` and ``step`` count from 0; ``step`` is the next one of its stage."""

    config: Config
    plugins: Plugins
    report: Report
    components: RunComponents
    stop: Stop
    checkpoints: Checkpoints
    found: LoadedCheckpoint | None = None
    exact: bool = True  # steps that were recorded must give the recorded weights
    resumed: bool = False  # the ledger may know of groups
    stage: int = 0
    step: int = 0
    version: int = 0
    eval_due: bool = True  # before the next step
    served: bool = False  # an engine of this process has taken weights
    evaluations: Evaluations | None = None  # of the stage
    collector: Mapping[str, Any] | None = None  # its state in the checkpoint
    stalled: float = 0.0  # seconds that the last checkpoint took from the run
    _saved: int = field(default=-1)  # version of the last checkpoint

    async def step_done(self, collector: GroupSource, *, last: bool) -> None:
        """After a step: a checkpoint where one is due.

        Raises:
            Preempted: the run was asked to stop, and can go on from here.
            StorageError: a checkpoint could not be written, the one before it is whole; or the run directory is gone.
        """
        self.report.check()
        self.checkpoints.raise_failed()
        evaluating = self.evaluations.seconds if self.evaluations is not None else 0.0
        self.stop.checkpoint_seconds = self.checkpoints.seconds + evaluating  # it may have to wait for one
        interval = self.config.report.save_interval
        if last or self.stop.reason or (interval and self.version % interval == 0):
            await self.save(collector)
        if self.stop.reason and not last:
            await self.preempt(collector)
        await self.prune()

    async def save(self, collector: GroupSource) -> None:
        """Begin a checkpoint of this moment; it is published in the background unless ``report.async_save`` is off.

        It waits for the evaluation of an earlier version, whose weights no resume would have. One of this version is
        made again.
        """
        start = time.monotonic()
        under_way = await self._evaluated()
        self.report.settle()
        self.report.log(await self.conserve())
        state = {
            "stage": self.stage,
            "step": self.step,
            "version": self.version,
            "eval_due": self.eval_due or under_way,
            "collector": collector.state(),
            "plugins": self.plugins.state(),
        }
        about = CheckpointMetadata(
            state=state,
            config=redacted(self.config, self.report.secrets).model_dump(mode="json"),
            plugins=self.plugins.fingerprint(),
            machine=machine_facts(self.config),
            epoch=self.report.run_dir.epoch,
        )
        await self.checkpoints.begin(self.version, about, self.components.trainer, self.components.ledger)
        if not self.config.report.async_save:
            await self.checkpoints.settle()
        self._saved = self.version
        self.stalled = time.monotonic() - start

    async def _evaluated(self) -> bool:
        """Whether this version is being evaluated; an earlier one is then evaluated whole."""
        if (evaluations := self.evaluations) is None:
            return False
        evaluations.look()
        if evaluations.unfinished not in (None, self.version):
            await evaluations.settle()
        return evaluations.unfinished is not None

    async def preempt(self, collector: GroupSource | None = None) -> None:
        """Checkpoint, unless this moment has one or cannot have one (no ``collector``), and end.

        Raises:
            Preempted: always.
        """
        if collector is not None and self._saved != self.version:
            await self.save(collector)
        await self.checkpoints.settle()
        raise Preempted(
            f"stopped at version {self.version} ({self.stop.reason})",
            where=str(self.report.run_dir.path),
            why="the run was asked to end; nothing is lost",
            fix=f"slime run --resume {self.report.run_dir.path}",
        )

    async def restore_trainer(self, stage: Config) -> None:
        """Give the trainer, whose stage has begun, the checkpoint's state; nothing where the stage is fresh."""
        if self.collector is None:
            self.eval_due = not stage.eval.skip_eval_before_train
        elif self.found is not None:
            await self.components.trainer.restore(self.found.trainer)

    def seconds(self) -> dict[str, float]:
        """What the last checkpoint took from the run: the time of a step begins with it."""
        stalled, self.stalled = self.stalled, 0.0
        return {"checkpoint": stalled} if stalled else {}

    def next_stage(self, index: int) -> None:
        """Stand before the first step of a stage."""
        self.stage, self.step, self.collector, self.eval_due = index, 0, None, True

    async def conserve(self) -> str:
        """Check that issued = trained + dropped + pending, and return the counts as a line.

        Raises:
            StorageError: STO00 with the counts, where they do not add up.
        """
        return f"version {self.version}: {conservation(await self.components.ledger.counts())}"

    async def prune(self) -> None:
        """Forget payloads that no checkpoint needs, by ``report.ledger_keep_steps``."""
        keep, oldest = self.config.report.ledger_keep_steps, self.checkpoints.oldest()
        if keep and oldest is not None and oldest > keep:
            await self.components.ledger.prune(oldest - keep)


async def begin(
    config: Config,
    plugins: Plugins,
    report: Report,
    components: RunComponents,
    *,
    checkpoint: LoadedCheckpoint | None,
    stop: Stop,
    exact: bool,
) -> Progress:
    """A run's beginning, or where ``checkpoint`` left it: the ledger is rewound, plugins get their state back.

    Raises:
        PluginError: PLG64 a plugin's state that no checkpoint could hold.
        StorageError: the ledger failed.
    """
    check_state(plugins.state())
    checkpoints = Checkpoints(report.run_dir.checkpoints, keep=config.report.save_keep, note=report.note)
    checkpoints.sweep()  # a run that ends without another checkpoint would leave it
    progress = Progress(
        config=config,
        plugins=plugins,
        report=report,
        components=components,
        stop=stop,
        checkpoints=checkpoints,
        found=checkpoint,
        exact=exact and (checkpoint is None or checkpoint.machine == machine_facts(config)),
    )
    progress.resumed = (await components.ledger.counts())["issued"] > 0
    if progress.resumed:
        await components.ledger.rewind(checkpoint.version if checkpoint else 0)
    if checkpoint is not None:
        state = checkpoint.state
        plugins.load_state(state["plugins"])
        progress.stage, progress.step, progress.version = state["stage"], state["step"], state["version"]
        progress.eval_due, progress.collector = state["eval_due"], state["collector"]
        progress._saved = checkpoint.version
        set_generators(checkpoint.random)
    return progress


def positions(sample_ids: list[str]) -> list[int]:
    """The positions of the groups that samples belong to, in order: ``STAGE/POSITION-J`` and its siblings."""
    return list(dict.fromkeys(int(name.rpartition("-")[0].rpartition("/")[2]) for name in sample_ids))


def publish_folder(aside: Path, final: Path) -> None:
    """Put a written folder in its place by one rename; what was there goes."""
    import shutil

    old = final.with_name(f".{final.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    aside.rename(final)
    shutil.rmtree(old, ignore_errors=True)
