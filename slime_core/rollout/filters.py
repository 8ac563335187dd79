"""Filters: which scored groups train, and when a run that drops too many of them stops.

samples that cannot train leave -> `rollout.dynamic_sampling` -> votes of `slime_filter` -> `DropLimit`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import TrainerError
from slime_core.types import Drop, Group, Reward, Sample, Status

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.protocols import Drops

EMPTY = "empty"  # no response token
INFRA = "infra_error"  # the reward could not judge
PLUGIN = "plugin_error"  # a hook raised, and `rollout.on_plugin_error` drops its group
EQUAL = "equal_rewards"  # dynamic sampling: nothing to compare

KIND, REASON = "reward_kind", "reward_reason"  # in a sample's metadata
REASONS_SHOWN, REWARDS_SHOWN, LONGEST = 3, 5, 300  # reasons, rewards, and characters of a reason


def drop_unfit(group: Group, rewards: Sequence[Reward]) -> tuple[Group | None, Drops]:
    """The group of the samples that can train, None where none can; and the others by reason."""
    reasons = [_unfit(sample, reward) for sample, reward in zip(group.samples, rewards, strict=True)]
    drops = [
        ([s for s, r in zip(group.samples, reasons, strict=True) if r == reason], Drop(reason=reason))
        for reason in dict.fromkeys(r for r in reasons if r)
    ]
    fit = [i for i, reason in enumerate(reasons) if not reason]
    return group.part(fit) if fit else None, drops


async def filter_group(group: Group, rewards: Sequence[float], plugins: Plugins, ctx: Context) -> Drop | None:
    """Why a group does not train, None where it does; ``rewards`` are those before the overlong punishment.

    With ``rollout.dynamic_sampling = equal_rewards`` a group whose rewards are all equal is dropped before any filter
    sees it (DAPO, Yu et al. 2025, eq. 11: some, not all, are right): one that differs in length alone does not train.
    """
    if ctx.config.rollout.dynamic_sampling == EQUAL and min(rewards) == max(rewards):
        return Drop(reason=EQUAL)
    return await plugins.filter(group, ctx)


def _unfit(sample: Sample, reward: Reward) -> str:
    if reward.kind == "infra_error":
        return INFRA
    if sample.status in (Status.FAILED, Status.ABORTED):  # failed: a generate function gave up on it
        return sample.status.value
    return "" if sample.response_length else EMPTY


def unjudged(samples: Iterable[Sample]) -> str:
    """Why samples could not be judged, the most frequent reason first; "" where all were.

    Example: unjudged([sample])    # "remote_rm: no answer in 30 s (1 time)"
    """
    errors = [sample.metadata for sample in samples if sample.metadata.get(KIND) == "infra_error"]
    counts = Counter(str(metadata.get(REASON) or "no reason given")[:LONGEST] for metadata in errors)
    common, more = counts.most_common(REASONS_SHOWN), len(counts) - REASONS_SHOWN
    reasons = "; ".join(f"{reason} ({count} time{'s' if count > 1 else ''})" for reason, count in common)
    return reasons + (f"; and {more} other reasons" if more > 0 else "")


MANY_BATCHES = 3  # batches' worth of dropped groups in a step before a note; another after each doubling
FIX = (
    "look at the prompts and the reward: slime show RUN_DIR; fix what could not judge; change the data's difficulty, "
    "raise n_samples_per_prompt or rollout_temperature, or raise rollout.max_dropped_groups (0 is no limit)"
)


class DropLimit:
    """Dropped groups in a row, in prompt order (``rollout.max_dropped_groups``, 0 is no limit), and in a step."""

    def __init__(self, limit: int, batch: int, note: Callable[[str], None]) -> None:
        self._limit, self._many, self._note = limit, MANY_BATCHES * batch, note
        self._next = -1  # position whose verdict counts next
        self._waiting: dict[int, bool | None] = {}  # position -> dropped, None for neither; counted after earlier ones
        self._in_row = 0
        self.step()

    def step(self) -> None:
        """Begin to count another step."""
        self._dropped = self._passed = 0
        self._notes = 0  # each after twice as many groups as the one before
        self._unjudged = ""  # reason of the last group that could not be judged
        self._reasons: Counter[str] = Counter()
        self._rewards: Counter[str] = Counter()

    def issued(self, position: int) -> None:
        """A group started; the first says where counting begins."""
        if self._next < 0:
            self._next = position

    def dropped(self, position: int, reason: str, samples: Sequence[Sample]) -> None:
        """A group was dropped, with its last reason and its samples; raises as :meth:`ended`."""
        self._dropped += 1
        self._reasons[reason] += 1
        judged = [s for s in samples if s.metadata.get(KIND) != "infra_error"]
        self._rewards.update(f"{s.reward:g}" for s in judged if isinstance(s.reward, (int, float)))
        self._unjudged = unjudged(samples) or self._unjudged
        if self._dropped == self._many << self._notes:
            self._notes += 1
            self._note(f"{self._dropped} groups were dropped in this step and {self._passed} kept; {self._summary()}")
        self.ended(position, dropped=True)

    def state(self) -> dict[str, Any]:
        """JSON-ready, for a checkpoint."""
        return {"next": self._next, "row": self._in_row, "waiting": [[p, v] for p, v in sorted(self._waiting.items())]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`; verdicts that it has counted do not count again."""
        self._next, self._in_row = int(state["next"]), int(state["row"])
        self._waiting = {int(position): verdict for position, verdict in state["waiting"]}

    def ended(self, position: int, *, dropped: bool | None) -> None:
        """A group ended; ``dropped`` is False where it trains or could have, None where the step did not need it.

        Raises:
            TrainerError: TRN100 ``limit`` groups in a row were dropped.
        """
        self._passed += dropped is False
        if position < self._next or position in self._waiting:
            return
        self._waiting[position] = dropped
        while self._next in self._waiting:
            verdict = self._waiting.pop(self._next)
            self._next += 1
            if verdict is not None:
                self._in_row = self._in_row + 1 if verdict else 0
            if self._limit and self._in_row >= self._limit:
                raise TrainerError(
                    f"{self._in_row} groups in a row were dropped and none was kept",
                    code="TRN100",
                    where="rollout.max_dropped_groups",
                    why=self._summary(),
                    fix=FIX,
                )

    def _summary(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._reasons.most_common())
        common, more = self._rewards.most_common(REWARDS_SHOWN), len(self._rewards) - REWARDS_SHOWN
        rewards = ", ".join(f"{value} ({count} times)" for value, count in common) or "none"
        others = f" and {more} others" if more > 0 else ""
        unjudged_reason = f"; not judged at last: {self._unjudged}" if self._unjudged else ""
        return f"reasons: {reasons}; rewards seen: {rewards}{others}{unjudged_reason}"
