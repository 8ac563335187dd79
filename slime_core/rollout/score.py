"""A generated group in; out what of it trains, and what is dropped with its reason.

    check: lengths agree, ids are in the vocabulary, log-probs are finite; else an error that names the sample
    sample_done -> reward -> unfit samples leave -> rewards are shaped -> equal rewards? -> filters

A reward is a score, a failed candidate (a score too) or an infrastructure error. The last is never trained on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError, PluginError, TrainerError
from slime_core.rollout.rewards import KIND, note_reward, shape_rewards, unjudged
from slime_core.types import Drop, Group, Reward, Sample, Status

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.plugins import Plugins

SLACK = 1e-4  # a log-prob may exceed 0 by rounding
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


def issued_ids(group: Group) -> dict[int, str]:
    """Rollout id to sample id of a pending group; taken before plugins may change the group in place."""
    return {rollout: group.samples[indices[0]].id for rollout, indices in group.rollouts.items()}


def check_group(group: Group, issued: Mapping[int, str], vocab_size: int) -> None:
    """Check every sample and the rollout table of a group, and name fan-out siblings after the sample issued for them.

    ``issued`` is :func:`issued_ids` of the group as it was handed out.

    Raises:
        EngineError: ENG79 lengths, TOK44 ids, ENG80 log-probs, ENG82 a rollout table that does not fit.
    """
    members = sorted(i for indices in group.rollouts.values() for i in indices)
    if members != list(range(len(group.samples))):
        raise EngineError(
            f"the rollouts of group {group.id} name samples {members}, the group has {len(group.samples)}",
            code="ENG82",
            where=f"group {group.id}",
            fix="every sample belongs to exactly one rollout id of Group.rollouts",
        )
    if set(group.rollouts) != set(issued):
        raise EngineError(
            f"group {group.id} came back with rollouts {sorted(group.rollouts)}, not {sorted(issued)}",
            code="ENG82",
            where=f"group {group.id}",
            fix="keep every rollout id; a rollout that failed keeps its sample with status FAILED",
        )
    for rollout, indices in group.rollouts.items():
        for k, index in enumerate(indices):
            sample = group.samples[index]
            sample.id = f"{issued[rollout]}.{k}" if k else issued[rollout]
            sample.rollout_id, sample.group_index, sample.task = rollout, group.prompt.position, group.prompt.task
            _check_sample(sample, vocab_size)


def _check_sample(sample: Sample, vocab_size: int) -> None:
    count = sample.response_length
    if sample.loss_mask is None:
        sample.loss_mask = [1] * count
    if not sample.weight_versions:
        sample.weight_versions = [-1] * count
    lengths = {"loss_mask": len(sample.loss_mask), "weight_versions": len(sample.weight_versions)}
    if sample.rollout_log_probs is not None:
        lengths["rollout_log_probs"] = len(sample.rollout_log_probs)
    wrong = {name: length for name, length in lengths.items() if length != count}
    if wrong or not 0 <= count <= len(sample.tokens):
        raise EngineError(
            f"sample {sample.id} has {len(sample.tokens)} tokens, response_length {count}, and {wrong}",
            code="ENG79",
            where=f"sample {sample.id}",
            why="loss_mask, rollout_log_probs and weight_versions have one entry a response token",
            fix="add turns with sample.append_response(tokens, log_probs, mask)",
        )
    if sample.tokens and not 0 <= min(sample.tokens) <= max(sample.tokens) < vocab_size:
        outside = next(token for token in sample.tokens if not 0 <= token < vocab_size)
        raise EngineError(
            f"sample {sample.id} holds token id {outside}, outside the vocabulary of {vocab_size}",
            code="TOK44",
            where=f"sample {sample.id}",
            fix="use the model's own tokenizer; nothing may be re-encoded",
        )
    log_probs = sample.rollout_log_probs
    if log_probs and (not math.isfinite(sum(log_probs)) or max(log_probs) > SLACK):  # NaN and inf stay in a sum
        for position, value in enumerate(log_probs):
            if not math.isfinite(value) or value > SLACK:
                raise EngineError(
                    f"sample {sample.id} has log-prob {value} at response token {position}",
                    code="ENG80",
                    where=f"sample {sample.id}",
                    why="a log-prob is finite and not above 0",
                )
    if sample.loss_mask.count(0) + sample.loss_mask.count(1) != count:
        raise EngineError(f"sample {sample.id} has a loss_mask entry other than 0 and 1", code="ENG79")


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
    fit = [i for i, reason in enumerate(reasons) if not reason]
    if not fit:
        return Scored(group=None, drops=drops)
    kept = group.part(fit)
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


MANY_BATCHES = 3
"""Batches' worth of dropped groups in one step before a sentence says so; another after each doubling."""

REWARDS_SHOWN = 5
FIX = (
    "look at the prompts and the reward: slime show RUN_DIR; mend what could not judge; change the data's difficulty, "
    "raise n_samples_per_prompt or rollout_temperature, or raise rollout.max_dropped_groups (0 is no limit)"
)


class Streak:
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
        seen = f"reasons: {reasons}; rewards seen: {rewards or 'none'}" + (f" and {more} others" if more > 0 else "")
        return f"{seen}; not judged at last: {self._unjudged}" if self._unjudged else seen
