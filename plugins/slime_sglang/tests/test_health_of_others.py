"""The watch over a server that somebody else runs."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from server_case import LONG, QUICK, WatchedEngine, until

from slime_sglang import held_ports as ports
from slime_sglang.health import Watch
from slime_sglang.server import Server

pytestmark = pytest.mark.integration


def sglang_of(state):
    async def answer(request):
        if request.path == "/model_info":
            return web.json_response({"model_path": "theirs"})
        if request.path == "/v1/loads":
            return web.json_response({"loads": [{"num_used_tokens": state["used"]}]})
        return web.Response()

    return answer


@asynccontextmanager
async def external(port, state):
    app = web.Application()
    app.router.add_get("/{path:.*}", sglang_of(state))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    try:
        yield
    finally:
        await runner.cleanup()


def test_an_external_server_that_goes_away_is_fenced_and_let_in_when_it_is_back():
    """Nobody of ours restarts it; at the same address it is another generation."""

    async def check():
        with ports.hold() as held:
            server = Server.attach(f"http://127.0.0.1:{held.port}")
            engine = WatchedEngine(servers={0: server})
            async with external(held.port, {"used": 0}):
                await server.ready(LONG)
                watch = Watch([server], engine, QUICK)
                await watch.__aenter__()
                await asyncio.sleep(0)
                assert watch.states == {0: "healthy"}
            async with asyncio.timeout(LONG):
                await until(lambda: engine.fenced)
                assert engine.fenced[0][1].code == "ENG69"
                await until(lambda: watch.states == {0: "starting"})
                async with external(held.port, {"used": 0}):
                    await watch.settled()
                    assert watch.states == {0: "healthy"}
                    assert [address.generation for _, address in engine.filled] == [2]
                    await watch.__aexit__()

    asyncio.run(check())
