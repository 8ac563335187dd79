"""A run that goes on: what the ledger and the checkpoint say of a group that was issued before this process began.

    prompts come again from the data source, in order -> Memory.of -> closed: nothing to do
                                                                      finished, dropped: as it was, nothing runs again
                                                                      pending: generated again, as the same attempt
                                                                      unknown: it is new

Where the order in which groups end matters (over-sampling in lockstep), a group whose end lies in a later step than
the one that is made again runs again, under the weights of that time, and gives what it gave; what is stored stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.rollout.surplus import OVER_SAMPLED
from slime_core.types import Group, Prompt

if TYPE_CHECKING:
    from slime_core.protocols import Ledger, Recalled


class Memory:
    """Remembers for a collector; ``state`` is its part of a checkpoint, None at the start of a stage.

    Example:
        memory = Memory(ledger, saved, known=True)
        found = await memory.of(groups)          # position -> Recalled, for groups that were issued before
    """

    def __init__(self, ledger: Ledger, state: Mapping[str, Any] | None, *, known: bool) -> None:
        self._ledger = ledger
        self._known = known  # whether the ledger may know of groups that come
        self.issued = int(state["issued"]) if state else 0  # positions below it were issued before the checkpoint
        self._open = set(state["open"]) if state else set()  # and these of them were not trained or dropped then

    def closed(self, position: int) -> bool:
        """Whether the group was trained or dropped before the checkpoint."""
        return position < self.issued and position not in self._open

    async def of(self, groups: Sequence[Group]) -> dict[int, Recalled]:
        """What is known of these groups, by position; the attempt is noted on their samples."""
        if not self._known:
            return {}
        found = await self._ledger.recall([group.prompt.id for group in groups])
        self._known = bool(found) or groups[-1].prompt.position < self.issued
        known = {group.prompt.position: found[group.prompt.id] for group in groups if group.prompt.id in found}
        for group in groups:
            if group.prompt.position in known:
                for sample in group.samples:
                    sample.attempt = known[group.prompt.position].attempt
        return known


def later(found: Recalled, version: int) -> bool:
    """Whether the group ended in a later step than the one of ``version``, or at a moment that nobody noted."""
    unnoted = found.last_reason == OVER_SAMPLED and not found.samples
    return found.state != "pending" and (found.newest > version or unnoted)


def stands(found: Recalled, version: int, *, ranked: bool) -> bool:
    """Whether a group is as it was at once, or runs (again); ``ranked``: the order in which groups end matters."""
    return found.state != "pending" and not (ranked and later(found, version))


def stored_group(prompt: Prompt, found: Recalled) -> Group:
    """The finished group as the ledger has it."""
    rollouts: dict[int, list[int]] = {}
    for place, sample in enumerate(found.samples):
        assert sample.rollout_id is not None, f"{sample.id} was stored without a rollout"
        rollouts.setdefault(sample.rollout_id, []).append(place)
    return Group(prompt=prompt, samples=found.samples, rollouts=rollouts)


class Marks:
    """Where the data source stood before each time it was asked, back to the oldest group that is still open."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, dict[str, Any]]] = deque()

    def add(self, state: dict[str, Any]) -> None:
        """The source's state before it is asked."""
        self._marks.append((int(state["position"]), state))

    def before(self, position: int) -> dict[str, Any] | None:
        """The last state at or before a position; earlier ones are forgotten."""
        while len(self._marks) > 1 and self._marks[1][0] <= position:
            self._marks.popleft()
        return self._marks[0][1] if self._marks else None
