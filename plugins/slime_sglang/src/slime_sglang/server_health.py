"""Health of a server, judged by a series of checks, and its restarts: no I/O, and no clock but that of the checks.

checks -> ServerHealth -> a fault, or none    faults -> RestartPolicy -> starting, healthy, fenced, retired
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from slime_sglang.http import ServerFault, fault

State = Literal["starting", "healthy", "fenced", "retired"]

SHORTEST_ASK = 1.0
"""Seconds for the answer to one look, at least; otherwise it has one interval."""
REFUSALS = 3
"""Looks in a row without a connection or a token, until a server whose process lives counts as failed."""
LONGEST_PAUSE = 60.0
"""Seconds before a restart; the first waits one interval, each further one twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Seconds and counts of the [rollout] section that the watch goes by."""

    interval: float = 5.0  # rollout_health_check_interval
    timeout: float = 120.0  # rollout_health_check_timeout
    start_timeout: float = 900.0  # rollout_start_timeout
    max_restarts: int = 3  # rollout_max_restarts
    min_healthy: int = 1  # min_healthy_engines
    counts_requests: bool = False  # a server says how many requests it has; who sends them does not know

    @property
    def ask(self) -> float:
        """Seconds for the answer to one look."""
        return max(self.interval, SHORTEST_ASK)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """What one look at a living server found."""

    at: float  # seconds, monotonic
    ranks: tuple[tuple[int, int], ...] = ((0, 0),)  # requests of ours, and what came: see `health.WatchedEngine`
    cached_tokens: tuple[int, ...] = ()  # tokens in its cache, by data-parallel rank; empty where it did not say
    refused: bool = False  # there was no connection
    expected: bool = True  # progress is; not while it is paused


class ServerHealth:
    """Judges one generation of a server.

    Data-parallel ranks are judged one by one: one that goes on hides no other that hangs. A gap between looks that is
    longer than a look can take was our own (this process was suspended, or busy), and counts as one interval.

    Example:
        health = ServerHealth(WatchLimits())
        failed = health.judge(ServerStatus(at=time.monotonic(), ranks=((3, 17),), cached_tokens=(512,)))
    """

    def __init__(self, limits: WatchLimits) -> None:
        self._limits = limits
        self._last: ServerStatus | None = None
        self._still: list[float] = []  # by rank: seconds without progress, with requests in flight
        self._refusals = 0

    def judge(self, look: ServerStatus) -> ServerFault | None:
        """Why the server has failed, or None."""
        last = self._last
        if last is None or len(last.ranks) != len(look.ranks):
            last, self._still = None, [0.0] * len(look.ranks)
        # what it did not say now is compared at the next look with what it said before
        self._last = look if look.cached_tokens or last is None else replace(look, cached_tokens=last.cached_tokens)
        going = last is not None and any(now[1] != then[1] for now, then in zip(look.ranks, last.ranks, strict=True))
        self._refusals = self._refusals + 1 if look.refused and not going else 0
        if self._refusals >= REFUSALS:
            return fault(f"refused {REFUSALS} connections in a row", "ENG69", "")
        for rank, (in_flight, _) in enumerate(look.ranks):
            waits = look.expected and in_flight and last is not None and last.ranks[rank][0]
            if last is None or not waits or _moved(last, look, rank):
                self._still[rank] = 0.0
            else:
                self._still[rank] += self._gap(last, look)
            if self._still[rank] >= self._limits.timeout:
                which = f" at data-parallel rank {rank}" if len(look.ranks) > 1 else ""
                return fault(
                    f"made no token for {self._still[rank]:.0f} s with {in_flight} requests in flight{which}",
                    "ENG85",
                    "",
                    running=True,
                )
        return None

    def _gap(self, last: ServerStatus, look: ServerStatus) -> float:
        gap = look.at - last.at
        return gap if gap <= self._limits.interval + self._limits.ask + 1.0 else self._limits.interval


def _moved(last: ServerStatus, look: ServerStatus, rank: int) -> bool:
    if look.ranks[rank][1] != last.ranks[rank][1]:
        return True
    comparable = len(look.cached_tokens) == len(last.cached_tokens) == len(look.ranks)
    now, then = (
        (look.cached_tokens[rank : rank + 1], last.cached_tokens[rank : rank + 1])
        if comparable
        else (look.cached_tokens, last.cached_tokens)
    )
    return bool(now and then and now != then)


class RestartPolicy:
    """The states of one server and its budget of restarts; no I/O.

    Example:
        policy = RestartPolicy(max_restarts=3)
        policy.fence()
        policy.next()  # True: "starting"; False: "retired"
    """

    def __init__(self, max_restarts: int) -> None:
        self.state: State = "healthy"
        self.restarts = 0
        self._max = max_restarts

    @property
    def usable(self) -> bool:
        """Whether it serves, or may serve again."""
        return self.state != "retired"

    def fence(self) -> None:
        """It failed, and must not be chosen."""
        self.state = "fenced"

    def next(self) -> bool:
        """What follows a fence: True where it is started once more, False where it is retired."""
        if self.state == "retired" or self.restarts >= self._max:
            self.state = "retired"
            return False
        self.restarts += 1
        self.state = "starting"
        return True

    def retire(self) -> None:
        """It cannot come back."""
        self.state = "retired"

    def up(self) -> None:
        """It serves, with the right weights."""
        self.state = "healthy"

    def pause(self, interval: float) -> float:
        """Seconds to wait before the restart that is due."""
        return min(interval * 2.0 ** (self.restarts - 1), LONGEST_PAUSE)
