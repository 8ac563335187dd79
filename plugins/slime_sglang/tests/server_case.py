"""What tests of servers, of their processes and of the watch over them wait for and look at."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from slime_core.errors import EngineError
from slime_sglang.server_health import WatchLimits

LONG = 120.0  # seconds in which a busy machine starts a stand-in
QUICK = WatchLimits(interval=0.05, timeout=3600.0, start_timeout=LONG, max_restarts=3)


def seen(path):
    """A file's text; nothing where it cannot be read."""
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def temporary(pid):
    """The temporary folder of a process of a server; empty where it is the launcher, whose own is another."""
    words = [word for word in seen(f"/proc/{pid}/environ").split("\0") if word.startswith("TMPDIR=")]
    return next((word[len("TMPDIR=") :] for word in words if "slime-server-" in word), "")


async def until(true):
    async with asyncio.timeout(LONG):
        while not true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(server):
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace=0)


@asynccontextmanager
async def stranger(answer, port=0, tls=None):
    """Another HTTP service; ``heard`` gets every request's path and headers."""
    heard = []

    async def reply(request):
        heard.append((request.path, dict(request.headers)))
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, ssl_context=tls)
    await site.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", heard
    finally:
        await runner.cleanup()


async def failure(server, timeout=LONG):
    with pytest.raises(EngineError) as raised:
        await server.ready(timeout)
    return raised.value


@dataclass
class WatchedEngine:
    """What the watch asks of an engine: told progress, it notes what it is told."""

    in_flight: int = 0
    came: int = 0
    fenced: list = field(default_factory=list)
    filled: list = field(default_factory=list)
    end: EngineError | None = None
    refuse: dict = field(default_factory=dict)  # number -> how many bring_ups fail
    gates: dict = field(default_factory=dict)  # number -> event that its bring_up waits for
    servers: dict = field(default_factory=dict)

    def progress(self, number):
        return [(self.in_flight, self.came)]

    def fence(self, number, error):
        self.fenced.append((number, error))

    async def bring_up(self, number):
        self.filled.append((number, self.servers[number].address))
        if number in self.gates:
            await self.gates[number].wait()
        if self.refuse.get(number, 0) > 0:
            self.refuse[number] -= 1
            raise EngineError("a tensor differs", code="ENG83")

    def lost(self, error):
        assert self.end is None
        self.end = error
