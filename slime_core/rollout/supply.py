"""What a collector draws from, and what it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from slime_core.types import Prompt


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


@dataclass(slots=True)
class Counts:
    """What happened since the last :meth:`Collector.take`."""

    issued: int = 0  # groups
    drops: Counter[str] = field(default_factory=Counter)  # samples by reason
    tokens: int = 0  # response tokens of kept and dropped groups
    metrics: dict[str, float] = field(default_factory=dict)  # of the groups that were taken
