"""Run the rollout buffer of a folder: its lock, token, socket and signals. `slime buffer serve` calls this.

FOLDER/   ledger.sqlite segments/ (an ordinary ledger)   service.sqlite   token (mode 0600)   lock
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_buffer.service.tables import Limits
from slime_core.service import CONNECTIONS, Address, bind, find_token, locked, url_of

TOKEN_ENV = "SLIME_BUFFER_TOKEN"
HEAD_BYTES = 16 << 10  # request line and headers
GRACE = 5  # seconds for requests under way when the service ends


@dataclass(slots=True, frozen=True, kw_only=True)
class Settings(Address):
    """How one service runs."""

    token_env: str = TOKEN_ENV
    max_body: int = 16 << 20  # bytes
    max_tokens: int = 131072  # of a sequence
    limits: Limits = field(default_factory=Limits)


def serve(settings: Settings, started: Callable[[str, Path | None], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``started`` gets the URL and the token's file when requests are answered.

    Raises:
        ConfigError: as `find_token` and `bind`.
        StorageError: the folder is another service's, or damaged.
    """
    with locked(settings.folder):
        token, path = find_token(settings)
        listening = bind(settings)
        with listening:
            asyncio.run(_serve(settings, token, listening, lambda url: started(url, path)))


async def _serve(settings: Settings, token: str, listening: socket.socket, started: Callable[[str], None]) -> None:
    import uvicorn

    from slime_buffer.service.app import make_app
    from slime_buffer.service.desk import Desk
    from slime_buffer.service.heads import timely

    class Server(uvicorn.Server):
        """Ours to stop: uvicorn's own handlers would raise the signal again when it has ended."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                started(url_of(listening))

    desk = Desk(settings.folder, settings.limits)
    try:
        app = make_app(desk, token=token, max_body=settings.max_body, max_tokens=settings.max_tokens)
        config = uvicorn.Config(
            app,
            http=timely(),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=GRACE,
        )
        server = Server(config)

        def stop() -> None:
            server.should_exit = True
            desk.stop_waiting()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await server.serve(sockets=[listening])
    finally:
        await desk.close()
