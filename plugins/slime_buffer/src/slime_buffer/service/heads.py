"""uvicorn's HTTP/1.1 with the deadline for request heads that it lacks: half a head would hold a connection."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 20.0


def timely(seconds: float = SECONDS) -> type[H11Protocol]:
    """The protocol for `uvicorn.Config(http=...)`; a head that is not whole after ``seconds`` ends its connection."""

    class Timely(H11Protocol):
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._forget()
            elif self._late is None:
                self._late = self.loop.call_later(seconds, self.transport.close)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Timely
