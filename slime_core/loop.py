"""The whole algorithm on one page: sync and async, every backend, every stage of a recipe.

    collector.take -> make_batch -> journal -> trainer.score -> advantage -> trainer.step -> publish -> load -> admit
        ^  groups                                                                                        |
        `------------------------------------- prompts of the new version -------------------------------'

A version is a number of completed steps; `resume` says when one becomes a checkpoint. Stages run in order, each with
its own loss, optimizer and data, under one version counter. On-policy is ``max_staleness = 0``: the collector then
never runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING

from slime_core.clusters import build_cluster
from slime_core.clusters.machine import resolve_machine
from slime_core.context import Context
from slime_core.failpoints import failpoint
from slime_core.notices import notices_to
from slime_core.planning.memory import with_keys
from slime_core.preemption import StopSignal
from slime_core.report.metrics import batch_metrics
from slime_core.report.step_clock import StepClock
from slime_core.report.verification import Verification, write_verification
from slime_core.resume import Progress
from slime_core.rollout.dump import drop_groups
from slime_core.stage import Stage
from slime_core.trainers.adapters import estimated
from slime_core.trainers.batch import make_batch

if TYPE_CHECKING:
    from slime_core.checkpoint import LoadedCheckpoint
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import RunComponents
    from slime_core.report import Report
    from slime_core.types import Group


BuildCluster = Callable[["Config", "Plugins", "Report"], AbstractAsyncContextManager["RunComponents"]]


async def run(
    config: Config,
    plugins: Plugins,
    report: Report,
    *,
    cluster: BuildCluster = build_cluster,
    verify_step: int = 0,
    checkpoint: LoadedCheckpoint | None = None,
    stop: StopSignal | None = None,
    exact: bool = True,
) -> int:
    """Train every stage of ``config``, write ``final/`` and return the last version.

    ``cluster`` starts engines, trainer and ledger; the default does so by ``cluster_backend``. The gradient of
    ``verify_step``, counted from 1, is recomputed the slow way and compared. A run whose ledger has samples resumes
    from ``checkpoint``, else from its first step. What was recorded is not generated again, and with ``exact`` it
    must give the weights that were recorded.

    Raises:
        Preempted: ``stop`` was requested; the run can be resumed from where it ended.
        SlimeError: bad data, a plugin, engine or trainer that failed; the ledger then holds everything up to there.
    """
    config = resolve_machine(config)
    running = plugins.running(Context(config=config, run_dir=report.run_dir.path))
    verification = Verification(verify_step, partial(write_verification, report, verify_step))
    with notices_to(report.note):
        started = with_keys(config, {"train.lora_load": ""}) if checkpoint is not None else config  # it has adapters
        async with report.watched_live(), cluster(started, plugins, report) as components, running:
            progress = Progress(config, plugins, report, components, stop or StopSignal())
            await progress.resume(checkpoint, exact=exact)
            while progress.stage < len(progress.stages):
                await run_stage(Stage(progress), progress, verification)
            await progress.finish()
    return progress.version


async def run_stage(stage: Stage, progress: Progress, verification: Verification) -> None:
    """Run a stage from where ``progress`` is to the start of the next one."""
    await stage.load_trainer()
    await stage.sync(first=True)
    async with stage.generating():
        await stage.evaluate_if_due()
        while not progress.stage_done:
            await run_step(stage, progress, verification)
    progress.next_stage()


async def run_step(stage: Stage, progress: Progress, verification: Verification) -> None:
    """Take groups, train on them, bring the new weights to the engines; then report, evaluate and save."""
    clock = StepClock(progress.pop_checkpoint_seconds(), stage.report.phase, stage.plugins.span)
    with clock.part("rollout"):
        recorded = await progress.recorded_positions()
        groups = await stage.take(recorded)
    await stage.dump_groups(groups, clock)
    exact = progress.exact or not recorded
    version, components, plugins = progress.version, stage.components, stage.plugins
    metrics = await train_on(groups, version, components, plugins, stage.ctx, clock, verification, exact=exact)
    progress.count_step()
    with clock.part("rollout"):
        await stage.drain()
    await stage.finish_earlier_evaluation(clock)
    with clock.part("sync"):
        await stage.sync()
    failpoint("loop.synced")
    await stage.report_step(groups, metrics, clock.seconds)
    failpoint("loop.reported")
    await stage.evaluate_if_due()
    await progress.finish_step()


async def train_on(
    groups: list[Group],
    version: int,
    components: RunComponents,
    plugins: Plugins,
    ctx: Context,
    clock: StepClock,
    verification: Verification | None = None,
    *,
    exact: bool = True,
) -> dict[str, float]:
    """Journal, score and train one step's groups, and return its metrics.

    The ledger marks the samples as trained only when the step is done. With ``exact`` it compares the weights with
    those that it recorded, where the step was made before.
    """
    batch, train, trainer = make_batch(version, ctx.stage, groups), ctx.config.train, components.trainer
    if ctx.config.rollout.debug_rollout_only:
        await drop_groups(components.ledger, groups)
        return batch_metrics(batch, train.lora_adapters)
    await components.ledger.journal(batch)
    async with components.devices.training():
        with clock.part("score"):
            columns = await trainer.score(batch, plugins.needs(train))
        batch = estimated(batch, columns, plugins, train)
        plugins.batch(batch, ctx)
        verified = await verification.run(batch, trainer, clock) if verification is not None else {}
        with clock.part("train"):
            metrics = await trainer.step(batch) | batch_metrics(batch, train.lora_adapters) | verified
        with clock.part("fingerprint"):  # while the trainer has its state: summing it in main memory takes seconds
            weights = await trainer.fingerprint() if exact else ""
    failpoint("loop.stepped")
    await components.ledger.trained(version + 1, weights)
    return metrics
