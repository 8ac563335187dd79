"""SGLang's router before an engine's servers: who gets requests, who is blamed, and what outlives which process."""

import asyncio
import json
import os
import signal

import pytest
from engine_case import EPOCH, PATIENCE, launch, request, routed, update
from fake_sglang import TOKEN

from slime_core.errors import EngineError
from slime_sglang import gateway as module, held_ports as ports
from slime_sglang.gateway import Gateway, GatewayWorker
from slime_sglang.health import Watch
from slime_sglang.http import fault
from slime_sglang.server_health import ServerHealth, ServerStatus, WatchLimits

pytestmark = pytest.mark.unit

QUICK = WatchLimits(interval=0.02, timeout=30.0, start_timeout=PATIENCE, max_restarts=2, counts_requests=True)


def run(work):
    asyncio.run(asyncio.wait_for(work, 2 * PATIENCE))


async def held(run, names, count=6):
    """Requests that servers have and hold."""
    for fake in run.fakes:
        fake.hold = True
    tasks = {name: asyncio.create_task(run.engine.generate(request(name, count))) for name in names}
    while sum(len(fake.running) for fake in run.fakes) < len(names):
        await asyncio.sleep(0.001)
    return tasks


def let(fakes):
    """Servers answer."""
    for fake in fakes:
        fake.hold = False
        fake.go.set()


def program(gateway):
    """The router's own process: the launcher's child."""
    (found,) = [pid for pid in ports.members(gateway.process.pid) if pid != gateway.process.pid]
    return found


def test_requests_reach_all_servers_by_the_router_and_come_back_whole(tmp_path):
    async def work():
        async with routed(tmp_path, 2) as on:
            await on.engine.load(update(tmp_path, 4))
            done = await asyncio.gather(*(on.engine.generate(request(f"p-{n}")) for n in range(8)))
            assert all(one.versions == [4] * 6 and one.epoch == EPOCH for one in done)
            assert [len(fake.bodies) for fake in on.fakes] == [4, 4]
            assert all(header["Authorization"] == f"Bearer {TOKEN}" for fake in on.fakes for header in fake.headers)
            assert (await on.engine.score([1, 2, 3, 4], 2)).shape == (2,)
            assert on.engine.router.shared == 0
            controls = [path for fake in on.fakes for path in fake.paths()]
            assert controls.count("/update_weights_from_disk") == 2, "weights go to servers, past the router"

    run(work())


def test_turns_of_a_session_meet_the_same_server_where_the_policy_goes_by_keys(tmp_path):
    async def work():
        async with routed(tmp_path, 2, more=("--policy", "manual")) as on:
            await on.engine.load(update(tmp_path, 1))
            for turn in range(6):
                await on.engine.generate(request(f"t-{turn}", session_id="a conversation"))
            assert sorted(len(fake.bodies) for fake in on.fakes) == [0, 6]
            await on.engine.generate(request("späte"))  # a key that is no header: the request goes without

    run(work())


def test_the_token_is_asked_for_and_shows_nowhere(tmp_path):
    async def work():
        async with routed(tmp_path, 1) as on:
            token = on.gateway.address.token
            assert token
            assert token != TOKEN
            shown = on.gateway.process.log.read_text()
            assert "api_key='***'" in shown
            for pid in ports.members(on.gateway.process.pid):
                for name in ("cmdline", "environ"):
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        shown += file.read().decode(errors="replace")
            assert token not in shown
            assert TOKEN not in shown
            assert token not in repr(on.gateway.address)
            assert on.gateway.address.url.startswith("http://127.0.0.1:")

    run(work())


def test_a_router_that_asks_for_no_token_is_refused_and_leaves_nothing(tmp_path):
    async def work():
        gateway = Gateway(launch(tmp_path, "open"), start_timeout=PATIENCE)
        with pytest.raises(EngineError, match="answers without a token") as caught:
            await gateway.__aenter__()
        assert caught.value.code == "ENG73"
        assert gateway.process.pid == 0

    run(work())


def test_a_server_that_the_router_does_not_take_up_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "JOINING", 0.2)

    async def work():
        with pytest.raises(EngineError, match="did not take up server 0") as caught:
            async with routed(tmp_path, 1, "deaf"):
                pass
        assert caught.value.code == "ENG69"
        assert "nobody is there" in caught.value.why

    run(work())


def test_an_abort_reaches_whichever_server_has_the_request(tmp_path):
    async def work():
        async with routed(tmp_path, 2) as on:
            await on.engine.load(update(tmp_path, 1))
            tasks = await held(on, ["a-0", "a-1"])
            done = await on.engine.abort(["a-1"])
            assert [(one.id, one.finish, len(one.tokens)) for one in done] == [("a-1", "abort", 2)]
            assert all(len(fake.aborts) == 1 for fake in on.fakes), "which server has it is not known"
            let(on.fakes)
            assert (await tasks["a-0"]).finish == "length"
            assert (await tasks["a-1"]).finish == "abort"

    run(work())


def test_pauses_and_updates_hold_requests_that_the_router_has(tmp_path):
    async def work():
        async with routed(tmp_path, 2, pause_mode="abort") as on:
            await on.engine.load(update(tmp_path, 1))
            tasks = await held(on, ["a-0", "a-1", "a-2"])
            loading = asyncio.create_task(on.engine.load(update(tmp_path, 2)))
            await loading
            let(on.fakes)
            done = await asyncio.gather(*tasks.values())
            assert all(one.versions == [1, 1, 2, 2, 2, 2] for one in done)

    run(work())


def test_requests_of_a_router_that_is_killed_are_made_again_once_by_the_next(tmp_path):
    """Of the process before the servers: all of them, none twice, and servers drop what it had sent."""

    async def work():
        async with routed(tmp_path, 2) as on:
            await on.engine.load(update(tmp_path, 1))
            before = on.gateway.address
            tasks = await held(on, [f"a-{n}" for n in range(6)])
            os.kill(program(on.gateway), signal.SIGKILL)
            late = asyncio.create_task(on.engine.generate(request("late")))
            while not all(any(body.get("abort_all") for body in fake.aborts) for fake in on.fakes):
                await asyncio.sleep(0.001)
            let(on.fakes)
            done = await asyncio.gather(*tasks.values(), late)
            assert [one.id for one in done] == [*tasks, "late"]
            assert all(len(one.tokens) == 6 and one.versions == [1] * 6 for one in done)
            assert on.gateway.restarts == 1
            assert on.gateway.address.generation == before.generation + 1
            assert on.gateway.address.url != before.url
            assert any("SIGKILL" in note and "restart 1 of 2" in note for note in on.notes), on.notes

    run(work())


def test_a_router_that_cannot_be_started_again_ends_what_waits_with_the_end_of_its_log(tmp_path):
    async def work():
        async with routed(tmp_path, 1, "ends@second") as on:
            await on.engine.load(update(tmp_path, 1))
            os.kill(program(on.gateway), signal.SIGKILL)
            with pytest.raises(EngineError, match="gone after 2 restarts") as caught:
                await on.engine.generate(request("a-0"))
            assert caught.value.code == "ENG84"
            assert "no such policy" in caught.value.why
            assert "\x1b" not in caught.value.why

    run(work())


def test_a_hung_router_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ASK", 0.2)

    async def work():
        async with routed(tmp_path, 1) as on:
            await on.engine.load(update(tmp_path, 1))
            os.kill(program(on.gateway), signal.SIGSTOP)
            done = await on.engine.generate(request("a-0"))
            assert len(done.tokens) == 6
            assert any("does not answer" in note for note in on.notes), on.notes

    run(work())


def test_a_server_that_the_router_lost_is_fenced_and_the_router_is_not(tmp_path):
    """Its requests go on elsewhere; it is let in again, at the router too, when it answers."""

    async def work():
        async with (
            routed(tmp_path, 2) as on,
            Watch(on.servers, on.engine.fleet, QUICK) as on.engine.fleet.watch,
        ):
            await on.engine.load(update(tmp_path, 1))
            error = fault("SGLang's router lost server 1", "ENG75", "")
            error.server = (1, 1)
            gateway_lane = on.engine.router._gateway_lane
            await on.engine.fleet.fault(gateway_lane, error)
            assert [lane.number for lane in on.engine.router.lanes] == [0]
            done = await asyncio.gather(*(on.engine.generate(request(f"a-{n}")) for n in range(4)))
            assert all(len(one.tokens) == 6 for one in done)
            await on.engine.fleet.watch.settled()
            assert [lane.key for lane in on.engine.router.lanes] == [(0, 1), (1, 2)]
            await on.engine.fleet.fault(gateway_lane, error)  # late, of the generation before
            assert len(on.engine.router.lanes) == 2
            seen = len(on.fakes[1].bodies)
            await asyncio.gather(*(on.engine.generate(request(f"b-{n}")) for n in range(4)))
            assert len(on.fakes[1].bodies) > seen, "the router was not told of the server that came back"
            assert on.gateway.restarts == 0

    run(work())


def test_requests_on_a_server_of_others_that_hangs_are_made_again_elsewhere(tmp_path):
    async def work():
        async with routed(tmp_path, 2) as on:
            await on.engine.load(update(tmp_path, 1))
            tasks = await held(on, ["a-0", "a-1"])
            on.engine.fleet.fence(1, fault("made no token", "ENG85", ""))
            on.fakes[0].hold = False
            done = await asyncio.gather(*tasks.values())
            assert all(len(one.tokens) == 6 for one in done)
            assert on.gateway.restarts == 0
            let(on.fakes)

    run(work())


def test_a_failed_answer_of_a_server_is_asked_for_again_by_slime_and_blames_nobody(tmp_path):
    async def work():
        async with routed(tmp_path, 1) as on:
            await on.engine.load(update(tmp_path, 1))
            on.fakes[0].fails, asked = 2, len(on.fakes[0].rids)
            done = await on.engine.generate(request("a-0"))
            assert len(done.tokens) == 6
            assert len(set(on.fakes[0].rids)) == len(on.fakes[0].rids) == asked + 3, "each try has a name of its own"
            assert on.gateway.restarts == 0
            on.fakes[0].fails = 100
            with pytest.raises(EngineError) as caught:
                await on.engine.generate(request("a-1"))
            assert caught.value.code == "ENG75"
            assert len(on.engine.router.lanes) == 1

    run(work())


def test_prefill_and_decode_servers_are_told_with_their_ports_and_serve_only_together(tmp_path):
    async def work():
        async with routed(tmp_path, kinds=("prefill", "decode"), more=("--pd-disaggregation",)) as on:
            lines = [
                line[7:] for line in on.gateway.process.log.read_text().splitlines() if line.startswith("worker ")
            ]
            told = {worker["worker_type"]: worker for worker in map(json.loads, lines)}
            assert told["prefill"]["bootstrap_port"] == 8123
            assert "bootstrap_port" not in told["decode"]
            assert [told[kind]["url"] for kind in ("prefill", "decode")] == [fake.url for fake in on.fakes]
            await on.engine.load(update(tmp_path, 1))
            assert len((await on.engine.generate(request("a-0"))).tokens) == 6
            assert len(on.fakes[1].bodies) == 1
            lane = on.engine.router.fence(0, fault("gone", "ENG84", ""))
            waits = asyncio.create_task(on.engine.generate(request("b-0")))
            while not on.engine.router.waiting:
                await asyncio.sleep(0.001)
            assert len(on.fakes[1].bodies) == 1
            lane.fenced = None
            await on.engine.router.join(lane)
            assert len((await waits).tokens) == 6

    run(work())


def test_a_server_that_stands_still_with_the_only_request_is_fenced(tmp_path):
    """It is not known here which server has the request: each says how many it has."""

    async def work():
        limits = WatchLimits(interval=0.02, timeout=0.5, start_timeout=PATIENCE, counts_requests=True)
        async with (
            routed(tmp_path, 2) as on,
            Watch(on.servers, on.engine.fleet, limits, note=on.notes.append) as on.engine.fleet.watch,
        ):
            await on.engine.load(update(tmp_path, 1))
            tasks = await held(on, ["a-0"])
            (stuck,) = [number for number, fake in enumerate(on.fakes) if fake.running]
            on.fakes[1 - stuck].hold = False
            while on.engine.fleet.watch.states[stuck] == "healthy":
                await asyncio.sleep(0.001)
            assert len((await tasks["a-0"]).tokens) == 6
            assert on.engine.fleet.watch.states[1 - stuck] == "healthy"
            let(on.fakes)
            assert on.engine.fleet.watch.restarts[1 - stuck] == 0, on.notes

    run(work())


def test_with_the_last_decode_server_the_run_ends_though_a_prefill_server_is_left(tmp_path):
    """Of servers that serve nothing alone: the floor of min_healthy_engines is not theirs."""

    async def work():
        limits = WatchLimits(
            interval=0.02, start_timeout=PATIENCE, max_restarts=0, min_healthy=1, counts_requests=True
        )
        async with routed(tmp_path, kinds=("prefill", "decode"), more=("--pd-disaggregation",)) as on:
            needed = ({0}, {1})
            async with Watch(on.servers, on.engine.fleet, limits, needed=needed) as on.engine.fleet.watch:
                await on.engine.load(update(tmp_path, 1))
                on.engine.fleet.watch.report(1, EngineError("it is broken", code="ENG75"))
                with pytest.raises(EngineError, match="without which the others serve nothing") as caught:
                    await on.engine.generate(request("a-0"))
                assert caught.value.code == "ENG84"
                assert on.engine.fleet.watch.states == {0: "healthy", 1: "retired"}

    run(work())


def test_a_server_is_named_to_its_router_without_its_token_in_any_dump():
    assert "secret" not in repr(GatewayWorker(url="http://h:1", token="secret"))


def test_a_server_counts_as_hung_by_its_own_count_of_requests():
    """Of those in flight anywhere, a server has as many as it says; what it does not say counts as all."""
    health = ServerHealth(WatchLimits(interval=1.0, timeout=3.0, counts_requests=True))
    still = [ServerStatus(at=float(at), ranks=((5, 0),), cached_tokens=(7,)) for at in range(5)]
    assert [health.judge(look) is None for look in still] == [True, True, True, False, False]
    idle = ServerHealth(WatchLimits(interval=1.0, timeout=3.0, counts_requests=True))
    assert all(idle.judge(ServerStatus(at=float(at), ranks=((0, 0),), cached_tokens=(7,))) is None for at in range(9))
