"""A generated group in; out what of it trains, and what is dropped with its reason.

A reward is a score, a failed candidate (a score too) or an infrastructure error. The last is never trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime_core.types import Drop, Group, Reward, Sample, Status

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.plugins import Plugins

FAILED = "failed"  # a generate function gave up on the sample
EMPTY = "empty"  # no response token
INFRA = "infra_error"  # the reward could not judge


@dataclass(slots=True)
class Scored:
    """``group`` is what trains, None where nothing is left."""

    group: Group | None
    drops: list[tuple[list[Sample], Drop]] = field(default_factory=list)


async def score_group(group: Group, plugins: Plugins, ctx: Context) -> Scored:
    """Call `slime_sample_done`, the reward and the filters; set ``sample.reward``.

    Raises:
        PluginError: a hook raised, answered late, or answered something that is no reward.
    """
    for sample in group.samples:
        await plugins.sample_done(sample, ctx)
    rewards = await plugins.reward(group, ctx)
    for sample, reward in zip(group.samples, rewards, strict=True):
        _note(sample, reward)
    reasons = [_unfit(sample, reward) for sample, reward in zip(group.samples, rewards, strict=True)]
    drops = [
        ([s for s, r in zip(group.samples, reasons, strict=True) if r == reason], Drop(reason=reason))
        for reason in dict.fromkeys(r for r in reasons if r)
    ]
    kept = _without(group, [bool(reason) for reason in reasons])
    if kept is None:
        return Scored(group=None, drops=drops)
    verdict = await plugins.filter(kept, ctx)
    if verdict is not None:
        return Scored(group=None, drops=[*drops, (kept.samples, verdict)])
    return Scored(group=kept, drops=drops)


def _note(sample: Sample, reward: Reward) -> None:
    sample.reward = reward.value
    if reward.terms:
        sample.metadata["reward_terms"] = dict(reward.terms)
    if reward.kind != "score":
        sample.metadata["reward_kind"] = reward.kind
    if reward.reason:
        sample.metadata["reward_reason"] = reward.reason


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
