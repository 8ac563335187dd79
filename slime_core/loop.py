"""The whole algorithm on one page: sync and async, every backend, every stage of a recipe.

    collector.take -> make_batch -> journal -> trainer.score -> advantage -> trainer.step -> publish -> load -> admit
        ^  groups                                                                                        |
        `------------------------------------- prompts of the new version -------------------------------'

A version is a number of completed steps; `resume` says when one becomes a checkpoint. Stages run in order, each with
its own loss, optimizer and data, under one version counter. On-policy is ``max_staleness = 0``: the collector then
never runs ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from slime_core.clusters import build_cluster
from slime_core.clusters.machine import resolve_machine
from slime_core.config.load import stages
from slime_core.context import Context
from slime_core.evaluate import Evaluations
from slime_core.failpoints import failpoint
from slime_core.notices import notices_to
from slime_core.report.metrics import batch_metrics
from slime_core.report.verification import write_verification
from slime_core.resume import Progress, Stop, begin, positions, publish_folder
from slime_core.rollout.dump import let_go
from slime_core.stage import open_stage
from slime_core.trainers.batch import make_batch
from slime_core.types import Batch, Group

if TYPE_CHECKING:
    from slime_core.checkpoint import LoadedCheckpoint
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import RunComponents
    from slime_core.report import Report
    from slime_core.rollout.groups import GroupSource


BuildCluster = Callable[["Config", "Plugins", "Report"], AbstractAsyncContextManager["RunComponents"]]
Checked = Callable[[dict[str, float]], dict[str, float]]


@dataclass(slots=True)
class Clock:
    """Wall seconds by part of a step."""

    seconds: dict[str, float] = field(default_factory=dict)
    phase: Callable[[str], None] = lambda name: None  # told which part is under way

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time to ``name``."""
        start = time.monotonic()
        self.phase(name)
        try:
            yield
        finally:
            self.phase("")
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


async def run(
    config: Config,
    plugins: Plugins,
    report: Report,
    *,
    cluster: BuildCluster = build_cluster,
    verify_step: int = 0,
    checkpoint: LoadedCheckpoint | None = None,
    stop: Stop | None = None,
    exact: bool = True,
) -> int:
    """Train every stage of ``config`` and write ``final/``; the answer is the last version.

    ``cluster`` starts engines, trainer and ledger; the default does so by ``cluster_backend``. The gradient of the
    step ``verify_step``, counted from 1, is recomputed the slow way and compared. A run whose ledger knows of samples
    goes on: from ``checkpoint``, else from its first step. What was recorded is not generated again, and
    with ``exact`` it must give the weights that were recorded.

    Raises:
        Preempted: ``stop`` was asked; the run has a checkpoint of where it ended.
        SlimeError: bad data, a plugin, engine or trainer that failed; the ledger then holds everything up to there.
    """
    config = resolve_machine(config)
    ended = plugins.running(Context(config=config, run_dir=report.run_dir.path))
    with notices_to(report.note):
        async with cluster(config, plugins, report) as components, ended:
            progress = await begin(
                config, plugins, report, components, checkpoint=checkpoint, stop=stop or Stop(), exact=exact
            )
            for index, stage in list(enumerate(stages(config)))[progress.stage :]:
                await run_stage(stage, index, components, plugins, report, progress, verify_step)
            await progress.checkpoints.settle()
            if config.report.export_final and not config.rollout.debug_rollout_only:
                await export(components, report)
            report.note(await progress.conserve())
            report.settle()
    return progress.version


async def run_stage(
    config: Config,
    index: int,
    components: RunComponents,
    plugins: Plugins,
    report: Report,
    progress: Progress,
    verify_step: int = 0,
) -> None:
    """Run one stage from where ``progress`` stands; it then stands at the next."""
    stage = open_stage(config, components, plugins, report, progress)
    rollout, interval = config.rollout, config.eval.eval_interval
    async with (
        components.devices.training() if progress.served else nullcontext()
    ):  # it needs room for all of its state
        report.starting("loading the model into the trainer, and trying what packing and fusing change")
        await components.trainer.begin(config)
        await progress.restore_trainer(config)
    report.starting("sending the weights to the engine, and checking what it serves")
    await stage.sync(progress.version, first=True)
    progress.served = True
    async with stage.collector as collector, stage.evaluations as evaluations:
        await evaluate_if_due(evaluations, collector, progress, beside=progress.step < rollout.num_rollout)
        while progress.step < rollout.num_rollout:
            clock, version = Clock(progress.seconds(), report.phase), progress.version
            with clock.part("rollout"):
                recorded = positions(await components.ledger.composition(version + 1))
                batch = collector.take(rollout.rollout_batch_size, recorded)
                groups = await progress.stop.unless(batch, evaluations)
            if groups is None:
                return await progress.preempt(collector)
            if stage.dump.saves:
                with clock.part("dump"):
                    await stage.keep(version + 1, groups)
            checked = partial(write_verification, report, version + 1) if version + 1 == verify_step else None
            exact = progress.exact or not recorded
            metrics = await train_on(groups, version, components, plugins, stage.ctx, clock, checked, exact=exact)
            progress.version, progress.step = version + 1, progress.step + 1
            last = progress.step == rollout.num_rollout
            progress.eval_due = last or bool(interval and progress.step % interval == 0)
            with clock.part("rollout"):
                drained = await stage.drained(progress.stop)
            if not drained:
                return await progress.preempt()  # groups of the old weights are under way: made again later
            evaluations.look()
            if progress.eval_due and evaluations.unfinished is not None:
                with clock.part("evaluate"):  # the one before: its engine takes these weights too
                    await evaluations.settle()
            with clock.part("sync"):
                await stage.sync(progress.version)
            failpoint("loop.synced")
            await stage.tell(progress, groups, metrics, clock.seconds)
            failpoint("loop.told")
            await evaluate_if_due(evaluations, collector, progress, beside=not last)
            await progress.step_done(collector, last=last and index == len(stages(progress.config)) - 1)
    progress.next_stage(index + 1)


async def evaluate_if_due(
    evaluations: Evaluations, collector: GroupSource, progress: Progress, *, beside: bool = False
) -> None:
    """Evaluate the version that is being served: in place, or ``beside`` the steps that come, where that can be.

    Raises:
        Preempted: the run was asked to stop; the evaluation is made again when it goes on.
    """
    if progress.eval_due and beside and evaluations.apart:
        await evaluations.begin(progress.version)
    elif progress.eval_due and await progress.stop.unless(evaluations.run(progress.version)) is None:
        await progress.preempt(collector)
    progress.eval_due = False


async def export(components: RunComponents, report: Report) -> None:
    """Write ``final/`` aside and put it in place by one rename."""
    aside = report.run_dir.final.with_name(".final")
    await components.trainer.export(aside)
    publish_folder(aside, report.run_dir.final)
    failpoint("loop.exported")


async def train_on(
    groups: list[Group],
    version: int,
    components: RunComponents,
    plugins: Plugins,
    ctx: Context,
    clock: Clock,
    checked: Checked | None = None,
    *,
    exact: bool = True,
) -> dict[str, float]:
    """Journal, score and train one step's groups; the ledger says trained only when the step is done.

    With ``checked`` the step is verified first; it turns the trainer's answer to metrics. With ``exact`` the ledger
    compares the weights with those that it recorded, where the step was made before.
    """
    batch: Batch = make_batch(version, ctx.stage, groups)
    if ctx.config.rollout.debug_rollout_only:
        await let_go(components.ledger, groups)
        return batch_metrics(batch)
    await components.ledger.journal(batch)
    train = ctx.config.train
    async with components.devices.training():
        with clock.part("score"):
            columns = await components.trainer.score(batch, plugins.needs(train))
        batch = plugins.advantage(batch, columns, train)
        plugins.batch(batch, ctx)
        verified: dict[str, float] = {}
        if checked is not None:
            with clock.part("verify"):
                verified = checked(await components.trainer.verify(batch))
        with clock.part("train"):
            metrics = await components.trainer.step(batch) | batch_metrics(batch) | verified
        with clock.part("fingerprint"):  # while the trainer has its state: summing it in main memory takes seconds
            weights = await components.trainer.fingerprint() if exact else ""
    failpoint("loop.stepped")
    await components.ledger.trained(version + 1, weights)
    return metrics
