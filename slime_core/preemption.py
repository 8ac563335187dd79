"""Preemption: a signal or a clock asks the run to stop, and whatever the loop waits for is interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from slime_core.evaluate import Evaluations

T = TypeVar("T")


class StopRequested(Exception):
    """The run was asked to stop before the awaited work was done."""


class StopSignal:
    """A flag that asks a run to stop in order; once set it stays set.

    `request` may be called from a signal handler of the event loop.

    Example:
        stop = StopSignal()
        groups = await stop.or_stop(collector.take(32), evaluations)
    """

    def __init__(self) -> None:
        self.reason = ""  # empty until a stop is requested
        self.checkpoint_seconds = 0.0  # the longest checkpoint so far: `--stop-after` requests that much earlier
        self._requested = asyncio.Event()

    def request(self, reason: str) -> None:
        """Stop the run at the next point where its state is whole; the first reason is kept."""
        self.reason = self.reason or reason
        self._requested.set()

    async def or_stop(
        self, work: Coroutine[Any, Any, T], evaluations: Evaluations, *, interruptible: bool = True
    ) -> T:
        """Await ``work``; one that is ``interruptible`` is cancelled when a stop is requested.

        Raises:
            StopRequested: the request came first, and ``work`` did not end all the same.
            SlimeError: an evaluation beside training failed meanwhile.
        """
        if interruptible and self.reason:
            work.close()
            raise StopRequested
        task, request = asyncio.ensure_future(work), asyncio.ensure_future(self._requested.wait())
        ends: list[asyncio.Future[Any]] = [task, request] if interruptible else [task]
        try:
            while not any(end.done() for end in ends):
                beside = [] if evaluations.task is None else [evaluations.task]
                await asyncio.wait([*ends, *beside], return_when=asyncio.FIRST_COMPLETED)
                evaluations.raise_failed()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])  # groups that it has handed over by now must not be lost
            if task.cancelled():
                raise StopRequested
            return task.result()
        finally:
            task.cancel()
            request.cancel()
            await asyncio.gather(task, request, return_exceptions=True)
