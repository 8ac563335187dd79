"""Requests of an engine of several servers: spread, moved, paused, aborted, asked again."""

import asyncio
from dataclasses import replace

import pytest
from engine_case import EXPECTED, begun, request, run, serving, update

from slime_core.errors import EngineError

pytestmark = pytest.mark.unit


def test_requests_of_a_killed_server_go_to_another_one_once_each(tmp_path):
    """All of them, none twice, and the dead server is not asked again."""

    async def work():
        async with serving(tmp_path, 2, retries=2) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            tasks = await begun(engine, fakes, [f"p{n}-0" for n in range(6)])
            dead, alive = fakes
            lost = len(dead.running)
            assert lost
            alive.go.set()
            await dead._runner.cleanup()
            done = await asyncio.gather(*tasks.values())
            assert all(one.tokens == EXPECTED and one.finish == "length" for one in done)
            assert len(alive.bodies) == 6, "a request was asked twice"
            assert engine.requests.requeued == lost
            assert [lane.number for lane in engine.router.lanes] == [1]

    run(work())


def test_an_abort_returns_the_partial_tokens_of_running_and_of_waiting_requests(tmp_path):
    async def work():
        async with serving(tmp_path, 1, concurrency=1) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            tasks = await begun(engine, fakes, ["a-0"])
            tasks["b-0"] = asyncio.create_task(engine.generate(request("b-0")))
            while not engine.router.waiting:
                await asyncio.sleep(0)
            ended = await engine.abort(["a-0", "b-0", "nobody"])
            assert {one.id: one.tokens for one in ended} == {"a-0": EXPECTED[:2], "b-0": []}
            for name, task in tasks.items():
                assert (await task).finish == "abort", name
            assert await engine.abort(["a-0"]) == []

    run(work())


def test_pauses_nest_and_new_requests_wait_in_the_engine(tmp_path):
    async def work():
        async with serving(tmp_path, 2) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            await engine.resume()  # nothing was paused
            await engine.pause("keep")
            await engine.pause("retract")
            task = asyncio.create_task(engine.generate(request("a-0")))
            await engine.load(update(tmp_path, 2))
            await engine.resume()
            await asyncio.sleep(0)
            assert not any(fake.bodies for fake in fakes)
            await engine.resume()
            assert (await task).versions == [2] * 6
            assert not any(fake.paused for fake in fakes)

    run(work())


def test_a_pause_with_abort_ends_what_runs_and_what_waits(tmp_path):
    async def work():
        async with serving(tmp_path, 1, concurrency=1) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            tasks = await begun(engine, fakes, ["a-0"])
            tasks["b-0"] = asyncio.create_task(engine.generate(request("b-0")))
            while not engine.router.waiting:
                await asyncio.sleep(0)
            await engine.pause("abort")
            assert [(await task).finish for task in tasks.values()] == ["abort", "abort"]
            await engine.resume()

    run(work())


def test_an_abort_during_a_pause_ends_that_request_and_holds_the_others(tmp_path):
    async def work():
        async with serving(tmp_path, 1) as (engine, (fake,)):
            await engine.load(update(tmp_path, 1))
            tasks = await begun(engine, [fake], ["a-0", "b-0"])
            await engine.pause("keep")
            assert fake.paused == ["retract"]
            ended = await engine.abort(["a-0"])
            assert [one.id for one in ended] == ["a-0"]
            assert not tasks["b-0"].done()
            assert not fake.running, "a paused server computes"
            fake.go.set()
            await engine.resume()
            assert (await tasks["b-0"]).tokens == EXPECTED

    run(work())


def test_a_request_that_the_server_ended_unasked_is_asked_again_a_few_times(tmp_path):
    """An abort without tokens is no answer."""

    async def work():
        async with serving(tmp_path, 2, retries=3) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            fakes[0].unasked = fakes[1].unasked = 1
            assert (await engine.generate(request("a-0"))).tokens == EXPECTED
            fakes[0].unasked = fakes[1].unasked = 100
            with pytest.raises(EngineError, match="ENG81"):
                await engine.generate(request("b-0"))

    run(work())


def test_a_request_that_is_at_fault_fails_alone(tmp_path):
    """Too long a prompt is nobody else's matter, and is not asked elsewhere."""

    async def work():
        async with serving(tmp_path, 2) as (engine, fakes):
            await engine.load(update(tmp_path, 1))
            with pytest.raises(EngineError, match="ENG72"):
                await engine.generate(replace(request("a-0"), tokens=[5] * 600))
            assert len(engine.router.lanes) == 2
            assert not any(fake.bodies for fake in fakes)
            assert (await engine.generate(request("b-0"))).finish == "length"

    run(work())


def test_requests_are_spread_over_data_parallel_ranks(tmp_path):
    async def work():
        async with serving(tmp_path, 1, dp=2) as (engine, (fake,)):
            await engine.load(update(tmp_path, 1))
            tasks = await begun(engine, [fake], ["a-0", "b-0", "c-0", "d-0"])
            assert sorted(body["routed_dp_rank"] for body in fake.bodies) == [0, 0, 1, 1]
            fake.go.set()
            await asyncio.gather(*tasks.values())

    run(work())


def test_middleware_sees_every_request(tmp_path):
    async def work():
        seen = []

        async def traced(asked, following):
            done = await following(asked)
            seen.append((asked.id, len(done.tokens)))
            return done

        async with serving(tmp_path, 1, middleware=[traced]) as (engine, _):
            await engine.load(update(tmp_path, 1))
            await engine.generate(request("a-0"))
            assert seen == [("a-0", 6)]

    run(work())


def test_a_closed_engine_says_so_to_whoever_waits(tmp_path):
    async def work():
        async with serving(tmp_path, 1) as (engine, _):
            await engine.load(update(tmp_path, 1))
            await engine.pause("keep")
            waiting = asyncio.create_task(engine.generate(request("a-0")))
            await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(EngineError, match="ENG84"):
                await waiting
            with pytest.raises(EngineError, match="ENG84"):
                await engine.generate(request("b-0"))

    run(work())


@pytest.mark.parametrize(("deterministic", "expected"), [(True, True), (False, False)])
def test_seeds_are_an_ability_of_the_deterministic_mode_alone(tmp_path, deterministic, expected):
    async def work():
        async with serving(tmp_path, 1, deterministic=deterministic) as (engine, _):
            assert ("per_sample_seed" in engine.abilities) is expected

    run(work())
