"""Resume: groups that an earlier process issued, and the state of the source before the oldest open one."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.protocols import GroupRecord
from slime_core.rollout.groups import OpenGroup, Source, pending_group
from slime_core.rollout.over_sampling import OVER_SAMPLED
from slime_core.types import Group, Prompt

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Ledger


class ResumableSource:
    """A source of groups, each with what checkpoint and ledger say of it; in a fresh run every group is new.

        trained, or dropped before the checkpoint   left out
        finished, dropped                           reused as it was stored (`can_reuse`)
        pending                                     generated again, as the same attempt
        unknown                                     new

    ``saved`` is the checkpoint's :meth:`state`, None at the start of a stage; ``resumed``: the ledger may have groups.
    """

    def __init__(self, prompts: Source, ledger: Ledger, saved: Mapping[str, Any] | None, *, resumed: bool) -> None:
        self._prompts, self._ledger = prompts, ledger
        self._ask_ledger = resumed or saved is not None
        self._saved_open: set[int] = set(saved["open"]) if saved else set()  # at the checkpoint, of those issued
        self.first_new = int(saved["issued"]) if saved else 0  # positions below it were issued before the checkpoint
        self._issued = self._next = self.first_new  # positions below it have started, have been asked for
        self._checkpoints: deque[dict[str, Any]] = deque()  # states of ``prompts``, from before the oldest open group
        self.ended = False
        if saved is not None:
            prompts.restore(saved["source"])

    async def next(self, count: int, config: Config) -> list[OpenGroup]:
        """The open groups of the next ``count`` prompts; of fewer where the data ends."""
        self._checkpoints.append(self._prompts.state())
        await self._prompts.prepare(count)
        prompts = self._prompts.next(count)
        self.ended = len(prompts) < count
        self._next = max([self._next, *(prompt.position + 1 for prompt in prompts)])
        prompts = [p for p in prompts if p.position >= self.first_new or p.position in self._saved_open]
        stored: Mapping[str, GroupRecord] = {}
        if self._ask_ledger and prompts:
            stored = await self._ledger.groups([prompt.id for prompt in prompts])
            self._ask_ledger = bool(stored) or prompts[-1].position < self.first_new
        records = [(prompt, stored.get(prompt.id, GroupRecord())) for prompt in prompts]
        untrained = [(prompt, record) for prompt, record in records if not record.version]
        return [OpenGroup(pending_group(p, config, attempt=r.attempt), record=r) for p, r in untrained]

    def started(self) -> None:
        """The groups of :meth:`next` are in flight."""
        self._issued = self._next

    def state(self, positions: Sequence[int]) -> dict[str, Any]:
        """JSON-ready, while the groups at these positions are open."""
        oldest = min(positions, default=self._issued)
        while len(self._checkpoints) > 1 and self._checkpoints[1]["position"] <= oldest:
            self._checkpoints.popleft()
        source = self._checkpoints[0] if self._checkpoints else self._prompts.state()
        return {"source": source, "issued": self._issued, "open": sorted(positions)}


def can_reuse(record: GroupRecord, version: int, *, ranks_ends: bool) -> bool:
    """Whether a group ends at once as the ledger has it, and is not generated (again).

    In over-sampling in lockstep (``ranks_ends``) a group that ended in a later step than that of ``version``, or at a
    tick that was not recorded, is generated again by the weights of that time; what is stored is not replaced.
    """
    unrecorded = record.last_reason == OVER_SAMPLED and not record.samples
    return record.ended and not (ranks_ends and (record.newest > version or unrecorded))


def stored_group(prompt: Prompt, record: GroupRecord) -> Group:
    """The finished group as the ledger has it."""
    rollouts: dict[int, list[int]] = {}
    for place, sample in enumerate(record.samples):
        assert sample.rollout_id is not None, f"{sample.id} was stored without a rollout"
        rollouts.setdefault(sample.rollout_id, []).append(place)
    return Group(prompt=prompt, samples=record.samples, rollouts=rollouts)
