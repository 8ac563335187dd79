"""One flag that says that a run should end in order: set by a signal or a clock, looked at wherever the run waits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
END_NOW = os._exit
"""The system's own: plugin code meets another one (`plugins.guard`)."""


class Stop:
    """Asked once, it stays asked. `ask` may be called from a signal handler of the event loop.

    Example:
        stop = Stop()
        groups = await stop.unless(collector.take(32))     # None where the run was asked to stop first
    """

    def __init__(self) -> None:
        self.reason = ""  # empty while the run goes on
        self.checkpoint_seconds = 0.0  # the longest one so far: who stops in time asks that much earlier
        self._asked = asyncio.Event()

    def ask(self, reason: str) -> None:
        """End at the next point where the state is whole; the first reason stands."""
        self.reason = self.reason or reason
        self._asked.set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The answer of ``work``; None where the run was asked to stop first and cancelling ``work`` ended it."""
        if self.reason:
            work.close()
            return None
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])  # what it has by now is not lost: groups that were handed over
            return None if task.cancelled() else task.result()
        finally:
            for one in (task, asked):
                one.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)
