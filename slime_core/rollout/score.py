"""A generated group in; out what of it trains, and what is dropped with its reason.

    sample_done -> reward -> unfit samples leave -> rewards are shaped -> equal rewards? -> filters

A reward is a score, a failed candidate (a score too) or an infrastructure error. The last is never trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_core.errors import PluginError
from slime_core.rollout.rewards import note_reward, shape_rewards
from slime_core.types import Drop, Group, Reward, Sample, Status

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.plugins import Plugins

FAILED = "failed"  # a generate function gave up on the sample
EMPTY = "empty"  # no response token
INFRA = "infra_error"  # the reward could not judge
PLUGIN = "plugin_error"  # a hook raised, and `rollout.on_plugin_error` drops its group
EQUAL = "equal_rewards"  # dynamic sampling: nothing to compare


@dataclass(slots=True)
class Scored:
    """``group`` is what trains, None where nothing is left."""

    group: Group | None
    drops: list[tuple[list[Sample], Drop]] = field(default_factory=list)


async def score_group(group: Group, plugins: Plugins, ctx: Context) -> Scored:
    """Call `slime_sample_done`, the reward and the filters; set ``sample.reward`` to the number that trains.

    With ``rollout.dynamic_sampling = equal_rewards`` a group whose rewards are all equal is dropped before any filter
    sees it (DAPO, Yu et al. 2025, eq. 11: some, not all, are right). Rewards are compared before the overlong
    punishment, so that a group which differs in length alone does not train. Filters see the rewards that train.

    Raises:
        PluginError: a hook raised, answered late, or answered something that is no reward.
    """
    for sample in group.samples:
        await plugins.sample_done(sample, ctx)
    rewards = await plugins.reward(group, ctx)
    for sample, reward in zip(group.samples, rewards, strict=True):
        note_reward(sample, reward, ctx.config)
    reasons = [_unfit(sample, reward) for sample, reward in zip(group.samples, rewards, strict=True)]
    drops = [
        ([s for s, r in zip(group.samples, reasons, strict=True) if r == reason], Drop(reason=reason))
        for reason in dict.fromkeys(r for r in reasons if r)
    ]
    kept = _without(group, [bool(reason) for reason in reasons])
    if kept is None:
        return Scored(group=None, drops=drops)
    judged = shape_rewards(kept, ctx.config)
    if ctx.config.rollout.dynamic_sampling == EQUAL and min(judged) == max(judged):
        return Scored(group=None, drops=[*drops, (kept.samples, Drop(reason=EQUAL))])
    verdict = await plugins.filter(kept, ctx)
    if verdict is not None:
        return Scored(group=None, drops=[*drops, (kept.samples, verdict)])
    return Scored(group=kept, drops=drops)


async def rolled_out(groups: list[Group], plugins: Plugins, ctx: Context) -> list[Group]:
    """The groups as `slime_rollout` made them; none where it failed and `rollout.on_plugin_error` drops them all.

    Raises:
        PluginError: it failed, and the run ends with it.
    """
    try:
        return await plugins.rollout(groups, ctx)
    except PluginError as error:
        if plugins.ends_run(error, ctx.config):
            raise
        return []


def _unfit(sample: Sample, reward: Reward) -> str:
    if reward.kind == "infra_error":
        return INFRA
    if sample.status in (Status.FAILED, Status.ABORTED):
        return FAILED if sample.status == Status.FAILED else "aborted"
    return EMPTY if sample.response_length == 0 else ""


def _without(group: Group, unfit: list[bool]) -> Group | None:
    if not any(unfit):
        return group
    places = {old: new for new, old in enumerate(i for i, bad in enumerate(unfit) if not bad)}
    if not places:
        return None
    rollouts = {
        rollout: [places[i] for i in indices if i in places]
        for rollout, indices in group.rollouts.items()
        if any(i in places for i in indices)
    }
    return Group(prompt=group.prompt, samples=[group.samples[i] for i in places], rollouts=rollouts)
