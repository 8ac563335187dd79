"""A reserved server keeps its weights and serves its holder alone; then it takes part again."""

import asyncio

import pytest
from engine_case import EPOCH, EXPECTED, PATIENCE, begun, request, run, serving, update

from slime_core.errors import EngineError
from slime_sglang.health import Watch
from slime_sglang.server_health import WatchLimits

pytestmark = pytest.mark.unit

QUICK = WatchLimits(interval=0.01, timeout=30.0, start_timeout=PATIENCE, max_restarts=2)


async def asked(engine, name, count=8):
    return await asyncio.gather(*(engine.generate(request(f"{name}{n}-0")) for n in range(count)))


def test_a_lent_server_keeps_its_weights_through_updates_and_gets_no_other_requests(tmp_path):
    async def work():
        async with serving(tmp_path, 2) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            async with engine.reserve() as server:
                held = fakes[server.lane.number]
                await engine.load(update(tmp_path, 2))
                others = await asked(engine, "a")
                assert {version for one in others for version in one.versions} == {2}
                assert not held.bodies
                done = await server.generate(request("b-0"))
                assert (done.versions, done.tokens, done.epoch) == ([1] * 6, EXPECTED, EPOCH)
                assert (await server.score([1, 2, 3, 4], 2)).shape == (2,)
                assert (held.version, engine.version, server.version) == (f"{EPOCH}.1", 2, 1)
                assert not {"release", "live_load"} & server.abilities

    run(work())


def test_with_older_weights_it_waits_for_the_next_update(tmp_path):
    async def work():
        async with serving(tmp_path, 2) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            async with engine.reserve() as server:
                await engine.load(update(tmp_path, 2))
            held = fakes[server.lane.number]
            assert {version for one in await asked(engine, "a") for version in one.versions} == {2}
            assert not held.bodies
            await engine.load(update(tmp_path, 3))
            assert held.version == f"{EPOCH}.3"
            assert {version for one in await asked(engine, "b") for version in one.versions} == {3}
            assert held.bodies, "it is not chosen again"

    run(work())


def test_with_the_newest_weights_it_serves_again_at_once(tmp_path):
    async def work():
        async with serving(tmp_path, 2) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            async with engine.reserve() as server:
                assert len(engine.router.lanes) == 1
            await asked(engine, "a")
            assert fakes[server.lane.number].bodies

    run(work())


def test_an_update_whose_route_was_made_without_it_does_not_reach_it(tmp_path):
    """A group of ranks is agreed on with the route: who comes back afterwards is none of them."""

    async def work():
        async with serving(tmp_path, 2, device="cuda") as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            async with engine.reserve() as server:
                await engine.load(update(tmp_path, 2))
                await engine.route("none")
            await engine.load(update(tmp_path, 3, "tensor"))
            held = fakes[server.lane.number]
            assert held.version == f"{EPOCH}.1"
            await engine.route("none")
            await engine.load(update(tmp_path, 4, "tensor"))
            assert held.version == f"{EPOCH}.4"
            assert len(engine.router.lanes) == 2

    run(work())


def test_requests_on_a_lent_server_end_there_with_its_version(tmp_path):
    async def work():
        async with serving(tmp_path, 2) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            running = await begun(engine, fakes, ["p0-0", "p1-0"])
            async with engine.reserve() as server:
                number = server.lane.number
                for fake in fakes:
                    fake.go.set()
                done = await asyncio.gather(*running.values())
                assert {version for one in done for version in one.versions} == {1}
                assert len(fakes[number].bodies) == 1

    run(work())


def test_a_lent_server_that_fails_ends_the_borrowing_and_comes_back_with_the_newest_weights(tmp_path):
    async def work():
        async with (
            serving(tmp_path, 2) as (engine, fakes),
            Watch(engine.servers, engine.fleet, QUICK) as engine.fleet.watch,
        ):
            await engine.load(update(tmp_path, 1))
            async with engine.reserve() as server:
                number = server.lane.number
                await engine.load(update(tmp_path, 2))
                error = EngineError("it hangs", code="ENG85")
                engine.fleet.watch.report(number, error)
                with pytest.raises(EngineError, match="it hangs"):
                    await server.generate(request("b-0"))
                await engine.fleet.watch.settled()
                assert [lane.version for lane in engine.router.lanes] == [2, 2]
            assert fakes[number].version == f"{EPOCH}.2"
            assert len(engine.router.lanes) == 2

    run(work())


def test_the_only_server_is_not_lent(tmp_path):
    async def work():
        async with serving(tmp_path, 1) as (engine, _):
            await engine.load(update(tmp_path, 1))
            assert not engine.can_reserve
            with pytest.raises(EngineError, match="no other would serve"):
                async with engine.reserve():
                    pass
            assert len(engine.router.lanes) == 1

    run(work())
