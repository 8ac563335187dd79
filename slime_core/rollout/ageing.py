"""A collector's groups as they grow older: which a step takes, which are given up, and what is told of it.

`staleness.Bound` decides; here is what it is asked with, and what is counted and timed on the way.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from slime_core.report.staleness import stale_metrics, staleness_metrics
from slime_core.rollout.staleness import Bound, began, mask_stale, newest
from slime_core.types import Group, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.rollout.surplus import Flight
    from slime_core.types import Completion


class Ageing:
    """One stage's groups, by position. ``restarts`` says what becomes of those that are too old.

    Example:
        age = Ageing(config)
        age.kept(7, group, version=3)                       # it is finished
        positions = age.ready({7: group}, flying, 4)        # None: wait
        age.took([group], 4)
        metrics = age.pop_metrics()
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        self.bound = Bound.of(config)
        self.restarts = rollout.stale_policy == "restart"
        self._ahead = rollout.max_staleness > 0
        self._free = self._ahead and rollout.async_schedule == "free"
        self._began: dict[int, int] = {}  # finished groups: position -> the version that began them
        self._newest: dict[int, int] = {}  # and the last that made a token
        self._given_up: dict[str, list[int]] = defaultdict(list)  # kind -> response lengths
        self._trained: list[int] = []  # response lengths
        self._metrics: dict[str, float] = {}
        self._idle_since: float | None = None
        self._idle = self._waited = 0.0

    def kept(self, position: int, group: Group, version: int) -> None:
        """A group is finished; ``version`` stands where no model made a token."""
        self._began[position], self._newest[position] = began(group, version), newest(group, version)

    def ready(self, kept: Iterable[int], flying: Mapping[int, Flight], version: int) -> list[int] | None:
        """The positions of a free step's groups, None where it must wait."""
        finished = {position: self._began[position] for position in kept}
        return self.bound.ready(finished, {p: flight.version for p, flight in flying.items()}, version)

    def overdue(self, kept: Iterable[int], flying: Mapping[int, Flight], version: int) -> list[int]:
        """Positions of what can no longer train at ``version`` or later; those that are being given up left out."""
        if not self._free:
            return []
        if self.bound.policy == "mask":
            return self.bound.overdue({position: self._newest[position] for position in kept}, version)
        ages = {position: self._began[position] for position in kept}
        ages |= {position: flight.version for position, flight in flying.items() if not flight.stale}
        return self.bound.overdue(ages, version)

    def give_up(self, flight: Flight, parts: Sequence[Completion]) -> None:
        """Count a group that is begun again or dropped; ``parts`` is what its aborted requests had."""
        made = {part.id: len(part.tokens) for part in parts}
        kind = "restarted" if self.restarts else "dropped"
        self._given_up[kind] += [sample.response_length + made.get(sample.id, 0) for sample in flight.samples]

    def took(self, groups: Sequence[Group], version: int, waited: float = 0.0) -> None:
        """A step of ``version`` took these groups after ``waited`` seconds; their tokens that are too old are masked.

        So they are when the step is made again: the outcome depends on the stored samples and the version alone.
        """
        for group in groups:
            self._began.pop(group.prompt.position, None)
            self._newest.pop(group.prompt.position, None)
        if not self._ahead:
            return
        samples = [sample for group in groups for sample in group.samples]
        if self.bound.policy == "mask":
            self._given_up["masked"] += _lengths(mask_stale(samples, self.bound.oldest(version)))
        self._trained += _lengths(samples)
        self._metrics |= staleness_metrics(groups, version, self.bound.most)
        self._waited += waited

    def watch(self, flying: Iterable[Flight]) -> None:
        """Whether the engine has work: anything in flight that is not finished."""
        now = time.monotonic()
        if self._idle_since is not None:
            self._idle += now - self._idle_since
        self._idle_since = None if any(not flight.generated for flight in flying) else now

    def pop_metrics(self, flying: Iterable[Flight]) -> dict[str, float]:
        """The figures since the last call; nothing in a run that is never ahead."""
        if not self._ahead:
            return {}
        self.watch(flying)
        metrics = self._metrics | stale_metrics(self._given_up, self._trained)
        metrics |= {"async/engine_idle_seconds": self._idle, "async/trainer_wait_seconds": self._waited}
        self._metrics, self._given_up, self._trained = {}, defaultdict(list), []
        self._idle = self._waited = 0.0
        return metrics


def _lengths(samples: Iterable[Sample]) -> list[int]:
    return [sample.response_length for sample in samples]
