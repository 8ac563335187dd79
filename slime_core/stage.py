"""One stage of a run: what its steps draw from, what syncs, evaluates and reports them.

A stage of a debug mode differs here and nowhere else: its groups come from a dump, or nothing is trained or served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from slime_core.config.load import stage_name
from slime_core.context import Context
from slime_core.data.opening import open_source
from slime_core.data.prompts import limits_of
from slime_core.evaluate import Evaluations, Evaluator, reservation_for_evaluation
from slime_core.media.processor import MediaProcessor
from slime_core.preemption import StopRequested
from slime_core.report.metrics import ledger_metrics, rollout_metrics
from slime_core.rollout.collector import Collector
from slime_core.rollout.dump import Dump, DumpedGroups
from slime_core.rollout.groups import training_params
from slime_core.rollout.observed_engine import observed
from slime_core.types import Group, StepReport
from slime_core.weights.update import Canary, sync_weights

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.report.step_clock import StepClock
    from slime_core.resume import Progress
    from slime_core.rollout.groups import GroupSource


class Stage:
    """The stage that ``progress`` is in, from its next step on.

    Raises:
        SlimeError: bad data, or data that changed since the checkpoint; CFG04 `eval.eval_async` with one engine.
        StopRequested: by methods that wait, where the run was asked to stop first.
    """

    def __init__(self, progress: Progress) -> None:
        config, components = progress.stages[progress.stage], progress.components
        plugins, report, version = progress.plugins, progress.report, served_version(config, progress.version)
        self.progress, self.config, self.components = progress, config, components
        self.plugins, self.report = plugins, report
        self.ctx = ctx = Context(
            config=config,
            engine=observed(components.engines, plugins),
            engines=components.roles,
            tokenizer=components.tokenizer,
            media=MediaProcessor.of(components.tokenizer, limits_of(config.data)),
            sampling=training_params(config),
            run_dir=report.run_dir.path,
            version=version,
            stage=stage_name(config),
            recorded_groups=components.ledger.groups,
        )
        self.dump = Dump(config, report.run_dir.path)
        dumped = bool(config.rollout.load_debug_rollout_data)
        self.source = None if dumped else open_source(config, plugins, components.tokenizer, ctx)
        evaluator = Evaluator(components.vocab_size, plugins, ctx, report)
        self.evaluations = Evaluations(evaluator, reservation_for_evaluation(config, components.reserve_engine))
        self.collector: GroupSource = (
            DumpedGroups(components.ledger, plugins, ctx, report.run_dir.path, report.note)
            if self.source is None
            else Collector(
                source=self.source,
                ledger=components.ledger,
                plugins=plugins,
                ctx=ctx,
                vocab_size=components.vocab_size,
                steps=config.rollout.num_rollout - progress.step,
                note=report.note,
                resumed=progress.resumed,
                saved=progress.collector_state,
            )
        )
        text = self.source.text if self.source is not None else lambda count: ()
        context, vocab = components.context_len, components.vocab_size
        self.canary = Canary(config=config, vocab_size=vocab, context_len=context, text=text)
        progress.collector, progress.evaluations = self.collector, self.evaluations

    async def load_trainer(self) -> None:
        """Start the stage in the trainer, from the checkpoint's state where the run resumes in it."""
        first = self.progress.synced < 0  # no engine serves yet: the trainer has room for all of its state
        async with nullcontext() if first else self.components.devices.training():
            self.report.starting("loading the model into the trainer, and trying what packing and fusing change")
            with self.report.during("loading the model"):
                await self.components.trainer.begin(self.config)
                await self.progress.restore_trainer()

    async def sync(self, *, first: bool = False) -> None:
        """Send the trainer's weights to the engines and compare; ``first`` is before the first step.

        Raises:
            EngineError: ENG83, the engine serves something else (`weights.update`).
        """
        rollout, version = self.config.rollout, self.progress.version
        if first:
            self.report.starting("sending the weights to the engine, and checking what it serves")
        if not rollout.debug_train_only and (first or not rollout.debug_rollout_only):
            check = self.canary.check(version, first=first, last=self.progress.stage_done)
            run, served = self.components, served_version(self.config, version)
            async with run.devices.syncing():
                await sync_weights(run.trainer, run.engines, served, canary=self.canary, check=check)
            await self.canary.compare_log_probs(run.engines)
        self.progress.synced = version

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Generate, and evaluate beside training, inside this block.

        Raises:
            Preempted: the run was asked to stop.
        """
        async with self.collector, self.evaluations:
            try:
                yield
            except StopRequested:
                await self.progress.preempt()

    async def take(self, recorded: list[int]) -> list[Group]:
        """Wait for the next step's groups: those at the ``recorded`` positions, where it was journaled."""
        work = self.collector.take(self.config.rollout.rollout_batch_size, recorded)
        self.report.progress = self.collector.progress
        groups = await self.progress.stop.or_stop(work, self.evaluations)
        self.report.progress = str
        return groups

    async def dump_groups(self, groups: list[Group], clock: StepClock) -> None:
        """Dump the groups of the next step, where ``save_debug_rollout_data`` asks for it."""
        if self.dump.saves:
            with clock.part("dump"):
                await asyncio.to_thread(self.dump.write, self.progress.version + 1, self.ctx.stage, groups)

    async def drain(self) -> None:
        """In lockstep, wait for what the old weights generate; a stopped run generates it again when it resumes."""
        rollout = self.config.rollout
        if rollout.async_schedule == "lockstep":
            drained = self.collector.drain()  # at once where nothing runs ahead
            await self.progress.stop.or_stop(drained, self.evaluations, interruptible=rollout.max_staleness > 0)

    async def finish_earlier_evaluation(self, clock: StepClock) -> None:
        """Wait for the evaluation of an earlier version where one is due: its engine takes the next weights too."""
        self.evaluations.raise_failed()
        if self.progress.eval_due and self.evaluations.task is not None:
            with clock.part("evaluate"):
                await self.evaluations.wait()

    async def evaluate_if_due(self) -> None:
        """Evaluate the version that is served: beside the next steps where that is possible, else in place.

        An evaluation that a stop interrupts is repeated when the run resumes.
        """
        progress, evaluations = self.progress, self.evaluations
        if progress.eval_due and evaluations.beside_training and not progress.stage_done:
            await evaluations.start(progress.version)
        elif progress.eval_due:
            with self.plugins.span("evaluate"), self.report.during("evaluating", evaluations.progress):
                await progress.stop.or_stop(evaluations.run(progress.version), evaluations)
        progress.eval_due = False

    async def report_step(self, groups: list[Group], metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """Let new prompts start, and report the step that was just counted."""
        progress, counts = self.progress, self.collector.pop_counts()
        self.collector.admit(served_version(self.config, progress.version))
        sampling = served_version(self.config, progress.version - 1)
        adapters = self.config.train.lora_adapters
        metrics |= rollout_metrics(groups, sampling, counts.drops, counts.issued, adapters) | counts.metrics
        if self.source is not None:
            metrics |= {f"data/{name}": float(count) for name, count in self.source.counts().items()}
        metrics |= ledger_metrics(await self.components.ledger.counts()) | self.plugins.pop_metrics()
        metrics |= self.components.devices.metrics | self.canary.pop_metrics()
        self.report.samples(progress.version, groups)
        version, step, steps = progress.version, progress.step - 1, self.config.rollout.num_rollout
        done = StepReport(version=version, stage=self.ctx.stage, step=step, of=steps, metrics=metrics, seconds=seconds)
        self.report.step(done)
        self.plugins.step_done(done, self.ctx)


def served_version(config: Config, version: int) -> int:
    """The version that the engine serves after ``version`` steps: where nothing trains, the first."""
    return 0 if config.rollout.debug_rollout_only else version
