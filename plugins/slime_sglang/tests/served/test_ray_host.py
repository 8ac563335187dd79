"""SGLang's server that a host of a Ray cluster starts; runs with it are in `test_runs.py`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from raw_server import START_TIMEOUT, Loop, RawServer, shared, temporary
from ray_nodes import ray_cluster
from served_engine import assert_holds, begin, computing, keep_contract, load, request, serving, whole

pytest.importorskip("ray", reason="not proven: Ray is not installed")

from slime_core.config.load import load_config
from slime_core.testing.contracts import ENGINE_CHECKS, EngineCheck
from slime_ray.joining import entered, hosts
from slime_ray.placement import plan
from slime_ray.servers import RayPlacements
from slime_sglang import held_ports as ports
from slime_sglang.health import WatchLimits
from slime_sglang.host import Launch
from slime_sglang.server import Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

IN_FLIGHT, COUNT = 16, 600


@pytest.fixture(scope="module")
def hosted(loop: Loop, launch: Callable[..., Launch], served_model: Path) -> Iterator[RawServer]:
    """A server that a host of a Ray cluster has started; every test of this module has the same."""
    with ray_cluster(RAY_AUTH_MODE="disabled") as nodes:
        flags = ["--hf-checkpoint", ".", "--rollout-engine", "sglang", "--cluster", "ray", "--device", "cpu"]
        config = load_config(None, [*flags, "--cpu-threads", "1"])
        placed, stack = plan(config), AsyncExitStack()
        with entered(nodes.address):
            found = loop.run(stack.enter_async_context(hosts(config, placed)))
            host = RayPlacements(config, placed, found).server(0).host
            server = Server.launch(launch(), host=host)

            async def up() -> None:
                stack.push_async_callback(server.stop)
                await server.start()
                await server.ready(START_TIMEOUT)

            try:
                loop.run(up(), START_TIMEOUT + 20)
                yield RawServer(server, served_model, loop)
            finally:
                loop.run(stack.aclose(), 120)


@pytest.mark.nightly
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_sglang_engine_on_a_ray_host(
    check: EngineCheck, hosted: RawServer, served_model: Path, tmp_path: Path
) -> None:
    try:
        hosted.loop.run(keep_contract(check, hosted.server, served_model, tmp_path), 100)
    finally:
        hosted.settle()


@pytest.mark.nightly  # a second start of the server
def test_a_server_on_a_host_that_is_killed_comes_back_with_its_weights_and_its_requests_are_answered_once(
    hosted: RawServer, other_model: Path, served_model: Path, tmp_path: Path
) -> None:
    """On another machine: who died is named, nothing is left there, the next generation has every tensor."""
    server, session = hosted.server, hosted.server.pid
    notes: list[str] = []
    folder, scheduler = temporary(session), hosted.scheduler()
    files = shared(folder)

    async def work() -> None:
        limits = WatchLimits(interval=0.5, start_timeout=START_TIMEOUT)
        async with serving(server, served_model, tmp_path, notes, limits=limits) as engine:
            sent = await load(engine, other_model, 2)
            before = server.address
            running = begin(engine, [f"r{number}" for number in range(IN_FLIGHT)], COUNT)
            await computing(hosted, IN_FLIGHT * 8)
            os.kill(scheduler, signal.SIGKILL)
            late = asyncio.create_task(engine.generate(request("late", 3)))
            done = await asyncio.gather(*running.values())
            assert [each.id for each in done] == list(running)
            for each in done:
                whole(each, COUNT)
            whole(await late, 3)
            assert server.address.generation == before.generation + 1
            await assert_holds(engine, sent)

    hosted.loop.run(work(), START_TIMEOUT + 120)
    assert any(f"scheduler_0 ({scheduler}) was killed by SIGKILL; restart 1 of 3" in note for note in notes), notes
    assert ports.members(session) == []
    assert [path for path in (folder, *files) if os.path.exists(path)] == []
