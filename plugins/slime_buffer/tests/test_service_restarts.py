"""A service that is full, waits, crashes or starts again: nothing is lost and nothing comes twice."""

import asyncio

import pytest

from slime_buffer.service import models
from slime_buffer.service.tables import BufferLimits
from slime_core import failpoints
from slime_core.errors import StorageError

pytestmark = pytest.mark.unit


def test_a_full_queue_makes_writers_wait_and_loses_nothing(serving, unwell):
    async def body():
        async with serving(limits=BufferLimits(unread=2, open=3)) as world:
            await world.ask("a", "b", "c")
            with pytest.raises(unwell, match=r"429.*groups that are open"):
                await world.ask("d")
            await world.write("a")
            await world.write("b")
            with pytest.raises(unwell, match=r"429.*2 unread groups"):
                await world.write("c")
            claimed = await world.client.claim_batch("t", "run", count=1)
            await world.client.acknowledge(claimed.claim)
            assert (await world.write("c")).finished == ["c"]
            stats = await world.client.stats()
            assert stats.queues["unread"] == 2
            assert stats.samples == {"issued": 6, "read": 2, "pending": 4}

    asyncio.run(body())


def test_another_runs_unread_groups_do_not_hold_this_one_up(serving):
    async def body():
        async with serving(limits=BufferLimits(unread=1)) as world:
            await world.ask("a", run="one")
            await world.ask("a", run="two")
            await world.write("a", run="one")
            assert (await world.write("a", run="two")).finished == ["a"]

    asyncio.run(body())


def test_waiting_claims_are_woken_by_work_and_by_finished_groups(serving):
    async def body():
        async with serving() as world:
            generator = asyncio.create_task(world.client.claim_work("g", wait_seconds=20))
            reader = asyncio.create_task(world.client.claim_batch("t", "run", wait_seconds=20))
            await asyncio.sleep(0)
            await world.ask("a")
            assert [w.id for w in await generator] == ["a"]
            await world.write("a")
            assert [g.id for g in (await reader).groups] == ["a"]

    asyncio.run(body())


def test_open_work_leases_and_unread_groups_survive_a_restart(serving):
    async def body():
        async with serving() as world:
            await world.ask("a", "b", "c")
            (held,) = await world.client.claim_work("gen", lease_seconds=10)
            await world.write("a", samples=[0])
            await world.write("b")
            claimed = await world.client.claim_batch("t", "run", lease_seconds=10)
        async with serving() as world:
            assert (await world.client.extend([held.lease], 10)).held == [held.lease]
            assert (await world.write("a", samples=[1])).finished == ["a"]
            assert await world.client.acknowledge(claimed.claim) == 1
            assert [w.id for w in await world.client.claim_work("g", count=9)] == ["c"]
            assert (await world.client.stats()).samples == {"issued": 6, "read": 2, "pending": 4}

    asyncio.run(body())


POINTS = [(name, nth) for name in failpoints.SERVICE_NAMES for nth in (1, 2, 3)]


@pytest.mark.parametrize(("name", "nth"), POINTS, ids=[f"{name}-{nth}" for name, nth in POINTS])
def test_a_crash_at_any_boundary_loses_and_doubles_nothing(serving, unwell, name, nth):
    """Every request is sent until it is answered, over restarts; the service dies once, at the nth time it gets there."""

    async def life(work):
        """One life of the service; whether it died."""
        try:
            async with serving(check=False) as world:
                await work(world)
        except (unwell, StorageError):
            return True
        return False

    read = {}

    async def script(world):
        for group in ("a", "b", "c"):
            await world.ask(group)
            await world.write(group, samples=[0])
            await world.write(group, samples=[1], failed="no" if group == "b" else "")
            await world.ask("d")
            claimed = await world.client.claim_batch("t", "run", restart=True)
            for ended in claimed.groups:
                made = [s.tokens for r in ended.rollouts for s in r.sequences]
                assert read.setdefault(ended.id, made) == made
            if claimed.claim:
                await world.client.acknowledge(claimed.claim)
        await world.client.drop("run", [models.Key(group="d")], "over", tell=False)

    async def body():
        failpoints.arm(f"{name}:{nth}=raise")
        try:
            assert await life(script), "the scenario does not get there"
            assert not await life(script)
        finally:
            failpoints.arm("")
        async with serving() as world:
            assert sorted(read) == ["a", "b", "c"]
            stats = await world.client.stats()
            assert stats.samples == {"issued": 8, "read": 5, "pending": 0, "dropped/failed": 1, "dropped/over": 2}
            assert stats.queues == dict.fromkeys(stats.queues, 0)

    asyncio.run(body())


def test_a_rollout_that_waits_for_its_siblings_is_not_written_twice(serving):
    async def body():
        async with serving() as world:
            await world.ask("a")
            assert (await world.write("a", samples=[0], reward=0.25)).trajectories[0].state == "stored"
            assert (await world.write("a", samples=[0], reward=0.75)).trajectories[0].state == "known"
            assert (await world.write("a", samples=[1])).finished == ["a"]
            (ended,) = (await world.client.claim_batch("t", "run")).groups
            assert [r.sequences[0].reward for r in ended.rollouts] == [0.25, 1.0]

    asyncio.run(body())


def test_a_group_whose_last_rollout_was_stored_is_finished_at_the_next_start(serving, unwell):
    """The generator that wrote it is gone too, so nobody sends it again."""

    async def body():
        failpoints.arm("buffer.write.staged:1=raise")
        try:
            async with serving(check=False) as world:
                await world.ask("a")
                with pytest.raises(unwell):
                    await world.write("a")
        finally:
            failpoints.arm("")
        async with serving() as world:
            assert await world.states() == {("a", 0): "finished"}
            assert len((await world.client.claim_batch("t", "run")).groups) == 1

    asyncio.run(body())
