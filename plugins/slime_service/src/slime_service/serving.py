"""uvicorn for one service: ours to stop, and with the deadline for request heads that it lacks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from slime_service.address import url_of

HEAD_BYTES = 16 << 10  # request line and headers
SECONDS = 20.0


def timely(seconds: float = SECONDS) -> type[H11Protocol]:
    """The protocol for `uvicorn.Config(http=...)`; a head that is not whole after ``seconds`` ends its connection.

    Half a head would hold it for ever.
    """

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


class HttpServer(uvicorn.Server):
    """Serves ``app`` on a socket until ``should_exit``; ``started`` gets its URL when requests are answered.

    uvicorn's own handlers of signals would raise them again when it has ended, so there are none. ``closing`` are
    seconds for requests under way at the end; ``more`` goes to `uvicorn.Config`.

    Example:
        server = Server(app, listening, started=print, closing=5)
        loop.add_signal_handler(signal.SIGTERM, lambda: setattr(server, "should_exit", True))
        await server.serve(sockets=[listening])
    """

    def __init__(
        self,
        app: Any,
        listening: socket.socket,
        *,
        started: Callable[[str], object],
        closing: int,
        head_seconds: float = SECONDS,
        **more: Any,
    ) -> None:
        self._listening, self._started = listening, started
        fixed = {"ws": "none", "loop": "asyncio", "access_log": False, "server_header": False, "proxy_headers": False}
        words = {**fixed, "http": timely(head_seconds), "h11_max_incomplete_event_size": HEAD_BYTES, **more}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=closing, **words))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        if self.started:
            self._started(url_of(self._listening))
