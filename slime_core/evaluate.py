"""Evaluation: named sets of prompts in, metrics a set out. Nothing here trains, and nothing enters the ledger."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from slime_core.clusters import build_serving
from slime_core.clusters.machine import resolve_machine
from slime_core.context import Context
from slime_core.data.source import EvalSet, eval_sets
from slime_core.errors import ConfigError
from slime_core.report.metrics import evaluation_metrics
from slime_core.rollout.check import check_group, issued_ids
from slime_core.rollout.dump import Dump
from slime_core.rollout.pending import pending_group
from slime_core.rollout.rewards import note_reward
from slime_core.rollout.sampling import evaluation_params
from slime_core.types import Group

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Serving
    from slime_core.report import Report


class Evaluator:
    """Runs a stage's evaluation sets against the weights that are being served."""

    def __init__(self, engine_vocab: int, plugins: Plugins, ctx: Context, report: Report) -> None:
        config = ctx.config
        self._vocab_size, self._plugins, self._report = engine_vocab, plugins, report
        self._ctx = replace(ctx, evaluation=True, sampling=evaluation_params(config))
        absent = config.rollout.debug_train_only  # no engine, no evaluation
        self.sets = [] if absent else eval_sets(config, plugins, ctx.tokenizer, self._ctx)
        self._dump = Dump(config, report.run_dir.path)

    async def run(self, version: int) -> dict[str, dict[str, float]]:
        """Evaluate every set at ``version``; metrics by set name, also handed to the report."""
        ctx = replace(self._ctx, version=version)
        results: dict[str, dict[str, float]] = {}
        done: dict[str, list[Group]] = {}
        for eval_set in self.sets:
            start = time.monotonic()
            done[eval_set.name] = groups = await self._generate(eval_set, ctx)
            self._dump.write_evaluation(eval_set.name, version, ctx.stage, groups)
            metrics = evaluation_metrics(groups) | {"seconds": time.monotonic() - start}
            results[eval_set.name] = metrics
            self._report.evaluation(eval_set.name, version, metrics)
        flat = {f"{name}/{key}": value for name, metrics in results.items() for key, value in metrics.items()}
        self._plugins.evaluated(done, flat, ctx)
        return results

    async def _generate(self, eval_set: EvalSet, ctx: Context) -> list[Group]:
        count = eval_set.task.n_samples_per_prompt or ctx.config.eval.n_samples_per_eval_prompt
        issued = [pending_group(prompt, ctx.config, count=count) for prompt in eval_set.prompts]
        if self._plugins.replaces_rollout(eval_set.task.name, ctx.config, evaluation=True):
            return await self._plugins.rollout(issued, ctx)
        return list(await asyncio.gather(*(self._one(group, ctx) for group in issued)))

    async def _one(self, issued: Group, ctx: Context) -> Group:
        ctx = replace(ctx, sampling=self._plugins.sampling(issued.prompt, ctx))
        ids = issued_ids(issued)
        group = await self._plugins.generate(issued, ctx)
        check_group(group, ids, self._vocab_size)
        for sample in group.samples:
            await self._plugins.sample_done(sample, ctx)
        for sample, reward in zip(group.samples, await self._plugins.reward(group, ctx), strict=True):
            note_reward(sample, reward, ctx.config, evaluation=True)
            if reward.kind == "infra_error":
                sample.reward = None
        return group


async def evaluate(config: Config, plugins: Plugins, report: Report) -> dict[str, dict[str, float]]:
    """Evaluate the model folder ``config.rollout.hf_checkpoint`` alone, with no trainer (`slime eval`).

    Raises:
        ConfigError: CFG04 the config names no evaluation set.
    """
    config = resolve_machine(config)
    async with build_serving(config) as parts:
        ctx = _context(config, parts, report)
        evaluator = Evaluator(parts.vocab_size, plugins, ctx, report)
        if not evaluator.sets:
            raise ConfigError(
                "there is nothing to evaluate", code="CFG04", fix="set eval.eval_prompt_data or [[eval.eval_tasks]]"
            )
        return await evaluator.run(0)


def _context(config: Config, parts: Serving, report: Report) -> Context:
    return Context(
        config=config,
        engine=parts.engines,
        engines=parts.roles,
        tokenizer=parts.tokenizer,
        run_dir=report.run_dir.path,
        stage="eval",
    )
