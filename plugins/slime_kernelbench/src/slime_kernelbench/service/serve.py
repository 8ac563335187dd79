"""The running service of a folder: lock, token, socket, signals. `slime kernelbench serve` starts it.

FOLDER/   token, secret (mode 0600)   lock
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from slime_kernelbench.secret import Secret
from slime_kernelbench.service.devices import Device, devices
from slime_kernelbench.service.pool import Pool, PoolLimits
from slime_kernelbench.service.process import COMMAND, JudgeWorker
from slime_service.address import Address, bind, find_token, locked

TOKEN_ENV = "SLIME_KERNELBENCH_TOKEN"
CLOSING = 5  # seconds for answers under way once everything is judged
IDLE_SECONDS = 20  # of a connection between two requests: longer than clients keep one


@dataclass(slots=True, frozen=True, kw_only=True)
class JudgeSettings(Address):
    """How one service runs.

    Example: JudgeSettings(folder=Path("judge"), workers=2)
    """

    token_env: str = TOKEN_ENV
    workers: int = 1  # where no GPU is named
    gpus: tuple[str, ...] = ()  # UUIDs, or nvidia-smi's numbers
    grace: float = 30.0  # seconds to finish what was taken, after SIGTERM
    limits: PoolLimits = field(default_factory=PoolLimits)
    options: Mapping[str, Any] = field(default_factory=dict)  # [plugin.kernelbench], for the judge
    command: tuple[str, ...] = COMMAND  # of a worker


def serve(settings: JudgeSettings, started: Callable[[str, Path | None], None]) -> None:
    """Serve until SIGTERM or SIGINT; ``started`` gets the URL and the token's file when requests are answered.

    Raises:
        ConfigError: an address, token or GPU that cannot be had.
        StorageError: the folder is another service's, or cannot be written.
    """
    with locked(settings.folder):
        token, path = find_token(settings)
        secret = Secret.load_or_create(settings.folder / "secret")
        with bind(settings) as listening:
            asyncio.run(_serve(settings, token, secret, listening, lambda url: started(url, path)))


async def _serve(
    settings: JudgeSettings, token: str, secret: Secret, listening: socket.socket, started: Callable[[str], None]
) -> None:
    from slime_kernelbench.service.app import ServiceState, make_app
    from slime_kernelbench.service.judge_service import JudgeService
    from slime_service.serving import HttpServer

    state, stop = ServiceState(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    places = devices(settings.gpus, settings.workers)
    async with Pool(places, start=partial(_start, settings, secret), limits=settings.limits) as pool:
        app = make_app(JudgeService(pool), token=token, state=state)
        server = HttpServer(
            app,
            listening,
            started=started,
            closing=CLOSING,
            lifespan="off",
            log_level="critical",  # uvicorn has a line for each request that is no HTTP
            timeout_keep_alive=IDLE_SECONDS,
        )
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await stop.wait()
            state.draining = True
            await _drain(pool, settings.grace)
        finally:
            await pool.close()
            server.should_exit = True
            await serving


async def _start(settings: JudgeSettings, secret: Secret, device: Device) -> JudgeWorker:
    return await JudgeWorker.start(device, options=settings.options, secret=secret.text, command=settings.command)


async def _drain(pool: Pool, grace: float) -> None:
    """Finish what was taken, for ``grace`` seconds; what is left then is refused."""
    with suppress(TimeoutError):
        async with asyncio.timeout(grace):
            await pool.idle()
