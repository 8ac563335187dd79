"""One stage of a run, ready to go: what its steps draw from, what measures them, and what is told of them.

A stage of a debug mode differs here and nowhere else: its groups come from a dump, or nothing is trained or served.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.config.load import stage_name
from slime_core.context import Context
from slime_core.data.opening import open_source
from slime_core.data.source import DataSource
from slime_core.evaluate import Evaluations, Evaluator, holder
from slime_core.report.metrics import ledger_metrics, rollout_metrics
from slime_core.rollout.collector import Collector
from slime_core.rollout.dump import Dump, DumpedGroups
from slime_core.rollout.groups import training_params
from slime_core.types import Group, StepReport
from slime_core.weights.update import Canary, sync_weights

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import RunComponents
    from slime_core.report import Report
    from slime_core.resume import Progress, Stop
    from slime_core.rollout.groups import GroupSource


@dataclass(slots=True, kw_only=True)
class Stage:
    """See the module. ``source`` is None where groups come from a dump."""

    config: Config
    components: RunComponents
    plugins: Plugins
    report: Report
    ctx: Context
    dump: Dump
    source: DataSource | None
    evaluations: Evaluations
    collector: GroupSource
    canary: Canary
    last: int  # version that its last step makes

    async def sync(self, version: int, *, first: bool = False) -> None:
        """Bring the trainer's weights to the engine and compare; ``first`` is before the first step.

        Raises:
            EngineError: ENG83, the engine serves something else (`weights.update`).
        """
        rollout = self.config.rollout
        if rollout.debug_train_only or (rollout.debug_rollout_only and not first):
            return
        check = self.canary.check(version, first=first, last=version == self.last)
        trainer, engines = self.components.trainer, self.components.engines
        async with self.components.devices.syncing():
            await sync_weights(trainer, engines, served(self.config, version), canary=self.canary, check=check)
        await self.canary.compare_log_probs(engines)

    async def drained(self, stop: Stop) -> bool:
        """In lockstep, wait for what the old weights generate; False where the run was asked to stop first."""
        rollout = self.config.rollout
        if rollout.async_schedule != "lockstep":
            return True
        drained = self.collector.drain()  # at once where nothing runs ahead
        return bool(await stop.unless(drained, self.evaluations, heeded=rollout.max_staleness > 0))

    async def keep(self, version: int, groups: list[Group]) -> None:
        """Dump the groups of the step that makes ``version``."""
        await asyncio.to_thread(self.dump.write, version, self.ctx.stage, groups)

    async def tell(
        self, progress: Progress, groups: list[Group], metrics: dict[str, float], seconds: dict[str, float]
    ) -> None:
        """Let new prompts start, and report the step that ``progress`` has just counted."""
        counts = self.collector.pop_counts()
        self.collector.admit(served(self.config, progress.version))
        sampling = served(self.config, progress.version - 1)
        metrics |= rollout_metrics(groups, sampling, counts.drops, counts.issued) | counts.metrics
        if self.source is not None:
            metrics |= {f"data/{name}": float(count) for name, count in self.source.counts().items()}
        metrics |= ledger_metrics(await self.components.ledger.counts()) | self.plugins.pop_metrics()
        metrics |= self.components.devices.metrics | self.canary.pop_metrics()
        self.report.samples(progress.version, groups)
        version, step, steps = progress.version, progress.step - 1, self.config.rollout.num_rollout
        done = StepReport(version=version, stage=self.ctx.stage, step=step, of=steps, metrics=metrics, seconds=seconds)
        self.report.step(done)
        self.plugins.step_done(done, self.ctx)


def served(config: Config, version: int) -> int:
    """The version that the engine serves after ``version`` steps: where nothing trains, the first."""
    return 0 if config.rollout.debug_rollout_only else version


def open_stage(
    config: Config, components: RunComponents, plugins: Plugins, report: Report, progress: Progress
) -> Stage:
    """Open a stage's data and evaluation sets, and a collector that stands where ``progress`` does.

    Raises:
        SlimeError: bad data, or data that changed since the checkpoint; CFG04 `eval.eval_async` with one engine.
    """
    ctx = Context(
        config=config,
        engine=components.engines,
        engines=components.roles,
        tokenizer=components.tokenizer,
        sampling=training_params(config),
        run_dir=report.run_dir.path,
        version=served(config, progress.version),
        stage=stage_name(config),
        recorded_groups=components.ledger.groups,
    )
    dump = Dump(config, report.run_dir.path)
    folder = config.rollout.load_debug_rollout_data
    source = None if folder else open_source(config, plugins, components.tokenizer, ctx)
    evaluator = Evaluator(components.vocab_size, plugins, ctx, report)
    evaluations = progress.evaluations = Evaluations(evaluator, holder(config, components.reserve_engine))
    canary = Canary(config=config, vocab_size=components.vocab_size, text=source.text if source else lambda count: ())
    collector: GroupSource = DumpedGroups(components.ledger, plugins, ctx, report.run_dir.path, report.note)
    if source is not None:
        collector = Collector(
            source=source,
            ledger=components.ledger,
            plugins=plugins,
            ctx=ctx,
            vocab_size=components.vocab_size,
            steps=config.rollout.num_rollout - progress.step,
            note=report.note,
            resumed=progress.resumed,
            saved=progress.collector,
        )
    return Stage(
        config=config,
        components=components,
        plugins=plugins,
        report=report,
        ctx=ctx,
        dump=dump,
        source=source,
        evaluations=evaluations,
        collector=collector,
        canary=canary,
        last=progress.version + config.rollout.num_rollout - progress.step,
    )
