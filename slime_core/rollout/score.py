"""Scoring of a generated group: the reward that each sample trains on.

    sample_done -> reward -> unfit samples are dropped -> rewards are shaped -> filters

A reward is a score, a failed candidate (a score too) or an infrastructure error. The last is never trained on.
The number that a sample trains on is shaped from the hook's reward:

    terms   reward.reward_weights, each normalised in its group first with reward.reward_terms_normalize
    value   where no weights are set
    + overlong punishment (reward.overlong_buffer_len), in training only

A sample's ``metadata`` keeps the raw terms (``reward_terms``) and, where it differs, the reward before the punishment
(``raw_reward``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slime_core.algorithms.shared.shaping import soft_overlong, weighed
from slime_core.errors import PluginError
from slime_core.rollout.filters import KIND, REASON, drop_unfit, filter_group
from slime_core.types import Group, Reward, Sample, Status

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.config.sections.reward import RewardSection
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.protocols import Drops

OVERLONG = "overlong"
TERMS = "reward_terms"
RAW = "raw_reward"


async def score_group(group: Group, plugins: Plugins, ctx: Context) -> tuple[Group | None, Drops]:
    """Call `slime_sample_done`, the reward and the filters; set ``sample.reward`` to the number that trains.

    Returns the group of the samples that train, None where none does, and the others with the reasons.

    Raises:
        PluginError: a hook raised, missed its deadline, or returned something that is no reward.
    """
    plugins.note_group(group, ctx.config)
    for sample in group.samples:
        await plugins.sample_done(sample, ctx)
    rewards = await plugins.reward(group, ctx)
    for sample, reward in zip(group.samples, rewards, strict=True):
        note_reward(sample, reward, ctx.config)
    fit, drops = drop_unfit(group, rewards)
    if fit is None:
        return None, drops
    unpunished = shape_rewards(fit, ctx.config)
    if (drop := await filter_group(fit, unpunished, plugins, ctx)) is not None:
        return None, [*drops, (fit.samples, drop)]
    return fit, drops


def note_reward(sample: Sample, reward: Reward, config: Config, *, evaluation: bool = False) -> None:
    """Note a reward: its raw weighed value as ``sample.reward``, its terms, kind and reason in the metadata.

    Raises:
        PluginError: PLG57 terms that are not those of ``reward.reward_weights``, or one that is named "overlong"
            while overlong responses are punished.
    """
    section = config.reward
    if reward.kind != "infra_error":
        _check_terms(sample, reward, section, evaluation)
    sample.reward = reward.value
    if section.reward_weights and reward.kind != "infra_error":
        sample.reward = sum(weight * reward.terms[name] for name, weight in section.reward_weights.items())
    if reward.terms:
        sample.metadata[TERMS] = dict(reward.terms)
    if reward.kind != "score":
        sample.metadata[KIND] = reward.kind
    if reward.reason:
        sample.metadata[REASON] = reward.reason


def shape_rewards(group: Group, config: Config) -> list[float]:
    """Set the rewards that a group's samples train on; returns each reward before the overlong punishment.

    Truncated samples leave the loss here (``reward.mask_truncated``); they stay in the group's statistics.
    """
    section = config.reward
    values = _weighed(group, section)
    for sample, value in zip(group.samples, values, strict=True):
        sample.reward = value
        if section.mask_truncated and sample.status is Status.TRUNCATED:
            sample.remove_sample = True
    if section.overlong_buffer_len and section.overlong_penalty_factor:
        _punish(group.samples, config)
    return values


def _weighed(group: Group, section: RewardSection) -> list[float]:
    weights = section.reward_weights
    if not (weights and section.reward_terms_normalize):
        return [float(sample.reward) for sample in group.samples]  # type: ignore[arg-type]
    rollout = {index: name for name, indices in group.rollouts.items() for index in indices}
    terms = [[sample.metadata[TERMS][name] for sample in group.samples] for name in weights]
    total = weighed(
        np.array(terms, dtype=np.float64),
        np.array(list(weights.values()), dtype=np.float64),
        np.array([rollout[index] for index in range(len(group.samples))], dtype=np.int64),
        normalize=True,
    )
    return [float(value) for value in total]


def _punish(samples: Sequence[Sample], config: Config) -> None:
    section = config.reward
    punishments = soft_overlong(
        np.array([sample.response_length for sample in samples], dtype=np.int64),
        config.rollout.rollout_max_response_len,
        section.overlong_buffer_len,
        section.overlong_penalty_factor,
    )
    for sample, punishment in zip(samples, punishments, strict=True):
        raw = float(sample.reward)  # type: ignore[arg-type]
        sample.metadata[TERMS] = {**sample.metadata.get(TERMS, {}), OVERLONG: float(punishment)}
        sample.metadata[RAW] = raw
        sample.reward = raw + float(punishment)


def _check_terms(sample: Sample, reward: Reward, section: RewardSection, evaluation: bool) -> None:
    weights: Mapping[str, float] = section.reward_weights
    terms = ", ".join(sorted(reward.terms)) or "none"
    if OVERLONG in reward.terms and section.overlong_buffer_len and not evaluation:
        raise PluginError(
            f"the reward of sample {sample.id} has a term named '{OVERLONG}'",
            code="PLG57",
            where=f"sample {sample.id}",
            why="the core's own punishment (reward.overlong_buffer_len) is reported under that name",
            fix="rename the term, or set overlong_buffer_len to 0",
        )
    missing = sorted(set(weights) - set(reward.terms))
    unknown = sorted(set(reward.terms) - set(weights)) if weights else []
    if not missing and not unknown:
        return
    problems = [f"lacks {', '.join(missing)}"] if missing else []
    problems += [f"has {', '.join(unknown)}, which have no weight"] if unknown else []
    raise PluginError(
        f"the reward of sample {sample.id} {' and '.join(problems)}",
        code="PLG57",
        where=f"sample {sample.id}",
        why=f"its terms are {terms} (kind {reward.kind}), reward.reward_weights names {', '.join(sorted(weights))}",
        fix="answer Reward(value=..., terms={...}) with every weighed term, of failed candidates too; "
        "give terms that are only reported the weight 0",
    )
