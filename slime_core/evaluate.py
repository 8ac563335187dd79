"""Evaluation: metrics of named sets of prompts. Nothing here trains, and nothing enters the ledger.

In place, training waits for it. Beside training (``eval.eval_async``) one of several engines is reserved: it keeps
the weights of the version, takes no update and no rollouts, so every token is that version's, as in place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from slime_core.config.sections.evaluation import EvalTask
from slime_core.context import Context
from slime_core.data.opening import EvalSet, check_set_name, eval_sets
from slime_core.errors import ConfigError, EngineError
from slime_core.evaluation.questions import questions_of
from slime_core.evaluation.record import Evaluation, write_record
from slime_core.evaluation.statistics import figures_of
from slime_core.media.references import plain_sample
from slime_core.report.metrics import evaluation_metrics
from slime_core.rollout.dump import Dump
from slime_core.rollout.filters import unjudged
from slime_core.rollout.groups import check_group, evaluation_params, issued_adapters, issued_ids, pending_group
from slime_core.rollout.observed_engine import observed
from slime_core.rollout.score import note_reward
from slime_core.types import Group

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Engine
    from slime_core.report import Report

    ReserveEngine = Callable[[], AbstractAsyncContextManager[Engine]]

WITH_PICTURES = 64  # groups whose pictures are decoded at a time
EXTRA = "extra"
"""The set of metrics that an evaluation function returns beside its sets."""


class Evaluator:
    """Runs a stage's evaluation sets against the weights that are being served."""

    def __init__(self, engine_vocab: int, plugins: Plugins, ctx: Context, report: Report) -> None:
        config = ctx.config
        self._vocab_size, self._plugins, self._report = engine_vocab, plugins, report
        self._ctx = replace(ctx, evaluation=True, sampling=evaluation_params(config))
        no_engine = config.rollout.debug_train_only
        self.sets = [] if no_engine else eval_sets(config, plugins, ctx.tokenizer, self._ctx)
        self.by_function = not no_engine and plugins.evaluates_by_function(config)
        self._dump = Dump(config, report.run_dir.path)
        self._places = asyncio.Semaphore(WITH_PICTURES)
        self._judged_count, self._issued_count = 0, 0  # groups of the set that is evaluated

    async def run(self, version: int, reserved_engine: Engine | None = None) -> dict[str, dict[str, float]]:
        """Evaluate every set at ``version``; metrics by set name, also handed to the report.

        With ``reserved_engine`` all requests go to that engine, and training continues meanwhile.

        Raises:
            EngineError: ENG83 a hook got tokens of other weights than the reserved engine's.
        """
        engine = self._ctx.engine if reserved_engine is None else observed(reserved_engine, self._plugins)
        ctx = replace(self._ctx, version=version, engine=engine)
        results: dict[str, dict[str, float]] = {}
        done: dict[str, list[Group]] = {}
        start = time.monotonic()
        async for eval_set, groups in self._sets(version, ctx, results):
            done[eval_set.name] = groups
            for sample in (sample for group in groups for sample in group.samples):
                plain_sample(sample)
                sample.multimodal_train_inputs = None  # nothing trains on them
            if reserved_engine is not None:
                check_weights(groups, reserved_engine.version)
            await asyncio.to_thread(self._dump.write, version, ctx.stage, groups, eval_set.name)
            if reason := unjudged(sample for group in groups for sample in group.samples):
                self._report.note(f"evaluation set {eval_set.name}: samples could not be judged: {reason}")
            figures = await asyncio.to_thread(self._figures, eval_set, version, groups)
            metrics = figures | {"seconds": time.monotonic() - start}
            results[eval_set.name] = metrics
            self._report.evaluation(eval_set.name, version, metrics, beside=reserved_engine is not None)
            start = time.monotonic()
        flat = {f"{name}/{key}": value for name, metrics in results.items() for key, value in metrics.items()}
        self._plugins.evaluated(done, flat, ctx)
        return results

    def progress(self) -> str:
        """Questions that are judged, of those of the set."""
        return f"{self._judged_count} of {self._issued_count} questions" if self._issued_count else ""

    async def _sets(
        self, version: int, ctx: Context, results: dict[str, dict[str, float]]
    ) -> AsyncIterator[tuple[EvalSet, list[Group]]]:
        """Each set with its judged groups; metrics that a function returns beside them enter ``results``."""
        if not self.by_function:
            for eval_set in self.sets:
                self._report.starting(f"evaluating {eval_set.name} at step {version}")
                yield eval_set, await self._generate(eval_set, ctx)
            return
        self._report.starting(f"evaluating by a function at step {version}")
        sets = {eval_set.name: eval_set for eval_set in self.sets}
        issued = {name: self._issued(eval_set) for name, eval_set in sets.items()}
        groups_by_name, metrics = await self._plugins.evaluate(issued, ctx)
        for name, groups in groups_by_name.items():
            yield sets.get(name) or EvalSet(name=check_set_name(name), task=EvalTask(name=name), prompts=[]), groups
        if metrics:
            results[EXTRA] = metrics
            self._report.evaluation(EXTRA, version, metrics)

    def _issued(self, eval_set: EvalSet) -> list[Group]:
        config = self._ctx.config
        count = eval_set.task.n_samples_per_prompt or config.eval.n_samples_per_eval_prompt
        adapter = eval_set.task.adapter
        return [pending_group(prompt, config, count=count, adapter=adapter) for prompt in eval_set.prompts]

    def _figures(self, eval_set: EvalSet, version: int, groups: Sequence[Group]) -> dict[str, float]:
        """The set's figures; its record of questions is written to the run directory."""
        questions = questions_of(groups)
        threshold = eval_set.task.pass_reward or self._ctx.config.eval.eval_pass_reward
        figures = evaluation_metrics(groups) | figures_of(questions, threshold)
        record = Evaluation(
            name=eval_set.name, version=version, threshold=threshold, figures=figures, questions=questions
        )
        write_record(self._report.run_dir.path, record)
        return figures

    async def _generate(self, eval_set: EvalSet, ctx: Context) -> list[Group]:
        ctx = replace(ctx, sampling=evaluation_params(ctx.config, eval_set.task))
        issued = self._issued(eval_set)
        self._judged_count, self._issued_count = 0, len(issued)
        if self._plugins.replaces_rollout(eval_set.task.name, ctx.config, evaluation=True):
            return await self._plugins.rollout(issued, ctx)
        return list(await asyncio.gather(*(self._one(group, ctx) for group in issued)))

    async def _one(self, issued: Group, ctx: Context) -> Group:
        if ctx.media is None:
            return await self._judged(issued, ctx)
        async with self._places:
            await ctx.prepare_media(issued.samples)
            group = await self._judged(issued, ctx)
            for sample in group.samples:
                sample.multimodal_train_inputs = None  # before the next ones are made
            return group

    async def _judged(self, issued: Group, ctx: Context) -> Group:
        ctx = replace(ctx, sampling=self._plugins.sampling(issued.prompt, ctx))
        ids, adapters = issued_ids(issued), issued_adapters(issued, ctx.config)
        group = await self._plugins.generate(issued, ctx)
        check_group(group, ids, self._vocab_size, ctx.media, adapters)
        self._plugins.note_group(group, ctx.config)
        for sample in group.samples:
            await self._plugins.sample_done(sample, ctx)
        for sample, reward in zip(group.samples, await self._plugins.reward(group, ctx), strict=True):
            note_reward(sample, reward, ctx.config, evaluation=True)
            if reward.kind == "infra_error":
                sample.reward = None
        self._judged_count += 1
        return group


def check_weights(groups: Sequence[Group], version: int) -> None:
    """Refuse figures of mixed weights.

    Raises:
        EngineError: ENG83 a token that ``version`` did not make, with its sample.
    """
    for sample in (sample for group in groups for sample in group.samples):
        if other := {version_used for version_used in sample.weight_versions if version_used >= 0} - {version}:
            raise EngineError(
                f"an evaluation of version {version} got tokens of version {', '.join(map(str, sorted(other)))}",
                code="ENG83",
                where=sample.id,
                why="a hook asked another engine than the one of its context, which keeps the weights",
                fix="generate by ctx.generate or ctx.engine, or --no-eval-async",
            )


class Evaluations(AbstractAsyncContextManager["Evaluations"]):
    """A stage's evaluations: in place, or one at a time beside training on an engine that ``reserve`` gives.

    Example:
        async with Evaluations(evaluator, components.reserve_engine) as evaluations:
            await evaluations.start(4)              # on an engine that serves version 4
            ...                                     # steps
            await evaluations.wait()                # version 4's figures are reported
    """

    def __init__(self, evaluator: Evaluator, reserve: ReserveEngine | None = None) -> None:
        self._evaluator, self._reserve = evaluator, reserve
        self.task: asyncio.Task[None] | None = None  # the one that runs beside training
        self._version = 0
        self.seconds = 0.0  # the longest beside training so far

    @property
    def beside_training(self) -> bool:
        """Whether training may continue meanwhile."""
        return self._reserve is not None and bool(self._evaluator.sets)

    def progress(self) -> str:
        """How far the one that runs is."""
        return self._evaluator.progress()

    async def run(self, version: int) -> None:
        """Evaluate what is served, in place."""
        await self._evaluator.run(version)

    async def start(self, version: int) -> None:
        """Reserve an engine, which serves ``version``, and evaluate on it beside training, after the one before."""
        assert self._reserve is not None
        await self.wait()
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(self._reserve())
            self._version, resources = version, stack.pop_all()
        self.task = asyncio.create_task(self._beside(version, engine, resources), name=f"slime-evaluation-{version}")

    async def _beside(self, version: int, engine: Engine, resources: AsyncExitStack) -> None:
        start = time.monotonic()
        async with resources:
            await self._evaluator.run(version, engine)
        self.seconds = max(self.seconds, time.monotonic() - start)

    def raise_failed(self) -> None:
        """Raise the error of the one beside training, where it has failed; forget it where it has ended."""
        if self.task is not None and self.task.done():
            task, self.task = self.task, None
            task.result()

    async def wait(self) -> None:
        """Wait for the one beside training; raises its error."""
        if self.task is not None:
            await asyncio.wait([self.task])
            self.raise_failed()

    async def finish_earlier(self, version: int) -> bool:
        """Wait for the evaluation of an earlier version; returns whether ``version`` itself is being evaluated."""
        self.raise_failed()
        if self._version != version:
            await self.wait()
        return self.task is not None

    async def __aexit__(self, *_: object) -> None:
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def reservation_for_evaluation(config: Config, reserve: ReserveEngine | None) -> ReserveEngine | None:
    """How a stage's evaluations reserve an engine; None where they run in place.

    Raises:
        ConfigError: CFG04 `eval.eval_async` where none can be reserved.
    """
    if not config.eval.eval_async or config.rollout.debug_train_only:
        return None
    if reserve is None:
        raise ConfigError(
            "eval_async = true with engines of which none can be reserved",
            code="CFG04",
            where="eval.eval_async",
            why="one engine keeps the weights that are evaluated, and rollouts need another, chosen by slime itself",
            fix="--rollout-num-engines 2   or   --no-eval-async",
        )
    return reserve
