"""The watch over real processes: killed, stopped and hanging servers are fenced, restarted, filled, and let in."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
from server_case import LONG, QUICK, WatchedEngine, until

from slime_core.errors import EngineError
from slime_sglang import held_ports as ports
from slime_sglang.health import Watch
from slime_sglang.http import ServerFault
from slime_sglang.server_health import WatchLimits

pytestmark = pytest.mark.integration


@asynccontextmanager
async def watched(servers, limits=QUICK, engine=None, notes=None):
    engine = engine or WatchedEngine()
    engine.servers = {server.address.number: server for server in servers}
    try:
        async with asyncio.timeout(2 * LONG):
            await asyncio.gather(*(server.start() for server in servers))
            await asyncio.gather(*(server.ready(LONG) for server in servers))
            async with Watch(servers, engine, limits, note=(notes if notes is not None else []).append) as watch:
                yield watch, engine
    finally:
        await asyncio.gather(*(server.stop(grace=0) for server in servers))


def kill(server, number=signal.SIGKILL):
    """A signal to the server's own process, which is not the launcher's."""
    for pid in ports.members(server.pid):
        with open(f"/proc/{pid}/cmdline") as file:
            if file.read().endswith("serve\0"):
                os.kill(pid, number)


def test_a_killed_server_is_fenced_restarted_filled_and_healthy_again(stand_in):
    """Once each, with the log's end; what comes back has another generation and another address."""
    notes = []

    async def check():
        server = stand_in(number=3)
        async with watched([server], notes=notes) as (watch, engine):
            assert watch.states == {3: "healthy"}
            first = server.address
            kill(server)
            await until(lambda: engine.fenced)
            await watch.settled()
            ((number, error),) = engine.fenced
            assert (number, error.code) == (3, "ENG84")
            assert isinstance(error, ServerFault)
            assert "was killed by SIGKILL" in error.what
            assert "serving on" in error.why
            assert error.where == str(server.log)
            ((number, address),) = engine.filled
            assert address == server.address
            assert address.generation == first.generation + 1
            assert address.url != first.url
            assert watch.states == {3: "healthy"}
            assert watch.restarts == {3: 1}
            assert engine.end is None
            kill(server)  # and again: the new generation is watched as the first was
            await until(lambda: len(engine.fenced) == 2)
            await watch.settled()
            assert server.address.generation == first.generation + 2

    asyncio.run(check())
    assert "restart 1 of 3" in notes[0]
    assert "serves again (generation 2)" in notes[1]


def test_a_server_that_breaks_a_connection_and_dies_is_said_to_have_died(stand_in):
    """The engine may tell of the connection before the process is gone; what is wrong is the process."""
    notes = []

    async def check():
        server = stand_in()
        async with watched([server], notes=notes) as (watch, engine):
            watch.report(0, EngineError("the connection broke", code="ENG77"))
            assert [error.code for _, error in engine.fenced] == ["ENG77"]
            kill(server)
            await watch.settled()
            assert watch.restarts == {0: 1}

    asyncio.run(check())
    assert "was killed by SIGKILL; restart 1 of 3" in notes[0]


def test_a_server_that_answers_health_while_requests_stand_still_is_restarted(stand_in):
    """/health and /v1/loads answer at once; no token comes."""

    async def check():
        server = stand_in("stalls")
        limits = WatchLimits(interval=0.05, timeout=0.3, start_timeout=LONG)
        async with watched([server], limits) as (watch, engine):
            engine.in_flight = 2
            first = server.pid
            await until(lambda: engine.fenced)
            engine.in_flight = 0  # they failed
            await watch.settled()
            assert engine.fenced[0][1].code == "ENG85"
            assert "with 2 requests in flight" in engine.fenced[0][1].what
            assert ports.members(first) == []
            assert watch.states == {0: "healthy"}
            assert len(engine.filled) == 1

    asyncio.run(check())


def test_a_stopped_process_is_a_hung_server(stand_in):
    """SIGSTOP of the server; connections are taken by the kernel and nothing answers."""

    async def check():
        server = stand_in()
        limits = WatchLimits(interval=0.05, timeout=0.3, start_timeout=LONG)
        async with watched([server], limits) as (watch, engine):
            kill(server, signal.SIGSTOP)
            first, engine.in_flight = server.pid, 1
            await until(lambda: engine.fenced)
            engine.in_flight = 0
            await watch.settled()
            assert engine.fenced[0][1].code == "ENG85"
            assert ports.members(first) == []
            assert watch.states == {0: "healthy"}

    asyncio.run(check())


def test_a_server_whose_cache_grows_is_not_hung_though_no_answer_came_yet(stand_in):
    """A long answer that is not streamed: only /v1/loads tells that it is being made."""

    async def check():
        limits = WatchLimits(interval=0.02, timeout=0.2, start_timeout=LONG)
        async with watched([stand_in()], limits) as (_, engine):
            engine.in_flight = 1
            await asyncio.sleep(1.0)  # five times the limit
            assert engine.fenced == []

    asyncio.run(check())


def test_no_progress_is_expected_while_servers_are_held(stand_in):
    async def check():
        limits = WatchLimits(interval=0.02, timeout=0.2, start_timeout=LONG)
        async with watched([stand_in("stalls")], limits) as (watch, engine):
            with watch.pause():
                engine.in_flight = 1
                await asyncio.sleep(1.0)  # five times the limit
                assert engine.fenced == []
            await until(lambda: engine.fenced)
            engine.in_flight = 0

    asyncio.run(check())


def test_a_server_that_the_engine_reports_is_fenced_at_once_and_restarted(stand_in):
    """The update failed there; the others serve on."""

    async def check():
        servers = [stand_in(number=n) for n in range(2)]
        async with watched(servers) as (watch, engine):
            await asyncio.sleep(0)  # the watch looks
            watch.report(1, EngineError("the update failed", code="ENG86", why="shape"))
            assert watch.states == {0: "healthy", 1: "fenced"}
            ((number, error),) = engine.fenced
            assert (number, error.what, error.code, error.why) == (1, "the update failed", "ENG86", "shape")
            watch.report(1, EngineError("once more", code="ENG86"))  # known already
            await watch.settled()
            assert len(engine.fenced) == 1
            assert [address.generation for _, address in engine.filled] == [2]
            assert servers[0].address.generation == 1
            assert watch.states == {0: "healthy", 1: "healthy"}

    asyncio.run(check())


def test_a_server_that_comes_back_with_wrong_weights_is_restarted_once_more(stand_in):
    """It is not let in before the engine says so; each try costs budget."""
    notes = []

    async def check():
        server = stand_in()
        engine = WatchedEngine(refuse={0: 2})
        async with watched([server], engine=engine, notes=notes) as (watch, _):
            kill(server)
            await until(lambda: engine.fenced)
            await watch.settled()
            assert watch.states == {0: "healthy"}
            assert watch.restarts == {0: 3}
            assert [address.generation for _, address in engine.filled] == [2, 3, 4]
            assert len(engine.fenced) == 1  # it had not been let in again

    asyncio.run(check())
    assert sum("did not come back: a tensor differs" in note for note in notes) == 2


def test_a_crash_loop_ends_retired_and_the_run_ends_with_the_log(stand_in, tmp_path):
    async def check():
        server = stand_in("ends@second")
        engine = WatchedEngine()
        limits = WatchLimits(interval=0.05, timeout=3600.0, start_timeout=LONG, max_restarts=2)
        async with watched([server], limits, engine) as (watch, _):
            (tmp_path / "log" / "crash").touch()
            kill(server)
            await until(lambda: engine.end is not None)
            assert watch.states == {0: "retired"}
            assert watch.restarts == {0: 2}
            assert watch.error is engine.end
            assert engine.end.code == "ENG89"
            assert not isinstance(engine.end, ServerFault)  # nothing is asked again
            assert "0 of 1" in engine.end.what
            assert "min_healthy_engines is 1" in engine.end.what
            assert "no such model, says SGLang" in engine.end.why
            assert engine.filled == []
            await watch.settled()
            assert server.pid == 0

    asyncio.run(check())


def test_a_retired_server_does_not_end_a_run_that_has_enough_others(stand_in):
    """The floor is min_healthy_engines."""

    async def check():
        servers = [stand_in(number=n) for n in range(2)]
        limits = WatchLimits(interval=0.05, timeout=3600.0, start_timeout=LONG, max_restarts=0)
        async with watched(servers, limits) as (watch, engine):
            kill(servers[0])
            await until(lambda: watch.states[0] == "retired")
            assert watch.states == {0: "retired", 1: "healthy"}
            assert engine.end is None
            kill(servers[1])
            await until(lambda: engine.end is not None)
            assert engine.end.code == "ENG84"  # nothing was restarted, so no loop
            assert "0 of 2" in engine.end.what

    asyncio.run(check())


def test_a_hung_server_that_is_retired_is_killed_all_the_same(stand_in):
    """It would hold its memory, and answer late."""

    async def check():
        limits = WatchLimits(interval=0.05, timeout=0.3, start_timeout=LONG, max_restarts=0)
        server = stand_in("stalls")
        async with watched([server], limits) as (watch, engine):
            first, engine.in_flight = server.pid, 1
            await until(lambda: engine.end is not None)
            assert watch.states == {0: "retired"}
            assert ports.members(first) == []
            assert engine.end.code == "ENG84"
            assert "no token" in engine.end.why

    asyncio.run(check())


def test_two_servers_that_die_together_come_back_side_by_side(stand_in):
    """One that waits for its weights holds up nobody."""

    async def check():
        servers = [stand_in(number=n) for n in range(2)]
        engine = WatchedEngine(gates={0: asyncio.Event()})
        async with watched(servers, engine=engine) as (watch, _):
            for server in servers:
                kill(server)
            await until(lambda: watch.states == {0: "starting", 1: "healthy"} and len(engine.filled) == 2)
            engine.gates[0].set()
            await watch.settled()
            assert watch.states == {0: "healthy", 1: "healthy"}

    asyncio.run(check())


def test_a_server_that_dies_while_it_is_filled_is_started_again(stand_in):
    """In the middle of its return: nobody waits for weights that cannot arrive."""
    notes = []

    async def check():
        server = stand_in()
        engine = WatchedEngine(gates={0: asyncio.Event()})
        async with watched([server], engine=engine, notes=notes) as (watch, _):
            kill(server)
            await until(lambda: len(engine.filled) == 1)
            kill(server)
            await until(lambda: len(engine.filled) == 2)
            engine.gates[0].set()
            await watch.settled()
            assert watch.states == {0: "healthy"}
            assert server.address.generation == 3

    asyncio.run(check())
    assert [note for note in notes if "did not come back: was killed by SIGKILL" in note], notes


def test_weights_that_never_come_are_waited_for_no_longer_than_a_start(stand_in):
    notes = []

    async def check():
        server = stand_in()
        engine = WatchedEngine(gates={0: asyncio.Event()})
        limits = WatchLimits(interval=0.05, timeout=3600.0, start_timeout=3.0, max_restarts=1)
        async with watched([server], limits, engine, notes=notes) as (watch, _):
            kill(server)
            await until(lambda: engine.end is not None)
            assert watch.states == {0: "retired"}

    asyncio.run(check())
    assert any("did not come back" in note for note in notes)


def test_a_bug_in_the_engine_ends_the_run_and_not_the_watch_alone(stand_in):
    class Broken(WatchedEngine):
        async def bring_up(self, number):
            raise KeyError("a bug")

    async def check():
        server = stand_in()
        engine = Broken()
        async with watched([server], engine=engine) as (watch, _):
            kill(server)
            await until(lambda: engine.end is not None)
            assert "KeyError" in engine.end.why
            assert watch.error is engine.end

    asyncio.run(check())
