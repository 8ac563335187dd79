"""SGLang's own router before the real server: the engine keeps every promise, and nothing is lost, doubled or open."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from raw_server import START_TIMEOUT, RawServer
from served_engine import EPOCH, PROMPT, VERSION, assert_holds, begin, computing, load, request, whole

from slime_core.backends import EngineStart
from slime_core.config.load import load_config
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCase, EngineCheck
from slime_core.types import WeightUpdate
from slime_core.weights.folder import ModelFolder
from slime_sglang import held_ports as ports, start as cluster, start_gateway as gateways
from slime_sglang.engine import SglangEngine
from slime_sglang.external import features
from slime_sglang.gateway import Gateway
from slime_sglang.health import Watch
from slime_sglang.http import Transport
from slime_sglang.installation import Installation, read_installation
from slime_sglang.model_servers import ModelServers
from slime_sglang.server import Server
from slime_sglang.server_health import WatchLimits
from slime_sglang.topology import POLICY

pytestmark = pytest.mark.system

LONG = 100.0
StartServer = Callable[..., RawServer]


@dataclass(slots=True)
class Routed:
    """What runs."""

    engine: SglangEngine
    gateway: Gateway
    notes: list[str]


@asynccontextmanager
async def routed(
    servers: Sequence[Server],
    installation: Installation,
    model: Path,
    folder: Path,
    *flags: str,
    limits: WatchLimits | None = None,
) -> AsyncIterator[Routed]:
    """The engine that a run would have; it has no weights yet. The router's log is FOLDER/log/gateway.log."""
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[rollout]\nhf_checkpoint = {json.dumps(str(model))}\nrollout_engine = "sglang"\n')
    words = ["--device", "cpu", "--dtype", "float32", "--rollout-router", "sglang", *flags]
    config = load_config(recipe, words)
    notes: list[str] = []
    part = ModelServers(
        role=POLICY, model=str(model), servers=tuple(servers), features=features(VERSION), version=VERSION
    )
    made = await gateways.gateway(config, servers, installation, role=POLICY, run_dir=folder, note=notes.append)
    assert made is not None
    async with made:
        opened = ModelFolder.open(model)
        start = EngineStart(config=config, folder=opened, run_dir=folder, epoch=EPOCH, note=notes.append)
        engine = await cluster._engine(start, opened, part, -1, gateway=made)
        bounds = limits or WatchLimits(interval=0.5, counts_requests=True)
        try:
            async with Watch(servers, engine.fleet, bounds, note=notes.append) as engine.fleet.watch:
                yield Routed(engine, made, notes)
        finally:
            await engine.close()


@pytest.fixture(scope="module")
def installation(sglang_python: str) -> Installation:
    """SGLang of these tests, with its router."""
    found = read_installation(sglang_python, {})
    assert found.router, "sglang-router of constraints-sglang.txt is not installed there"
    return found


@pytest.mark.parametrize(
    "check",
    [*ENGINE_CHECKS[:2], *(pytest.param(check, marks=pytest.mark.nightly) for check in ENGINE_CHECKS[2:])],
    ids=lambda check: check.__name__,
)
def test_an_engine_behind_sglangs_router(
    check: EngineCheck, server: RawServer, installation: Installation, served_model: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        async with routed([server.server], installation, served_model, tmp_path) as run:

            def update(version: int) -> WeightUpdate:
                handle = {"folder": str(served_model)}
                return WeightUpdate(version=version, epoch=EPOCH, transport="disk", handle=handle)

            await check(EngineCase(engine=run.engine, update=update, prompt=list(PROMPT)))
            assert not [note for note in run.notes if "restart" in note], run.notes

    server.loop.run(work(), LONG)


def test_a_request_is_ended_and_weights_change_while_the_router_has_them(
    server: RawServer, installation: Installation, served_model: Path, other_model: Path, tmp_path: Path
) -> None:
    """The stamps of its tokens are those of the weights that made them, which the server was given past the router."""

    async def work() -> None:
        async with routed([server.server], installation, served_model, tmp_path) as run:
            engine = run.engine
            await load(engine, served_model, 1)
            running = begin(engine, ["ended", "goes-on"], 900)
            await computing(server, 40)
            (ended,) = await engine.abort(["ended"])
            assert ended.finish == "abort"
            whole(ended, len(ended.tokens))
            sent = await load(engine, other_model, 2)
            done = await running["goes-on"]
            whole(done, 900)
            assert set(done.versions) == {1, 2}
            await assert_holds(engine, sent)
            assert run.gateway.restarts == 0

    server.loop.run(work(), LONG)


def test_the_token_of_the_router_is_wanted_and_shows_nowhere(
    server: RawServer, installation: Installation, served_model: Path, tmp_path: Path
) -> None:
    """Neither its own nor a server's: in no list of processes, no environment and no log."""

    async def work() -> None:
        async with routed(
            [server.server], installation, served_model, tmp_path, "--sglang-router-log-level", "debug"
        ) as run:
            await load(run.engine, served_model, 1)
            whole(await run.engine.generate(request("a-0", 5)), 5)
            address, process = run.gateway.address, run.gateway.process
            for token, status in (("", 401), ("another", 401), (address.token, 200)):
                http = Transport(address.url, token=token)
                reply = await http.ask("GET", "/workers", end=time.monotonic() + 20)
                await http.close()
                assert reply.status == status
            assert process.log is not None
            shown = process.log.read_text()
            assert "DEBUG" in shown
            for pid in ports.members(process.pid):
                for name in ("cmdline", "environ"):
                    shown += Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
            assert address.token not in shown
            assert server.server.address.token not in shown
            listeners = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            assert not [one for one in listeners if one.startswith("00000000:") and int(one[9:], 16) == 29000]

    server.loop.run(work(), LONG)


@pytest.mark.nightly
def test_requests_of_a_router_that_is_killed_are_answered_once_by_the_next(
    server: RawServer, installation: Installation, served_model: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        async with routed([server.server], installation, served_model, tmp_path) as run:
            await load(run.engine, served_model, 1)
            before = run.gateway.address
            running = begin(run.engine, [f"r{number}" for number in range(8)], 600)
            await computing(server, 8 * 8)
            (child,) = [pid for pid in ports.members(run.gateway.process.pid) if pid != run.gateway.process.pid]
            os.kill(child, signal.SIGKILL)
            late = asyncio.create_task(run.engine.generate(request("late", 3)))
            done = await asyncio.gather(*running.values())
            assert [each.id for each in done] == list(running)
            for each in done:
                whole(each, 600)
            whole(await late, 3)
            assert run.gateway.restarts == 1
            assert run.gateway.address.url != before.url
            assert any("SIGKILL" in note for note in run.notes), run.notes
            assert run.engine.fleet.watch is not None
            assert run.engine.fleet.watch.states == {0: "healthy"}, "a router's end is no server's fault"

    server.loop.run(work(), LONG)


@pytest.mark.timeout(900)
@pytest.mark.nightly  # it takes more than a minute
def test_a_killed_server_leaves_the_router_and_comes_back(
    server: RawServer, start_server: StartServer, installation: Installation, served_model: Path, tmp_path: Path
) -> None:
    """Requests that it had are answered by the other; the next generation has the weights before it gets any."""
    second = start_server()
    second.server.address = replace(second.server.address, number=1)

    async def work() -> None:
        limits = WatchLimits(interval=0.5, start_timeout=START_TIMEOUT, counts_requests=True)
        both, turns = [server.server, second.server], ("--sglang-router-policy", "round_robin")
        async with routed(both, installation, served_model, tmp_path, *turns, limits=limits) as run:
            sent = await load(run.engine, served_model, 1)
            running = begin(run.engine, [f"r{number}" for number in range(12)], 600)
            await computing(second, 8)
            old = second.server.address.url
            os.kill(second.scheduler(), signal.SIGKILL)
            done = await asyncio.gather(*running.values())
            for each in done:
                whole(each, 600)
            assert run.engine.fleet.watch is not None
            await run.engine.fleet.watch.settled()
            assert run.engine.fleet.watch.states == {0: "healthy", 1: "healthy"}
            urls = {worker["url"] for worker in await run.gateway._list_workers()}
            assert urls == {server.server.address.url, second.server.address.url}
            assert old not in urls
            assert run.gateway.restarts == 0
            await assert_holds(run.engine, sent)

    try:
        server.loop.run(work(), START_TIMEOUT + 100)
    finally:
        second.stop()
