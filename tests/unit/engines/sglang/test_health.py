"""Progress, not liveness: what counts as a failed server, and what becomes of it."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from slime_core.engines.sglang import ports
from slime_core.engines.sglang.health import Watch
from slime_core.engines.sglang.http import ServerFault
from slime_core.engines.sglang.pulse import LONGEST_PAUSE, REFUSALS, Limits, Look, Pulse, Ward
from slime_core.engines.sglang.server import Server
from slime_core.errors import EngineError

pytestmark = pytest.mark.integration

LONG = 120.0  # seconds in which a busy machine starts a stand-in
LIMITS = Limits(interval=5.0, timeout=20.0)
QUICK = Limits(interval=0.05, timeout=3600.0, start_timeout=LONG, max_restarts=3)


# -- Pulse: looks in, a fault or nothing out


def judged(looks, limits=LIMITS):
    """The fault after these looks, one every five seconds; and how many looks it took."""
    pulse = Pulse(limits)
    for count, look in enumerate(looks, 1):
        given = {"at": 5.0 * count, "in_flight": 1, "came": 0, **look}
        one = given.pop("in_flight"), given.pop("came")
        if (failed := pulse.judge(Look(**{"ranks": (one,), **given}))) is not None:
            return failed, count
    return None, len(looks)


def test_requests_without_a_new_token_are_a_hung_server():
    """Case 85: it answers, and nothing comes."""
    failed, looks = judged([{"came": 7, "held": (100,)}] * 10)
    assert failed.code == "ENG85"
    assert isinstance(failed, ServerFault)
    assert "20 s with 1 requests" in failed.what
    assert looks == 5  # four intervals


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([{"came": n} for n in range(20)], id="tokens come back"),
        pytest.param([{"held": (100 + n,)} for n in range(20)], id="the server's cache grows: nothing came back yet"),
        pytest.param([{"held": (100, 7 + n)} for n in range(20)], id="ranks are not told apart: one goes on"),
        pytest.param([{"in_flight": 0}] * 20, id="nothing is asked of it"),
        pytest.param([{"expected": False}] * 20, id="it is paused"),
        pytest.param([{}, {}, {}, {"came": 1}] * 5, id="slow, but not still for so long"),
        pytest.param([{}, {}, {}, {"in_flight": 0}] * 5, id="idle between requests"),
        pytest.param([{}, {}, {}, {"expected": False}] * 5, id="paused between"),
    ],
)
def test_a_server_that_goes_on_or_has_nothing_to_do_is_healthy(looks):
    assert judged(looks)[0] is None


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([{"ranks": ((2, n), (3, 7))} for n in range(20)], id="tokens of the other come back"),
        pytest.param([{"ranks": ((2, 0), (3, 7)), "held": (n, 50)} for n in range(20)], id="the other's cache grows"),
        pytest.param([{"ranks": ((0, 0), (3, 7)), "held": (n, 50)} for n in range(20)], id="the other is idle"),
    ],
)
def test_a_data_parallel_rank_that_hangs_is_seen_beside_one_that_goes_on(looks):
    """Case 85: ranks are told apart."""
    failed, count = judged(looks)
    assert failed.code == "ENG85"
    assert "with 3 requests in flight at data-parallel rank 1" in failed.what
    assert count == 5


def test_ranks_that_all_go_on_are_healthy():
    looks = [{"ranks": ((2, n // 3), (3, n // 2), (0, 0)), "held": (5, n, 0)} for n in range(40)]
    assert judged(looks)[0] is None


def test_refused_connections_of_a_server_whose_tokens_come_are_no_failure():
    assert judged([{"refused": True, "came": n} for n in range(20)])[0] is None


def test_a_look_without_an_answer_is_no_progress():
    """Case 85: a scheduler that hangs does not answer /v1/loads either, or answers the same now and then."""
    failed, _ = judged([{"held": (100,)}, {"held": ()}] * 5)
    assert failed.code == "ENG85"


def test_progress_that_an_unanswered_look_hid_counts_at_the_next():
    looks = [{"held": (100 + 10 * (n // 2),) if n % 2 == 0 else ()} for n in range(20)]
    assert judged(looks)[0] is None


def test_a_request_that_arrives_at_an_idle_server_has_the_whole_time():
    failed, looks = judged([{"in_flight": 0}] * 50 + [{}] * 10)
    assert failed is not None
    assert looks == 50 + 5


def test_ten_minutes_in_which_we_were_stopped_are_not_held_against_the_server():
    """Case 125: SIGSTOP of ourselves; the clock goes on, and no look was made."""
    assert judged([{"at": 5.0}, {"at": 10.0}, {"at": 610.0}])[0] is None
    failed, looks = judged([{"at": 5.0}, {"at": 10.0}] + [{"at": 610.0 + 5 * n} for n in range(9)])
    assert failed is not None  # and it hung: the gap counts as one interval
    assert looks == 5


def test_refused_connections_are_a_failure_after_some():
    failed, looks = judged([{"refused": True, "in_flight": 0}] * 10)
    assert failed.code == "ENG69"
    assert looks == REFUSALS
    assert judged([{"refused": True}, {"refused": True}, {}] * 3, Limits(interval=5.0, timeout=1e6))[0] is None


# -- Ward: states and the budget


def test_a_server_is_restarted_as_often_as_its_budget_says_and_then_retired():
    """Case 89: the budget is of the whole run."""
    ward = Ward(max_restarts=2)
    seen = [ward.state]
    for again in (True, True, False):
        ward.fence()
        seen.append(ward.state)
        assert ward.next() is again
        seen.append(ward.state)
        if again:
            ward.up()
            seen.append(ward.state)
    assert seen == ["healthy", "fenced", "starting", "healthy", "fenced", "starting", "healthy", "fenced", "retired"]
    assert not ward.usable
    assert not ward.next()  # for good
    assert ward.restarts == 2


def test_pauses_before_restarts_grow_and_have_an_end():
    ward = Ward(max_restarts=100)
    pauses = []
    while ward.next():
        pauses.append(ward.pause(5.0))
        ward.fence()
    assert pauses[:4] == [5.0, 10.0, 20.0, 40.0]
    assert max(pauses) == LONGEST_PAUSE


# -- Watch: over real processes


@dataclass
class Engine:
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


@asynccontextmanager
async def watched(servers, limits=QUICK, engine=None, notes=None):
    engine = engine or Engine()
    engine.servers = {server.address.number: server for server in servers}
    try:
        async with asyncio.timeout(2 * LONG):
            await asyncio.gather(*(server.start() for server in servers))
            await asyncio.gather(*(server.ready(LONG) for server in servers))
            async with Watch(servers, engine, limits, note=(notes if notes is not None else []).append) as watch:
                yield watch, engine
    finally:
        await asyncio.gather(*(server.stop(grace=0) for server in servers))


async def until(true):
    while not true():
        await asyncio.sleep(0.01)


def kill(server, number=signal.SIGKILL):
    """A signal to the server's own process, which is not the launcher's."""
    for pid in ports.members(server.pid):
        with open(f"/proc/{pid}/cmdline") as file:
            if file.read().endswith("serve\0"):
                os.kill(pid, number)


def test_a_killed_server_is_fenced_restarted_filled_and_healthy_again(stand_in):
    """Cases 84 and 90: once each, with the log's end; what comes back has another generation and another address."""
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


def test_a_server_that_answers_health_while_requests_stand_still_is_restarted(stand_in):
    """Case 85: /health and /v1/loads answer at once; no token comes."""

    async def check():
        server = stand_in("stalls")
        limits = Limits(interval=0.05, timeout=0.3, start_timeout=LONG)
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
    """Case 85: SIGSTOP of the server; connections are taken by the kernel and nothing answers."""

    async def check():
        server = stand_in()
        limits = Limits(interval=0.05, timeout=0.3, start_timeout=LONG)
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
        limits = Limits(interval=0.02, timeout=0.2, start_timeout=LONG)
        async with watched([stand_in()], limits) as (_, engine):
            engine.in_flight = 1
            await asyncio.sleep(1.0)  # five times the limit
            assert engine.fenced == []

    asyncio.run(check())


def test_no_progress_is_expected_while_servers_are_held(stand_in):
    async def check():
        limits = Limits(interval=0.02, timeout=0.2, start_timeout=LONG)
        async with watched([stand_in("stalls")], limits) as (watch, engine):
            with watch.held():
                engine.in_flight = 1
                await asyncio.sleep(1.0)  # five times the limit
                assert engine.fenced == []
            await until(lambda: engine.fenced)
            engine.in_flight = 0

    asyncio.run(check())


def test_a_server_that_the_engine_reports_is_fenced_at_once_and_restarted(stand_in):
    """Case 86: the update failed there; the others serve on."""

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
    """Cases 84 and 86: it is not let in before the engine says so; each try costs budget."""
    notes = []

    async def check():
        server = stand_in()
        engine = Engine(refuse={0: 2})
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
    """Case 89."""

    async def check():
        server = stand_in("ends@second")
        engine = Engine()
        limits = Limits(interval=0.05, timeout=3600.0, start_timeout=LONG, max_restarts=2)
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
    """Case 89: the floor is min_healthy_engines."""

    async def check():
        servers = [stand_in(number=n) for n in range(2)]
        limits = Limits(interval=0.05, timeout=3600.0, start_timeout=LONG, max_restarts=0)
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
    """Cases 85 and 89: it would hold its memory, and answer late."""

    async def check():
        limits = Limits(interval=0.05, timeout=0.3, start_timeout=LONG, max_restarts=0)
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
        engine = Engine(gates={0: asyncio.Event()})
        async with watched(servers, engine=engine) as (watch, _):
            for server in servers:
                kill(server)
            await until(lambda: watch.states == {0: "starting", 1: "healthy"} and len(engine.filled) == 2)
            engine.gates[0].set()
            await watch.settled()
            assert watch.states == {0: "healthy", 1: "healthy"}

    asyncio.run(check())


def test_a_server_that_dies_while_it_is_filled_is_started_again(stand_in):
    """Case 84, in the middle of its return: nobody waits for weights that cannot arrive."""
    notes = []

    async def check():
        server = stand_in()
        engine = Engine(gates={0: asyncio.Event()})
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
        engine = Engine(gates={0: asyncio.Event()})
        limits = Limits(interval=0.05, timeout=3600.0, start_timeout=5.0, max_restarts=1)
        async with watched([server], limits, engine, notes=notes) as (watch, _):
            kill(server)
            await until(lambda: engine.end is not None)
            assert watch.states == {0: "retired"}

    asyncio.run(check())
    assert any("did not come back" in note for note in notes)


def test_a_bug_in_the_engine_ends_the_run_and_not_the_watch_alone(stand_in):
    class Broken(Engine):
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


# -- servers of others


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
    """Cases 84 and 90: nobody of ours restarts it; at the same address it is another generation."""

    async def check():
        with ports.hold() as held:
            server = Server.attach(f"http://127.0.0.1:{held.port}")
            engine = Engine(servers={0: server})
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
