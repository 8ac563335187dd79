"""Limit the requests that a server has at once; the others wait in order."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """A request in flight: its state beside its content."""

    id: str  # the request's
    scores: bool = False  # it generates nothing and is never aborted
    rid: str = ""  # of the attempt that the server has; empty between attempts
    aborted: bool = False  # an abort was requested
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set with ``aborted``, and when the client closes
    permit: asyncio.Future[bool] | None = None  # while it waits for one
    media: dict[str, Any] = field(default_factory=dict)  # fields of its body, for pictures

    def end(self) -> None:
        """Stop waiting."""
        self.stop.set()
        if self.permit is not None and not self.permit.done():
            self.permit.set_result(False)


class ConcurrencyLimit:
    """``count`` permits, granted in the order of the requests.

    Example:
        if await limit.acquire(entry):
            try: ...
            finally: limit.release()
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._queue: deque[asyncio.Future[bool]] = deque()

    async def acquire(self, entry: InFlightRequest) -> bool:
        """Wait for a permit; False if the request was ended before it had one."""
        if entry.stop.is_set():
            return False
        if self._free:
            self._free -= 1
            return True
        permit: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        entry.permit = permit
        self._queue.append(permit)
        try:
            return await permit
        except asyncio.CancelledError:
            if permit.done() and not permit.cancelled() and permit.result():
                self.release()
            raise
        finally:
            entry.permit = None

    def release(self) -> None:
        """Return a permit."""
        while self._queue:
            permit = self._queue.popleft()
            if not permit.done():
                permit.set_result(True)
                return
        self._free += 1
