"""Groups that an earlier process issued: what ledger and checkpoint say of them, for a collector that goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.rollout.over_sampling import OVER_SAMPLED
from slime_core.types import Group, Prompt

if TYPE_CHECKING:
    from slime_core.protocols import GroupRecord, Ledger


class Recovery:
    """Groups that were issued before this process began.

        closed             nothing to do             pending    generated again, as the same attempt
        finished, dropped  as it was                 unknown    it is new

    ``state`` is the collector's part of a checkpoint, None at the start of a stage.

    Example:
        recovery = Recovery(ledger, saved)
        found = await recovery.of(groups)          # position -> GroupRecord, for groups that were issued before
    """

    def __init__(self, ledger: Ledger, state: Mapping[str, Any] | None) -> None:
        self._ledger = ledger
        self._known = True  # whether the ledger may know of groups that come
        self.issued = int(state["issued"]) if state else 0  # positions below it were issued before the checkpoint
        self._open = set(state["open"]) if state else set()  # and these of them were not trained or dropped then

    def closed(self, position: int) -> bool:
        """Whether the group was trained or dropped before the checkpoint."""
        return position < self.issued and position not in self._open

    async def of(self, groups: Sequence[Group]) -> dict[int, GroupRecord]:
        """What is known of these groups, by position; the attempt is noted on their samples."""
        if not self._known:
            return {}
        recalled = await self._ledger.groups([group.prompt.id for group in groups])
        self._known = bool(recalled) or groups[-1].prompt.position < self.issued
        recovered = {
            group.prompt.position: recalled[group.prompt.id] for group in groups if group.prompt.id in recalled
        }
        for group in groups:
            if group.prompt.position in recovered:
                for sample in group.samples:
                    sample.attempt = recovered[group.prompt.position].attempt
        return recovered


def stands(recalled: GroupRecord, version: int, *, ranked: bool) -> bool:
    """Whether a group is as it was at once, or runs (again).

    Where the order in which groups end matters (``ranked``: over-sampling in lockstep), a group that ended in a later
    step than that of ``version``, or at a moment that nobody noted, runs again under the weights of that time, and
    gives what it gave; what is stored stands.
    """
    unnoted = recalled.last_reason == OVER_SAMPLED and not recalled.samples
    return recalled.state != "pending" and not (ranked and (recalled.newest > version or unnoted))


def stored_group(prompt: Prompt, recalled: GroupRecord) -> Group:
    """The finished group as the ledger has it."""
    rollouts: dict[int, list[int]] = {}
    for place, sample in enumerate(recalled.samples):
        assert sample.rollout_id is not None, f"{sample.id} was stored without a rollout"
        rollouts.setdefault(sample.rollout_id, []).append(place)
    return Group(prompt=prompt, samples=recalled.samples, rollouts=rollouts)
