"""Progress of a run: what a checkpoint holds beside the trainer, when one is due, and how a run resumes from it.

    checkpoint -> Progress: stage, step, version, collector -> the ordinary loop -> checkpoint, or Preempted

There is no replay code. The loop runs on from the checkpoint; the ledger returns what was finished since, forces the
composition of steps that were journaled, and refuses weights other than those that were recorded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from slime_core.checkpoint import CheckpointMetadata, Checkpoints, LoadedCheckpoint, check_state
from slime_core.clusters.machine import machine_facts
from slime_core.config.dump import redacted
from slime_core.config.load import stages
from slime_core.errors import Preempted
from slime_core.failpoints import failpoint
from slime_core.ledger.ledger import conservation
from slime_core.seeds import set_generators

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.evaluate import Evaluations
    from slime_core.plugins import Plugins
    from slime_core.preemption import StopSignal
    from slime_core.protocols import RunComponents
    from slime_core.report import Report
    from slime_core.rollout.groups import GroupSource


class Progress:
    """The run between two steps. ``stage`` and ``step`` count from 0; ``step`` is the next one of its stage."""

    collector: GroupSource  # of the stage, as the next line
    evaluations: Evaluations

    def __init__(
        self, config: Config, plugins: Plugins, report: Report, components: RunComponents, stop: StopSignal
    ) -> None:
        self.config, self.plugins, self.report, self.components, self.stop = config, plugins, report, components, stop
        self.checkpoints = Checkpoints(report.run_dir.checkpoints, keep=config.report.save_keep, note=report.note)
        self.stages = stages(config)
        self.stage = self.step = self.version = 0
        self.eval_due = True  # before the next step
        self.exact = True  # steps that were recorded must give the recorded weights
        self.resumed = False  # the ledger may know of groups
        self.synced = -1  # the version whose weights the engines of this process took
        self.collector_state: Mapping[str, Any] | None = None  # of the checkpoint; None where the stage is fresh
        self._checkpoint: LoadedCheckpoint | None = None
        self._checkpoint_seconds = 0.0  # that the last checkpoint took from the run
        self._saved = -1  # version of the last checkpoint

    async def resume(self, checkpoint: LoadedCheckpoint | None, *, exact: bool) -> None:
        """Go to ``checkpoint``, or to the first step: the ledger is rewound, and plugins get their state back.

        Raises:
            PluginError: PLG64 a plugin's state that no checkpoint can hold.
            StorageError: the ledger failed.
        """
        check_state(self.plugins.state())
        self.checkpoints.sweep()  # a run that ends without another checkpoint would leave it
        self.exact = exact and (checkpoint is None or checkpoint.machine == machine_facts(self.config))
        self.resumed = (await self.components.ledger.counts())["issued"] > 0
        if self.resumed:
            await self.components.ledger.rewind(checkpoint.version if checkpoint else 0)
        if checkpoint is not None:
            state = checkpoint.state
            self.plugins.load_state(state["plugins"])
            self.stage, self.step, self.version = state["stage"], state["step"], state["version"]
            self.eval_due, self.collector_state = state["eval_due"], state["collector"]
            self._checkpoint, self._saved = checkpoint, checkpoint.version
            set_generators(checkpoint.random)

    @property
    def stage_done(self) -> bool:
        """Whether the last step of the stage is done."""
        return self.step >= self.stages[self.stage].rollout.num_rollout  # a resumed run may ask for fewer

    async def restore_trainer(self) -> None:
        """Give the trainer, whose stage has begun, the checkpoint's state; nothing where the stage is fresh."""
        if self.collector_state is None:
            self.eval_due = not self.stages[self.stage].eval.skip_eval_before_train
        elif self._checkpoint is not None:
            await self.components.trainer.restore(self._checkpoint.trainer)

    async def recorded_positions(self) -> list[int]:
        """Positions of the next step's groups where its composition was journaled; empty for a new step."""
        return positions(await self.components.ledger.composition(self.version + 1))

    def pop_checkpoint_seconds(self) -> dict[str, float]:
        """What the last checkpoint took from the run: the time of the next step begins with it."""
        seconds, self._checkpoint_seconds = self._checkpoint_seconds, 0.0
        return {"checkpoint": seconds} if seconds else {}

    def count_step(self) -> None:
        """Count a trained step."""
        self.version, self.step = self.version + 1, self.step + 1
        interval = self.stages[self.stage].eval.eval_interval
        self.eval_due = self.stage_done or bool(interval and self.step % interval == 0)

    async def finish_step(self) -> None:
        """Save a checkpoint where one is due, and forget payloads that none needs.

        Raises:
            Preempted: the run was asked to stop, and can be resumed from here.
            StorageError: a checkpoint could not be written, the one before it is whole; or the run directory is gone.
        """
        self.report.check()
        self.checkpoints.raise_failed()
        # a stop may have to wait for an evaluation too
        self.stop.checkpoint_seconds = self.checkpoints.seconds + self.evaluations.seconds
        interval, last = self.config.report.save_interval, self.stage_done and self.stage == len(self.stages) - 1
        if last or self.stop.reason or (interval and self.version % interval == 0):
            await self.save()
        if self.stop.reason and not last:
            await self.preempt()
        await self._prune()

    async def save(self) -> None:
        """Begin a checkpoint of this moment; it is published in the background unless ``report.async_save`` is off.

        It waits for the evaluation of an earlier version, whose weights no resume would have. One of this version is
        repeated by the resumed run.
        """
        start = time.monotonic()
        evaluating = await self.evaluations.finish_earlier(self.version)
        self.report.flush()
        self.report.log(await self._conservation())
        state = {
            "stage": self.stage,
            "step": self.step,
            "version": self.version,
            "eval_due": self.eval_due or evaluating,
            "collector": self.collector.state(),
            "plugins": self.plugins.state(),
        }
        metadata = CheckpointMetadata(
            state=state,
            config=redacted(self.config, self.report.secrets).model_dump(mode="json"),
            plugins=self.plugins.fingerprint(),
            machine=machine_facts(self.config),
            epoch=self.report.run_dir.epoch,
        )
        await self.checkpoints.begin(self.version, metadata, self.components.trainer, self.components.ledger)
        if not self.config.report.async_save:
            await self.checkpoints.wait()
        self._saved = self.version
        self._checkpoint_seconds = time.monotonic() - start

    async def preempt(self) -> NoReturn:
        """End the run, with a checkpoint unless there is one or groups of older weights are still in flight.

        Raises:
            Preempted: always.
        """
        if self.synced == self.version != self._saved:
            await self.save()
        await self.checkpoints.wait()
        raise Preempted(
            f"stopped at version {self.version} ({self.stop.reason})",
            where=str(self.report.run_dir.path),
            why="the run was asked to end; nothing is lost",
            fix=f"slime run --resume {self.report.run_dir.path}",
        ) from None

    def next_stage(self) -> None:
        """Move to the first step of the next stage."""
        self.stage, self.step, self.collector_state, self.eval_due = self.stage + 1, 0, None, True

    async def finish(self) -> None:
        """End a trained run: publish its last checkpoint, write ``final/``, and check that no sample is lost.

        Raises:
            StorageError: a checkpoint could not be written; STO00 with the ledger's counts, where they do not add up.
        """
        export = self.config.report.export_final and not self.config.rollout.debug_rollout_only
        folder = self.report.run_dir.final.with_name(".final")
        try:
            if export:  # while the checkpoint is being written
                await self.components.trainer.export(folder)
        finally:
            await self.checkpoints.wait()
        if export:
            self.report.run_dir.publish_final(folder)
            failpoint("loop.exported")
        self.report.note(await self._conservation())
        self.report.flush()

    async def _conservation(self) -> str:
        """Check that issued = trained + dropped + pending, and return the counts as a line."""
        return f"version {self.version}: {conservation(await self.components.ledger.counts())}"

    async def _prune(self) -> None:
        """Forget payloads that no checkpoint needs, by ``report.ledger_keep_steps``."""
        keep, oldest = self.config.report.ledger_keep_steps, self.checkpoints.oldest()
        if keep and oldest is not None and oldest > keep:
            await self.components.ledger.prune(oldest - keep)


def positions(sample_ids: list[str]) -> list[int]:
    """The positions of the groups that samples belong to, in order: ``STAGE/POSITION-J`` and its siblings."""
    return list(dict.fromkeys(int(name.rpartition("-")[0].rpartition("/")[2]) for name in sample_ids))
