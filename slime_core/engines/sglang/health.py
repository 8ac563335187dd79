"""Whether servers make progress: one that died or hangs is fenced, restarted, filled and let in again, or retired."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from slime_core.engines.sglang.server import Server
from slime_core.errors import EngineError

State = Literal["starting", "healthy", "fenced", "retired"]


class Engine(Protocol):
    """What the watch asks of the engine whose servers it watches, by the server's number."""

    def progress(self, number: int) -> tuple[int, int]:
        """Requests in flight there, and a number that rises with every token and reply that came from there."""
        ...

    def fence(self, number: int, error: EngineError) -> None:
        """The server is given up: choose it no more, and let what waits for it fail with ``error`` (retryable)."""
        ...

    async def bring_up(self, number: int) -> None:
        """A new generation serves (``server.address``): give it weights, compare them, choose it again."""
        ...

    def lost(self, error: EngineError) -> None:
        """Too few servers are left: every call, waiting or new, fails with ``error``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds and counts of the [rollout] section that the watch goes by."""

    interval: float = 5.0  # rollout_health_check_interval
    timeout: float = 120.0  # rollout_health_check_timeout
    start_timeout: float = 900.0  # rollout_start_timeout
    max_restarts: int = 3  # rollout_max_restarts
    min_healthy: int = 1  # min_healthy_engines


class Watch:
    """Looks at every server; enter it with ``async with`` once all servers are ready and have their weights.

    Example:
        async with Watch(servers, engine, Limits(interval=5.0)) as watch:
            watch.report(1, error)  # the engine found a fault by itself
            with watch.held():  # paused: no progress is expected
                ...
    """

    def __init__(
        self,
        servers: Sequence[Server],
        engine: Engine,
        limits: Limits,
        *,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        raise NotImplementedError

    async def __aexit__(self, *_: object) -> None:
        raise NotImplementedError

    @property
    def states(self) -> dict[int, State]:
        """By the server's number."""
        raise NotImplementedError

    @property
    def error(self) -> EngineError | None:
        """Why the run cannot go on (ENG84, ENG89), once fewer servers than ``min_healthy`` are left."""
        raise NotImplementedError

    def report(self, number: int, error: EngineError) -> None:
        """The engine found this server faulty (a failed update, wrong weights, errors without end): fence and restart."""
        raise NotImplementedError

    @contextmanager
    def held(self) -> Iterator[None]:
        """No progress is expected inside this block: servers are paused, or have given back their memory."""
        raise NotImplementedError
        yield

    async def settled(self) -> None:
        """Wait until no server is starting or fenced: all are healthy or retired."""
        raise NotImplementedError
