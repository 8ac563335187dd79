"""A server that is killed, and one that hangs, with requests in flight. The last tests that have the shared server."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from raw_server import START_TIMEOUT, RawServer, shared, temporary
from served_engine import EPOCH, assert_holds, begin, computing, load, request, serving, whole

from slime_core.errors import EngineError
from slime_sglang import held_ports as ports
from slime_sglang.health import WatchLimits

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

IN_FLIGHT = 16
COUNT = 600


@pytest.mark.nightly
def test_requests_in_flight_on_a_server_that_is_killed_are_answered_once_by_the_next(
    shared_server: RawServer, other_model: Path, served_model: Path, tmp_path: Path
) -> None:
    """All of them, none twice; the new server has the weights of the old, every tensor, before it answers.

    Who died is named, and nothing of the old server is left.
    """
    server, session = shared_server, shared_server.server.pid
    notes: list[str] = []
    folder, scheduler = temporary(session), server.scheduler()
    files = shared(folder)
    assert files

    async def work() -> None:
        limits = WatchLimits(interval=0.5, start_timeout=START_TIMEOUT)
        async with serving(server.server, served_model, tmp_path, notes, limits=limits) as engine:
            await load(engine, served_model, 1)
            sent = await load(engine, other_model, 2)
            before = server.server.address
            running = begin(engine, [f"r{number}" for number in range(IN_FLIGHT)], COUNT)
            await computing(server, IN_FLIGHT * 8)
            os.kill(scheduler, signal.SIGKILL)
            late = asyncio.create_task(engine.generate(request("late", 3)))
            done = await asyncio.gather(*running.values())
            assert [each.id for each in done] == list(running)
            for each in done:
                whole(each, COUNT)
                assert set(each.versions) == {2}
            whole(await late, 3)
            after = server.server.address
            assert (after.generation, after.url != before.url) == (before.generation + 1, True)
            assert engine.fleet.watch is not None
            assert engine.fleet.watch.states == {0: "healthy"}
            assert server.ask("/model_info")["weight_version"] == f"{EPOCH}.2"
            await assert_holds(engine, sent)

    server.loop.run(work(), START_TIMEOUT + 120)
    assert any("restart 1 of 3" in note for note in notes), notes
    assert any(f"scheduler_0 ({scheduler}) was killed by SIGKILL" in note for note in notes), notes
    assert ports.members(session) == []
    assert [path for path in (folder, *files) if os.path.exists(path)] == []


def test_a_server_that_hangs_is_caught_by_its_tokens(
    shared_server: RawServer, served_model: Path, tmp_path: Path
) -> None:
    """Its processes live, its port listens, and no token comes. With no restart left the run ends, and says why."""
    server = shared_server
    notes: list[str] = []

    async def work() -> None:
        limits = WatchLimits(interval=0.5, timeout=4.0, max_restarts=0)
        async with serving(server.server, served_model, tmp_path, notes, limits=limits) as engine:
            await load(engine, served_model, 3)
            running = begin(engine, ["stuck"], 3500)
            await computing(server, 40)
            stopped = server.scheduler()
            os.kill(stopped, signal.SIGSTOP)
            with pytest.raises(EngineError) as caught:
                await running["stuck"]
            assert caught.value.code == "ENG84", caught.value
            assert "made no token" in f"{caught.value.why} {notes}"
            assert engine.fleet.watch is not None
            assert engine.fleet.watch.states == {0: "retired"}
            assert engine.fleet.watch.error is not None

    server.loop.run(work(), 100)
    assert server.processes() == {}, "a hung server is ended, stopped processes too"
