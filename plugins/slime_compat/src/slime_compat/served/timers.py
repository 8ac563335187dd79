"""`slime.observability.timer`: seconds by name, of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from slime_compat.served.loading import SingletonMeta


class Timer(metaclass=SingletonMeta):
    """One a process; ``timers`` has the seconds of each name, added up until :meth:`reset`."""

    def __init__(self) -> None:
        self.timers: dict[str, float] = {}
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
        self.timers[name] = self.timers.get(name, 0) + elapsed_time

    def reset(self, name: str | None = None) -> None:
        """Forget a name's seconds, or all."""
        if name is None:
            self.timers = {}
        else:
            self.timers.pop(name, None)

    def log_dict(self) -> dict[str, float]:
        """Seconds by name."""
        return self.timers

    @contextmanager
    def context(self, name: str) -> Iterator[None]:
        """Measure a block."""
        self.start(name)
        try:
            yield
        finally:
            self.end(name)


def timer(name_or_func: str | Callable[..., Any]) -> AbstractContextManager[None] | Callable[..., Any]:
    """Measure a block, ``with timer("name")``, or each call of a function, ``@timer``."""
    if isinstance(name_or_func, str):
        return Timer().context(name_or_func)
    fn = name_or_func

    @wraps(fn)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with Timer().context(fn.__name__):
            return fn(*args, **kwargs)

    return measured


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """A block that is left out of a running measurement."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)


def with_defer(deferred_func: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that calls ``deferred_func`` after each call, however it ends."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fn)
        def deferring(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            finally:
                deferred_func()

        return deferring

    return decorate


__all__ = ["Timer", "inverse_timer", "timer", "with_defer"]
