"""How long a hook may take: measured in slices, so that time in which the whole process stood still does not count.

A process that is stopped (SIGSTOP, a suspended machine, a debugger) finds every deadline long past when it goes on. A
slice that took much longer than it was to last is such a pause, and counts with its own length only.
"""

from __future__ import annotations

import asyncio
import contextvars

SLICE = 1.0  # seconds
SLACK = 1.0  # a busy loop may wake so much later


class Deadline:
    """Cancels the task that entered it when its seconds are over; others may move it, or stop its clock.

    Example:
        async with Deadline(60.0) as deadline:
            await work()             # TimeoutError after 60 s, and deadline.expired is True
    """

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self._scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._asleep = (0.0, 0.0)  # since, for

    @property
    def expired(self) -> bool:
        """Whether the seconds were over inside the block."""
        return self._scope.expired()

    async def __aenter__(self) -> Deadline:
        await self._scope.__aenter__()
        self._sleep()
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._stop()
        await self._scope.__aexit__(*raised)  # type: ignore[arg-type]

    def when(self) -> float | None:
        """The loop's time at which the seconds are over; None while the clock stands."""
        if self._timer is None:
            return None
        return self._loop.time() + self.left - spent(self._loop.time() - self._asleep[0], self._asleep[1])

    def reschedule(self, when: float | None) -> None:
        """Move the end to ``when`` on the loop's clock; None stops the clock."""
        if self._scope.expired():
            raise RuntimeError("the deadline has passed")
        self._stop()
        if when is not None:
            self.left = when - self._loop.time()
            self._sleep()

    def _sleep(self) -> None:
        if self.left <= 0:
            self._scope.reschedule(self._loop.time())
            return
        self._asleep = self._loop.time(), min(self.left, SLICE)
        self._timer = self._loop.call_later(self._asleep[1], self._wake)

    def _wake(self) -> None:
        since, planned = self._asleep
        self.left -= spent(self._loop.time() - since, planned)
        self._timer = None
        self._sleep()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def wait_for_future(future: asyncio.Future[object], seconds: float | None) -> None:
    """Return when the future is done or its seconds are over; the future goes on."""
    if seconds is None:
        await asyncio.wait({future})
        return
    loop = asyncio.get_running_loop()
    while not future.done() and seconds > 0:
        planned, since = min(seconds, SLICE), loop.time()
        await asyncio.wait({future}, timeout=planned)
        seconds -= spent(loop.time() - since, planned)


def spent(took: float, planned: float) -> float:
    """Seconds of a slice that count: all of them, unless it took far longer than planned."""
    return took if took <= planned + SLACK else planned


DEADLINE: contextvars.ContextVar[Deadline] = contextvars.ContextVar("slime_hook_deadline")
"""Inside an async hook: its deadline, which whoever makes the hook wait may move."""
