"""`slime.observability.timer`: seconds by name, of this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from slime_compat.served.loading import SingletonMeta


class Timer(metaclass=SingletonMeta):
    """One a process; ``timers`` has the seconds of each name, added up until :meth:`reset`."""

    def __init__(self) -> None:
        self.timers: defaultdict[str, float] = defaultdict(float)
        self.start_time: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Begin to measure.

        Raises:
            RuntimeError: the name is being measured.
        """
        if name in self.start_time:
            raise RuntimeError(f"timer {name!r} has been started")
        self.start_time[name] = time.monotonic()

    def end(self, name: str) -> None:
        """Add the seconds since :meth:`start`.

        Raises:
            RuntimeError: the name is not being measured.
        """
        if name not in self.start_time:
            raise RuntimeError(f"timer {name!r} has not been started")
        self.add(name, time.monotonic() - self.start_time.pop(name))

    def add(self, name: str, elapsed_time: float) -> None:
        """Add seconds."""
        self.timers[name] += elapsed_time

    def reset(self, name: str | None = None) -> None:
        """Forget a name's seconds, or all; what :meth:`log_dict` returned before keeps them without a name."""
        if name is not None:
            self.timers.pop(name, None)
        else:
            self.timers = defaultdict(float)

    def log_dict(self) -> dict[str, float]:
        """Seconds by name."""
        return self.timers

    def context(self, name: str) -> AbstractContextManager[None]:
        """Measure a block."""
        return _around(lambda: self.start(name), lambda: self.end(name))


def timer(name_or_func: str | Callable[..., Any]) -> Any:
    """Measure a block, ``with timer("name")``, or each call of a function, ``@timer``."""
    if not isinstance(name_or_func, str):
        return timer(name_or_func.__name__)(name_or_func)
    return _around(lambda: Timer().start(name_or_func), lambda: Timer().end(name_or_func))


def inverse_timer(name: str) -> AbstractContextManager[None]:
    """A block that is left out of a running measurement."""
    return _around(lambda: Timer().end(name), lambda: Timer().start(name))


def with_defer(deferred_func: Callable[[], Any]) -> Any:
    """A decorator that calls ``deferred_func`` after each call, however it ends."""
    return _around(lambda: None, deferred_func)


@contextmanager
def _around(before: Callable[[], Any], after: Callable[[], Any]) -> Iterator[None]:
    """A block, or as a decorator each call of a function, with something before and something after it."""
    before()
    try:
        yield
    finally:
        after()


__all__ = ["Timer", "inverse_timer", "timer", "with_defer"]
