"""Rollouts that another process makes: with `rollout.rollout_buffer_url` the plugin `buffer` is who generates.

A reward that came along with a sample is used, the others are judged by the run's own `slime_reward`. A sample that
did not come is an infrastructure error, and never a reward of 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_core.plugins.provider import Answer
from slime_core.types import Group, Reward, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context

INFRA = "rollout_buffer_error"  # in the metadata of a sample that did not come
SFT = "sft_loss"


def made_elsewhere(config: Config, evaluation: bool) -> bool:
    """Whether a rollout buffer makes the samples: in training, unless labels become responses."""
    return bool(config.rollout.rollout_buffer_url) and not evaluation and config.train.loss_type != SFT


def judged(inner: Answer) -> Answer:
    """``inner``, the run's reward, for those samples that have none yet."""

    def ask(group: Group, ctx: Context) -> tuple[list[int], Any]:
        rest = [i for i, sample in enumerate(group.samples) if sample.reward is None and INFRA not in sample.metadata]
        return rest, inner({"group": _part(group, rest), "ctx": ctx}) if rest else []

    def slime_reward(group: Group, ctx: Context) -> Any:
        rest, values = ask(group, ctx)
        return _later(group, rest, values) if inspect.isawaitable(values) else _merged(group, rest, values)

    async def slime_reward_async(group: Group, ctx: Context) -> Any:
        rest, values = ask(group, ctx)
        return _merged(group, rest, await values if rest else [])

    fn: Callable[..., Any] = slime_reward_async if inner.is_async else slime_reward
    return replace(inner, fn=fn, takes=frozenset({"group", "ctx"}))


async def _later(group: Group, rest: Sequence[int], values: Any) -> Any:
    return _merged(group, rest, await values)


def _part(group: Group, members: Sequence[int]) -> Group:
    if len(members) == len(group.samples):
        return group
    places = {old: new for new, old in enumerate(members)}
    rollouts = {name: [places[i] for i in indices if i in places] for name, indices in group.rollouts.items()}
    samples = [group.samples[i] for i in members]
    return Group(prompt=group.prompt, samples=samples, rollouts={n: found for n, found in rollouts.items() if found})


def _merged(group: Group, rest: Sequence[int], values: Any) -> Any:
    """One answer a sample; what is no list of the right length is left for the border to refuse."""
    if len(rest) == len(group.samples) or not isinstance(values, (list, tuple)) or len(values) != len(rest):
        return values
    own = dict(zip(rest, values, strict=True))
    return [own[i] if i in own else _given(sample) for i, sample in enumerate(group.samples)]


def _given(sample: Sample) -> Any:
    if why := sample.metadata.get(INFRA):
        return Reward(value=0.0, kind="infra_error", reason=str(why))
    return sample.reward
