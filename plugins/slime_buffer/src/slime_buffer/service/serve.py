"""Run the rollout buffer of a folder: its lock, token, socket and signals. `slime buffer serve` calls this.

FOLDER/   ledger.sqlite segments/ (an ordinary ledger)   service.sqlite   token (mode 0600)   lock
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slime_buffer.service.tables import BufferLimits
from slime_service.address import CONNECTIONS, Address, bind, find_token, locked

TOKEN_ENV = "SLIME_BUFFER_TOKEN"
GRACE = 5  # seconds for requests under way when the service ends


@dataclass(slots=True, frozen=True, kw_only=True)
class BufferSettings(Address):
    """How one service runs."""

    token_env: str = TOKEN_ENV
    max_body: int = 16 << 20  # bytes
    max_tokens: int = 131072  # of a sequence
    limits: BufferLimits = field(default_factory=BufferLimits)


def serve(settings: BufferSettings, started: Callable[[str, Path | None], None]) -> None:
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


async def _serve(
    settings: BufferSettings, token: str, listening: socket.socket, started: Callable[[str], None]
) -> None:
    from slime_buffer.service.app import make_app
    from slime_buffer.service.buffer_service import BufferService
    from slime_service.serving import HttpServer

    service = BufferService(settings.folder, settings.limits)
    try:
        app = make_app(service, token=token, max_body=settings.max_body, max_tokens=settings.max_tokens)
        server = HttpServer(
            app,
            listening,
            started=started,
            closing=GRACE,
            lifespan="on",
            log_level="warning",
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=30,
        )

        def stop() -> None:
            server.should_exit = True
            service.stop_waiting()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await server.serve(sockets=[listening])
    finally:
        await service.close()
