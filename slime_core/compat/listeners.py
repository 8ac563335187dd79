"""slime's filters, sample hooks, post-processing and log functions as votes and tells."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from slime_core.compat import shapes
from slime_core.compat.owners import as_returned, views, whole
from slime_core.compat.rollouts import DataBuffer
from slime_core.compat.sample import Sample, copy_fields
from slime_core.compat.session import CompatSession
from slime_core.compat.steps import rollout_data, samples_of, write_back
from slime_core.errors import ConfigError
from slime_core.types import Batch, Drop, Group, Sample as CoreSample, Status, StepReport

if TYPE_CHECKING:
    from slime_core.context import Context

Function = Callable[..., Any]


def dynamic_filter(fn: Function, session: CompatSession) -> Function:
    """`slime_filter` by ``filter(args, samples, **kw) -> DynamicFilterOutput | bool``."""

    def slime_filter(group: Group, ctx: Context) -> Any:
        with as_returned(samples := views(group, ctx)):
            verdict = fn(session.args(ctx.config, ctx), samples)
        return _later(verdict, group, ctx) if inspect.isawaitable(verdict) else _drop(verdict, ctx)

    async def _later(verdict: Any, group: Group, ctx: Context) -> Drop | None:
        with as_returned(views(group, ctx)):
            return _drop(await verdict, ctx)

    return slime_filter


def _drop(verdict: Any, ctx: Context) -> Drop | None:
    decision = getattr(verdict, "keep", verdict)
    keep = decision.item() if hasattr(decision, "item") else decision  # a numpy or torch bool
    if not isinstance(keep, (bool, int)):
        name = "a DynamicFilterOutput whose keep is " if decision is not verdict else ""
        raise TypeError(f"returned {name}a {type(decision).__name__}; return a bool or a DynamicFilterOutput")
    if not keep and getattr(verdict, "keep_when_insufficient", False):
        rollout = ctx.config.rollout
        if rollout.over_sampling_batch_size > rollout.rollout_batch_size:
            raise ConfigError(
                "a dynamic filter returned keep_when_insufficient, in a run that over-samples",
                code="CFG04",
                where="rollout.dynamic_sampling_filter_path",
                why="which groups it then drops depends on which end first by the clock, so no run could be repeated",
                fix="set over_sampling_batch_size to 0, where such a filter keeps every group as in slime\n"
                "or name a filter without it, such as "
                "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            )
        return None  # nothing is over-sampled: without this group a step lacks one
    return None if keep else Drop(reason=str(getattr(verdict, "reason", None) or "dynamic_filter"))


def sample_filter(fn: Function, session: CompatSession) -> Function:
    """`slime_filter` by ``filter(args, data)``, which sets ``sample.remove_sample``; ``data`` holds one group."""

    def slime_filter(group: Group, ctx: Context) -> None:
        with as_returned(samples := views(group, ctx)):
            fn(session.args(ctx.config, ctx), [samples])

    return slime_filter


def buffer_filter(fn: Function, session: CompatSession) -> Function:
    """`slime_filter` by ``filter(args, rollout_id, buffer, num_samples)``: its buffer holds this group."""

    def slime_filter(group: Group, ctx: Context) -> Drop | None:
        with as_returned(samples := views(group, ctx)):
            filtered = fn(session.args(ctx.config, ctx), None, [samples], 1)
        return None if filtered else Drop(reason="buffer_filter")

    return slime_filter


def sample_hook(fn: Function, session: CompatSession) -> Function:
    """`slime_sample_done` by ``hook(args, sample, *, rollout_id=None, evaluation=False) -> Sample | None``."""

    def slime_sample_done(sample: CoreSample, ctx: Context) -> Any:
        text, view = sample.response, whole(sample, ctx)
        shown = view.response
        offered = shapes.accepted(fn, {"rollout_id": ctx.version, "evaluation": ctx.evaluation})
        result = fn(session.args(ctx.config, ctx), view, **offered)
        take = partial(_take, sample, view, {shown: text})
        return _later(take, result) if inspect.isawaitable(result) else take(result)

    async def _later(take: Function, result: Any) -> None:
        take(await result)

    return slime_sample_done


def _take(sample: CoreSample, view: Sample, texts: Mapping[str, str], result: Any) -> None:
    """Give ``sample`` what a hook made of it; a response that it left alone stays the core's."""
    if result is not None and not isinstance(result, CoreSample):
        raise TypeError(f"returned {type(result).__name__}; return the sample or None")
    copy_fields(view if result is None else result, sample)
    sample.response = texts.get(sample.response, sample.response)


def postprocess(fn: Function, session: CompatSession) -> Function:
    """`slime_batch` by ``fn(args, rollout_id, rollout_data)``; masks and columns may change, tokens may not."""
    from slime_core.compat.estimation import normalised

    def slime_batch(batch: Batch, ctx: Context) -> None:
        rewards = normalised(batch, ctx.config.train) if session.rewards is None else session.rewards
        data = rollout_data(batch, rewards, samples_of(batch, session.alive))
        fn(session.args(ctx.config, ctx), ctx.version, data)
        write_back(data, batch)

    return slime_batch


PREFIXES = {"reference": "ref_", "teacher": "teacher_"}
"""slime's names of the results of a forward-only pass, by role; empty for other roles."""


def megatron_init(fn: Function, session: CompatSession) -> Function:
    """`slime_megatron_init` by ``fn(args)``, with slime's args."""

    def slime_megatron_init(args: Any, ctx: Context) -> None:
        fn(session.args(ctx.config, ctx))

    return slime_megatron_init


def megatron_log_prob(fn: Function, session: CompatSession) -> Function:
    """`slime_megatron_before_log_prob` by ``fn(args, model, store_prefix)``."""

    def slime_megatron_before_log_prob(model: Any, role: str, ctx: Context) -> None:
        fn(session.args(ctx.config, ctx), model, PREFIXES.get(role, ""))

    return slime_megatron_before_log_prob


def megatron_train_step(fn: Function, session: CompatSession) -> Function:
    """`slime_megatron_before_train_step` by ``fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)``.

    ``step_id`` counts the optimizer steps of a rollout from 0. The scheduler is None: the rates of the step stand in
    the optimizer's groups, and may be changed there.
    """
    firsts: dict[int, tuple[int, int]] = {}  # optimizer -> rollout, and its first step there

    def slime_megatron_before_train_step(model: Any, optimizer: Any, step: int, ctx: Context) -> None:
        rollout, first = firsts.get(id(optimizer), (-1, 0))
        if rollout != ctx.version:
            firsts[id(optimizer)] = (ctx.version, first := step)
        fn(session.args(ctx.config, ctx), ctx.version, step - first, model, optimizer, None)

    return slime_megatron_before_train_step


def all_samples(fn: Function, session: CompatSession) -> Function:
    """`slime_step_done` by ``fn(args, all_groups, data_source)``: groups judged since the last step, in prompt order.

    Groups that filters dropped are among them. The step is trained by then: a changed sample changes nothing.
    """

    def slime_step_done(report: StepReport, ctx: Context) -> None:
        judged = sorted(session.judged, key=lambda group: group[0].index)
        groups = [[whole(sample, ctx) for sample in group] for group in judged]
        session.judged.clear()
        with as_returned([sample for group in groups for sample in group]):
            fn(session.args(ctx.config, ctx), groups, DataBuffer().get_samples)

    return slime_step_done


def rollout_log(fn: Function, session: CompatSession) -> Function:
    """`slime_step_done` by ``fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time)``.

    Its answer, which in slime turns the usual log off, is ignored: sinks have their own switches.
    """

    def slime_step_done(report: StepReport, ctx: Context) -> None:
        samples, seconds = list(session.step.values()), report.seconds.get("rollout", 0.0)
        with as_returned(samples):
            fn(report.version - 1, session.args(ctx.config, ctx), samples, dict(report.metrics), seconds)

    return slime_step_done


def evaluation_log(fn: Function, session: CompatSession) -> Function:
    """Told of an evaluation, by ``fn(rollout_id, args, data, extra_metrics)`` with slime's data of each set."""

    def tell(sets: Mapping[str, list[Group]], metrics: dict[str, float], ctx: Context) -> None:
        data = {name: _evaluated([whole(s, ctx) for g in groups for s in g.samples]) for name, groups in sets.items()}
        with as_returned([sample for part in data.values() for sample in part["samples"]]):
            fn(ctx.version, session.args(ctx.config, ctx), data, metrics)

    return tell


def _evaluated(samples: Sequence[CoreSample]) -> dict[str, Any]:
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status is Status.TRUNCATED for sample in samples],
        "samples": list(samples),
    }
