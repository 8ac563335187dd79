"""Which server a request goes to: load, sessions, data-parallel ranks, and who has to wait."""

import asyncio
from types import SimpleNamespace

import pytest

from slime_core.errors import EngineError
from slime_core.types import Completion, GenerateRequest, SamplingParams
from slime_sglang.router import Lane, Router, chained

pytestmark = pytest.mark.unit


def request(name, session=""):
    return GenerateRequest(id=name, tokens=[1, 2], params=SamplingParams(max_new_tokens=4), seed=0, session_id=session)


def lane(number, room=8, ranks=1, generation=1):
    return Lane(client=SimpleNamespace(), number=number, room=room, ranks=ranks, generation=generation)


def routed(*lanes):
    router = Router()
    for one in lanes:
        router.admit(one)
    return router


def numbers(places):
    return [place.lane.number for place in places]


async def settle():
    """Let every task that can go on do so."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_requests_of_many_groups_fill_servers_evenly():
    async def run():
        router = routed(lane(0, room=64), lane(1, room=64), lane(2, room=64))
        places = [await router.pick(request(f"grpo/{group}-{k}")) for group in range(12) for k in range(8)]
        counts = [one.in_flight for one in router.lanes]
        assert sum(counts) == 96
        assert max(counts) - min(counts) <= 4, counts
        for place in places:
            router.leave(place)
        assert [one.in_flight for one in router.lanes] == [0, 0, 0]

    asyncio.run(run())


def test_a_session_comes_back_to_its_server_until_that_is_much_fuller():
    async def run():
        router = routed(lane(0, room=64), lane(1, room=64))
        first = await router.pick(request("a-0", "s"))
        router.leave(first)
        other = 1 - first.lane.number
        first.lane.in_flight = 5
        again = await router.pick(request("b-0", "s"))
        assert again.lane is first.lane
        router.leave(again)
        first.lane.in_flight = 40
        assert (await router.pick(request("c-0", "s"))).lane.number == other

    asyncio.run(run())


def test_a_later_turn_of_a_sample_without_a_session_finds_its_prefix():
    async def run():
        router = routed(*(lane(number, room=64) for number in range(4)))
        first = await router.pick(request("grpo/3-1"))
        router.leave(first)
        first.lane.in_flight = 3
        assert (await router.pick(request("grpo/3-1"))).lane is first.lane

    asyncio.run(run())


def test_a_fenced_server_is_never_picked_and_its_next_generation_is_another_one():
    """What was known of an older generation says nothing of the new one."""

    async def run():
        router = routed(lane(0), lane(1))
        place = await router.pick(request("a-0", "s"))
        number = place.lane.number
        router.leave(place)
        error = EngineError("it failed", code="ENG84")
        assert router.fence(number, error) is place.lane
        assert place.lane.fenced is error
        assert router.fence(number, error) is None
        assert set(numbers([await router.pick(request(f"x-{k}", "s")) for k in range(5)])) == {1 - number}
        fresh = lane(number, generation=2)
        router.admit(fresh)
        again = await router.pick(request("y-0"), avoid=[place.lane.key])
        assert again.lane is fresh

    asyncio.run(run())


def test_a_server_to_avoid_is_taken_only_where_no_other_is_open():
    async def run():
        router = routed(lane(0), lane(1))
        bad = router.lanes[0].key
        assert set(numbers([await router.pick(request(f"x-{k}"), [bad]) for k in range(8)])) == {1}
        waiting = asyncio.ensure_future(router.pick(request("y-0"), [bad]))
        await settle()
        assert not waiting.done()  # the other is full, and open all the same
        router.fence(1, EngineError("gone"))
        router.admit(lane(0, generation=1))
        assert (await waiting).lane.number == 0

    asyncio.run(run())


def test_requests_wait_in_order_while_all_servers_are_full():
    async def run():
        router = routed(lane(0, room=1))
        held = await router.pick(request("a-0"))
        order = []

        async def wait(name):
            place = await router.pick(request(name))
            order.append(name)
            return place

        tasks = [asyncio.create_task(wait(name)) for name in ("b-0", "c-0", "d-0")]
        await settle()
        assert router.waiting == 3
        router.leave(held)
        router.leave(await tasks[0])
        router.leave(await tasks[1])
        router.leave(await tasks[2])
        assert order == ["b-0", "c-0", "d-0"]

    asyncio.run(run())


def test_a_waiting_request_that_is_cancelled_takes_no_place():
    async def run():
        router = routed(lane(0, room=1))
        held = await router.pick(request("a-0"))
        gone, stays = (asyncio.create_task(router.pick(request(name))) for name in ("b-0", "c-0"))
        await settle()
        router.leave(held)  # b has its place now and does not know it yet
        gone.cancel()
        assert (await stays).lane.in_flight == 1
        assert gone.cancelled()

    asyncio.run(run())


def test_no_lane_is_given_while_the_router_is_held():
    async def run():
        router = routed(lane(0))
        router.hold()
        task = asyncio.create_task(router.pick(request("a-0")))
        await settle()
        assert not task.done()
        assert router.take(request("b-0")) is None
        router.go()
        router.hold()  # before the task has run: the place that it was given is taken back
        await settle()
        assert not task.done()
        assert router.lanes[0].in_flight == 0
        router.go()
        assert (await task).lane.number == 0

    asyncio.run(run())


def test_waiting_requests_fail_when_no_server_will_come_back():
    async def run():
        router = routed()
        task = asyncio.create_task(router.pick(request("a-0")))
        await settle()
        router.lost(EngineError("0 of 2 servers are left", code="ENG89"))
        with pytest.raises(EngineError, match="ENG89"):
            await task
        with pytest.raises(EngineError, match="ENG89"):
            await router.pick(request("b-0"))

    asyncio.run(run())


def test_requests_spread_over_the_data_parallel_ranks_of_a_server():
    async def run():
        router = routed(lane(0, room=64, ranks=4))
        places = [await router.pick(request(f"grpo/{n}-0")) for n in range(16)]
        assert router.lanes[0].by_rank == [4, 4, 4, 4]
        assert [place.rank for place in places[:4]] == [0, 1, 2, 3]
        router.leave(places[2])
        assert (await router.pick(request("z-0"))).rank == places[2].rank
        assert (await routed(lane(0)).pick(request("a-0"))).rank is None

    asyncio.run(run())


def test_middleware_stands_around_a_request_the_first_outermost():
    async def run():
        seen = []

        def named(name):
            async def layer(asked, following):
                seen.append(f"{name} in")
                done = await following(asked)
                seen.append(f"{name} out")
                return done

            return layer

        async def last(asked):
            seen.append(asked.id)
            return Completion(id=asked.id, tokens=[], log_probs=[], plain_log_probs=[], finish="stop", versions=[])

        done = await chained([named("a"), named("b")], last)(request("x-0"))
        assert done.id == "x-0"
        assert seen == ["a in", "b in", "x-0", "b out", "a out"]

    asyncio.run(run())
