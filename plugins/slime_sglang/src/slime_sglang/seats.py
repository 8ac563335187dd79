"""Back-pressure: so many requests at a server at once; the others wait in line for a seat."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Flight:
    """One request on its way: what is known of it beside its content."""

    id: str  # the request's
    scores: bool = False  # it generates nothing: nobody ends it
    rid: str = ""  # of the try that the server has; empty while none is there
    asked: bool = False  # somebody wants it ended
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # set with ``asked``, and when the client closes
    seat: asyncio.Future[bool] | None = None  # while it waits for one

    def end(self) -> None:
        """Wait for nothing more."""
        self.stop.set()
        if self.seat is not None and not self.seat.done():
            self.seat.set_result(False)


class Seats:
    """``count`` seats, given in the order in which they were asked for.

    Example:
        if await seats.take(flight):
            try: ...
            finally: seats.give()
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._line: deque[asyncio.Future[bool]] = deque()

    async def take(self, flight: Flight) -> bool:
        """Wait for a seat; False where the flight was ended before it had one."""
        if flight.stop.is_set():
            return False
        if self._free:
            self._free -= 1
            return True
        seat: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        flight.seat = seat
        self._line.append(seat)
        try:
            return await seat
        except asyncio.CancelledError:
            if seat.done() and not seat.cancelled() and seat.result():
                self.give()
            raise
        finally:
            flight.seat = None

    def give(self) -> None:
        """Give a seat back."""
        while self._line:
            seat = self._line.popleft()
            if not seat.done():
                seat.set_result(True)
                return
        self._free += 1
