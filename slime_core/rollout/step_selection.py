"""Step selection: which finished groups a step takes, and how many prompts may be in flight for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_core.rollout.groups import OpenGroup, OpenGroups
from slime_core.types import Group

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Engine
    from slime_core.rollout.staleness import Staleness


class StepSelection:
    """One way to choose, and the events of a group's life that it may need; by default nothing is ever stopped."""

    ranks_ends = False  # whether it chooses by the tick at which groups end, so that they run in rounds

    def __init__(self, config: Config, groups: OpenGroups, engine: Engine | None) -> None:
        self._groups = groups
        self.engine = engine  # that groups are generated with
        self._batch, self._steps_open = config.rollout.rollout_batch_size, config.rollout.max_staleness + 1

    def first(self, count: int, version: int) -> list[int] | None:
        """The positions of the ``count`` groups that the step of ``version`` takes, None where it must wait."""
        raise NotImplementedError

    def free_places(self, steps_left: int, *, new_step: bool) -> int:
        """Prompts that may start now."""
        return min(self._steps_open, steps_left) * self._batch - len(self._groups)

    def is_quiet(self) -> bool:
        """Whether nothing in flight goes on by itself."""
        return not self._groups.in_flight

    def begin_step(self) -> None:
        """Called before a step waits for its groups."""

    def next_round(self, *, data_ended: bool) -> bool:
        """Begin another round where all groups wait for it; False where there is none to begin."""
        return False

    async def end_step(self, *, last: bool) -> bool:
        """Called when a step has its groups; whether the others go on into the next one."""
        return True

    async def start(self, groups: Sequence[OpenGroup], version: int) -> None:
        """Called before groups start at ``version``."""

    async def replay(self, group: OpenGroup) -> None:
        """Wait as long as a group that is reused took in the step that its version trains."""

    def ended(self, group: OpenGroup, generated: Group | None) -> None:
        """Called when a group is generated, and when it is dropped (None)."""


class InOrder(StepSelection):
    """Groups in prompt order, so that a run is a function of its seed (``async_schedule = lockstep``)."""

    def first(self, count: int, version: int) -> list[int] | None:
        """See `StepSelection`: no earlier prompt is in flight."""
        positions, oldest = sorted(self._groups.finished)[:count], min(self._groups.in_flight, default=None)
        return None if len(positions) < count or (oldest is not None and oldest < positions[-1]) else positions


class AsFinished(StepSelection):
    """The stalest finished groups, if the others stay within ``max_staleness`` (``async_schedule = free``)."""

    def __init__(self, config: Config, groups: OpenGroups, engine: Engine | None, staleness: Staleness) -> None:
        super().__init__(config, groups, engine)
        self._staleness = staleness

    def first(self, count: int, version: int) -> list[int] | None:
        """See `StepSelection` and `staleness.Bound.ready`."""
        return self._staleness.ready(version)
