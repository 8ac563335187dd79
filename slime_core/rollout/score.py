"""A generated group is judged: what of it trains on which reward, and what is dropped with its reason.

    sample_done -> reward -> unfit samples leave -> rewards are shaped -> equal rewards? -> filters

A reward is a score, a failed candidate (a score too) or an infrastructure error. The last is never trained on.
The number that trains on a sample is shaped from what the reward said:

    terms   reward.reward_weights, each normalised in its group first with reward.reward_terms_normalize
    value   where no weights are set
    + overlong punishment (reward.overlong_buffer_len), in training only

A sample's ``metadata`` keeps the raw terms (``reward_terms``) and, where it is another, the reward before the
punishment (``raw_reward``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.algorithms.shared.shaping import soft_overlong, weighed
from slime_core.errors import PluginError, TrainerError
from slime_core.types import Drop, Group, Reward, Sample, Status

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.config.sections.reward import RewardSection
    from slime_core.context import Context
    from slime_core.plugins import Plugins

FAILED = "failed"  # a generate function gave up on the sample
EMPTY = "empty"  # no response token
INFRA = "infra_error"  # the reward could not judge
PLUGIN = "plugin_error"  # a hook raised, and `rollout.on_plugin_error` drops its group
EQUAL = "equal_rewards"  # dynamic sampling: nothing to compare

OVERLONG = "overlong"
TERMS = "reward_terms"
RAW = "raw_reward"
KIND, REASON = "reward_kind", "reward_reason"
REASONS_SHOWN, LONGEST = 3, 300  # reasons, and characters of one


@dataclass(slots=True)
class ScoredGroup:
    """``group`` is what trains, None where nothing is left."""

    group: Group | None
    drops: list[tuple[list[Sample], Drop]] = field(default_factory=list)


async def score_group(group: Group, plugins: Plugins, ctx: Context) -> ScoredGroup:
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
    fit = [i for i, reason in enumerate(reasons) if not reason]
    if not fit:
        return ScoredGroup(group=None, drops=drops)
    scored = group.part(fit)
    judged = shape_rewards(scored, ctx.config)
    if ctx.config.rollout.dynamic_sampling == EQUAL and min(judged) == max(judged):
        return ScoredGroup(group=None, drops=[*drops, (scored.samples, Drop(reason=EQUAL))])
    verdict = await plugins.filter(scored, ctx)
    if verdict is not None:
        return ScoredGroup(group=None, drops=[*drops, (scored.samples, verdict)])
    return ScoredGroup(group=scored, drops=drops)


def _unfit(sample: Sample, reward: Reward) -> str:
    if reward.kind == "infra_error":
        return INFRA
    if sample.status in (Status.FAILED, Status.ABORTED):
        return FAILED if sample.status == Status.FAILED else "aborted"
    return EMPTY if sample.response_length == 0 else ""


def unjudged(samples: Iterable[Sample]) -> str:
    """Why samples could not be judged, the most frequent reason first; "" where all were.

    Example:
        unjudged([sample])    # "remote_rm: no answer in 30 s (1 time)"
    """
    broken = [sample.metadata for sample in samples if sample.metadata.get(KIND) == "infra_error"]
    counts = Counter(str(metadata.get(REASON) or "no reason given")[:LONGEST] for metadata in broken)
    shown = [
        f"{reason} ({count} time{'s' if count > 1 else ''})" for reason, count in counts.most_common(REASONS_SHOWN)
    ]
    more = len(counts) - len(shown)
    return "; ".join(shown) + (f"; and {more} other reasons" if more > 0 else "")


def note_reward(sample: Sample, reward: Reward, config: Config, *, evaluation: bool = False) -> None:
    """Keep what the reward said: the raw weighed value as ``sample.reward``, terms, kind and reason in metadata.

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
    """Set the rewards that train on a group's judged samples; the answer is each reward before the punishment.

    Truncated samples are taken out of the loss here (``reward.mask_truncated``); they stay in the group's statistics.
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
    lost = soft_overlong(
        np.array([sample.response_length for sample in samples], dtype=np.int64),
        config.rollout.rollout_max_response_len,
        section.overlong_buffer_len,
        section.overlong_penalty_factor,
    )
    for sample, loss in zip(samples, lost, strict=True):
        before = float(sample.reward)  # type: ignore[arg-type]
        sample.metadata[TERMS] = {**sample.metadata.get(TERMS, {}), OVERLONG: float(loss)}
        sample.metadata[RAW] = before
        sample.reward = before + float(loss)


def _check_terms(sample: Sample, reward: Reward, section: RewardSection, evaluation: bool) -> None:
    weights: Mapping[str, float] = section.reward_weights
    terms = ", ".join(sorted(reward.terms)) or "none"
    where = f"sample {sample.id}"
    if OVERLONG in reward.terms and section.overlong_buffer_len and not evaluation:
        raise PluginError(
            f"the reward of sample {sample.id} has a term named '{OVERLONG}'",
            code="PLG57",
            where=where,
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
        where=where,
        why=f"its terms are {terms} (kind {reward.kind}), reward.reward_weights names {', '.join(sorted(weights))}",
        fix="answer Reward(value=..., terms={...}) with every weighed term, of failed candidates too; "
        "give terms that are only reported the weight 0",
    )


MANY_BATCHES = 3
"""Batches' worth of dropped groups in one step before a sentence says so; another after each doubling."""

REWARDS_SHOWN = 5
FIX = (
    "look at the prompts and the reward: slime show RUN_DIR; mend what could not judge; change the data's difficulty, "
    "raise n_samples_per_prompt or rollout_temperature, or raise rollout.max_dropped_groups (0 is no limit)"
)


class DropLimit:
    """Dropped groups in a row (``rollout.max_dropped_groups``, 0 is no limit), and in a step."""

    def __init__(self, limit: int, batch: int, note: Callable[[str], None]) -> None:
        self._limit, self._many, self._note = limit, MANY_BATCHES * batch, note
        self._next = -1  # position whose verdict counts next
        self._waiting: dict[int, bool | None] = {}  # position -> dropped, None for neither; counted after earlier ones
        self._row = 0
        self._of_step = 0
        self._kept = 0
        self._told = 0  # sentences about this step; each after twice as many groups as the one before
        self._unjudged = ""  # why the last that could not be judged was not
        self._reasons: Counter[str] = Counter()
        self._rewards: Counter[str] = Counter()

    def issued(self, position: int) -> None:
        """A group started; the first says where counting begins."""
        if self._next < 0:
            self._next = position

    def left_out(self, position: int) -> None:
        """A group ended without a verdict: it was not needed."""
        self._count(position, None)

    def kept(self, position: int) -> None:
        """A group trains, or could have."""
        self._kept += 1
        self._count(position, False)

    def dropped(self, position: int, reason: str, samples: Sequence[Sample]) -> None:
        """A group was dropped, with its last reason and its samples.

        Raises:
            TrainerError: TRN100 ``limit`` groups in a row were dropped.
        """
        self._of_step += 1
        self._reasons[reason] += 1
        judged = [s for s in samples if s.metadata.get(KIND) != "infra_error"]
        self._rewards.update(f"{s.reward:g}" for s in judged if isinstance(s.reward, (int, float)))
        self._unjudged = unjudged(samples) or self._unjudged
        if self._of_step == self._many << self._told:
            self._told += 1
            self._note(f"{self._of_step} groups were dropped in this step and {self._kept} kept; {self._seen()}")
        self._count(position, True)

    def step(self) -> None:
        """A step took its groups; what is said of a step begins anew."""
        self._of_step = self._kept = self._told = 0
        self._unjudged = ""
        self._reasons.clear()
        self._rewards.clear()

    def state(self) -> dict[str, Any]:
        """JSON-ready, for a checkpoint."""
        return {"next": self._next, "row": self._row, "waiting": [[p, v] for p, v in sorted(self._waiting.items())]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`; verdicts that it has counted do not count again."""
        self._next, self._row = int(state["next"]), int(state["row"])
        self._waiting = {int(position): verdict for position, verdict in state["waiting"]}

    def _count(self, position: int, dropped: bool | None) -> None:
        if position < self._next or position in self._waiting:
            return
        self._waiting[position] = dropped
        while self._next in self._waiting:
            verdict = self._waiting.pop(self._next)
            self._next += 1
            if verdict is not None:
                self._row = self._row + 1 if verdict else 0
            if self._limit and self._row >= self._limit:
                raise TrainerError(
                    f"{self._row} groups in a row were dropped and none was kept",
                    code="TRN100",
                    where="rollout.max_dropped_groups",
                    why=self._seen(),
                    fix=FIX,
                )

    def _seen(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
        common = self._rewards.most_common(REWARDS_SHOWN)
        more = len(self._rewards) - len(common)
        rewards = ", ".join(f"{value} ({count} times)" for value, count in common)
        summary = f"reasons: {reasons}; rewards seen: {rewards or 'none'}" + (
            f" and {more} others" if more > 0 else ""
        )
        return f"{summary}; not judged at last: {self._unjudged}" if self._unjudged else summary
