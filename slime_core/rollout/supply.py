"""What a collector draws from, and what it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from slime_core.protocols import Drops, Recalled
    from slime_core.types import Group, Prompt


class Source(Protocol):
    """Where prompts come from, in the run's order."""

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer only where the source has ended for good."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it stands, JSON-ready; ``position`` is the next prompt's."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        ...


class Supply(AbstractAsyncContextManager["Supply"], Protocol):
    """Where a step's groups come from: a collector, or a dump in its place."""

    async def take(self, count: int, forced: Sequence[int] = ()) -> list[Group]:
        """The next step's groups; waits for them."""
        ...

    async def drain(self) -> bool:
        """Wait until nothing is in flight under the old weights."""
        ...

    def admit(self, version: int) -> None:
        """Say that the taken groups are trained and ``version`` is being served."""
        ...

    def pop_counts(self) -> Counts:
        """The counts since the last call."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        ...


@dataclass(slots=True)
class Counts:
    """What happened since the last :meth:`Collector.take`."""

    issued: int = 0  # groups
    drops: Counter[str] = field(default_factory=Counter)  # samples by reason
    tokens: int = 0  # response tokens of kept and dropped groups
    metrics: dict[str, float] = field(default_factory=dict)  # of the groups that were taken

    def add(self, drops: Drops, past: Recalled | None = None) -> None:
        """Count drops, or those that an earlier process recorded."""
        if past is not None and past.state != "pending":
            self.drops.update(past.drops)
            return
        for samples, drop in drops:
            self.drops[drop.reason] += len(samples)
