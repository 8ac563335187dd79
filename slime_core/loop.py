"""The whole algorithm on one page: sync and async, every backend, every stage of a recipe.

    collector.take -> make_batch -> journal -> trainer.score -> advantage -> trainer.step -> publish -> load -> admit
        ^  groups                                                                                        |
        `------------------------------------- prompts of the new version -------------------------------'

A version is a number of completed steps. Stages run in order, each with its own loss, optimizer and data, under one
version counter. On-policy is ``max_staleness = 0``: the collector then never runs ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from slime_core.clusters import build_cluster
from slime_core.clusters.machine import resolve_machine
from slime_core.config.load import stage_name, stages
from slime_core.context import Context
from slime_core.data.source import open_source
from slime_core.errors import StorageError
from slime_core.evaluate import Evaluator
from slime_core.report.metrics import batch_metrics, rollout_metrics
from slime_core.report.verification import write_verification
from slime_core.rollout.collect import Collector
from slime_core.rollout.sampling import training_params
from slime_core.trainers.batch import make_batch
from slime_core.types import Batch, Group, StepReport
from slime_core.weights.update import sync_weights

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Parts
    from slime_core.report import Report


BuildCluster = Callable[["Config", "Plugins", "Report"], AbstractAsyncContextManager["Parts"]]
Checked = Callable[[dict[str, float]], dict[str, float]]


@dataclass(slots=True)
class Clock:
    """Wall seconds by part of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the block's time to ``name``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


async def run(
    config: Config, plugins: Plugins, report: Report, *, cluster: BuildCluster = build_cluster, verify_step: int = 0
) -> int:
    """Train every stage of ``config`` and write ``final/``; the answer is the last version.

    ``cluster`` starts engines, trainer and ledger; the default does so by ``cluster_backend``. The gradient of the
    step ``verify_step``, counted from 1, is recomputed the slow way and compared.

    Raises:
        SlimeError: bad data, a plugin, engine or trainer that failed; the ledger then holds everything up to there.
    """
    config = resolve_machine(config)
    async with cluster(config, plugins, report) as parts:
        version = 0
        for stage in stages(config):
            version = await run_stage(stage, version, parts, plugins, report, verify_step)
        if config.report.export_final:
            await parts.trainer.export(report.run_dir.final)
        await check_conservation(parts)
    return version


async def run_stage(
    config: Config, version: int, parts: Parts, plugins: Plugins, report: Report, verify_step: int = 0
) -> int:
    """Run one stage from ``version`` on; the answer is the version after its last step."""
    ctx = Context(
        config=config,
        engine=parts.engines,
        engines=parts.roles,
        tokenizer=parts.tokenizer,
        sampling=training_params(config),
        run_dir=report.run_dir.path,
        version=version,
        stage=stage_name(config),
    )

    def tell(done: StepReport) -> None:
        report.step(done)
        plugins.step_done(done, ctx)

    steps = config.rollout.num_rollout
    source = open_source(config, plugins, parts.tokenizer, ctx)
    evaluator = Evaluator(parts.vocab_size, plugins, ctx, report)
    await parts.trainer.begin(config)
    async with parts.turns.syncing():
        await sync_weights(parts.trainer, parts.engines, version)
    if not config.eval.skip_eval_before_train:
        await evaluator.run(version)
    async with Collector(
        source=source,
        ledger=parts.ledger,
        plugins=plugins,
        ctx=ctx,
        vocab_size=parts.vocab_size,
        steps=steps,
        note=report.note,
    ) as collector:
        for step in range(steps):
            clock = Clock()
            with clock.part("rollout"):
                groups = await collector.take(config.rollout.rollout_batch_size)
            checked = partial(write_verification, report, version + 1) if version + 1 == verify_step else None
            metrics = await train_on(groups, version, parts, plugins, ctx, clock, checked)
            version += 1
            if config.rollout.async_schedule == "lockstep":
                await collector.drain()
            with clock.part("sync"):
                async with parts.turns.syncing():
                    await sync_weights(parts.trainer, parts.engines, version)
            counts = collector.pop_counts()
            collector.admit(version)
            metrics |= rollout_metrics(groups, version - 1, counts.drops, counts.issued) | counts.metrics
            metrics |= {f"data/{name}": float(count) for name, count in source.counts().items()}
            report.samples(version, groups)
            tell(
                StepReport(
                    version=version, stage=ctx.stage, step=step, of=steps, metrics=metrics, seconds=clock.seconds
                )
            )
            if step + 1 == steps or (config.eval.eval_interval and (step + 1) % config.eval.eval_interval == 0):
                await evaluator.run(version)
    return version


async def train_on(
    groups: list[Group],
    version: int,
    parts: Parts,
    plugins: Plugins,
    ctx: Context,
    clock: Clock,
    checked: Checked | None = None,
) -> dict[str, float]:
    """Journal, score and train one step's groups; the ledger says trained only when the step is done.

    With ``checked`` the step is verified first; it turns the trainer's answer to metrics.
    """
    batch: Batch = make_batch(version, ctx.stage, groups)
    await parts.ledger.journal(batch)
    train = ctx.config.train
    async with parts.turns.training():
        with clock.part("score"):
            columns = await parts.trainer.score(batch, plugins.needs(train))
        batch = plugins.advantage(batch, columns, train)
        plugins.batch(batch, ctx)
        verified: dict[str, float] = {}
        if checked is not None:
            with clock.part("verify"):
                verified = checked(await parts.trainer.verify(batch))
        with clock.part("train"):
            metrics = await parts.trainer.step(batch) | batch_metrics(batch) | verified
    await parts.ledger.trained(version + 1)
    return metrics


async def check_conservation(parts: Parts) -> None:
    """Every sample is in exactly one state: issued = trained + dropped + pending.

    Raises:
        StorageError: STO00 with the counts, where they do not add up.
    """
    counts = await parts.ledger.counts()
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
    if counts["issued"] != counts["trained"] + dropped + counts["pending"]:
        raise StorageError(f"samples were lost or doubled: {dict(counts)}", why="issued = trained + dropped + pending")
