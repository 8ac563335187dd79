"""What the buffer promises: ids make repeats harmless, leases end, nothing is answered that a crash could take back."""

import asyncio

import pytest

from slime_buffer.service import models

pytestmark = pytest.mark.unit


def test_a_group_goes_round_once(serving, row):
    async def body():
        async with serving() as world:
            asked = await world.ask("grpo/17")
            assert [g.state for g in asked.groups] == ["open"]
            (work,) = await world.client.claim_work("gen")
            assert (work.id, work.tokens, work.label, [s.seed for s in work.samples]) == (
                "grpo/17",
                [1, 2, 3],
                "2",
                [0, 1],
            )
            written = await world.client.write("run", [row("grpo/17", 1), row("grpo/17", 0)])
            assert written.finished == ["grpo/17"]
            claimed = await world.client.claim_batch("trainer", "run")
            (ended,) = claimed.groups
            assert [r.sample for r in ended.rollouts] == ["grpo/17-0", "grpo/17-1"]
            first = ended.rollouts[0].sequences[0]
            assert (first.tokens, first.log_probs, first.weight_versions) == ([1, 2, 3, 10, 5], [-0.25, -1.5], [3, 4])
            assert (first.reward, first.response, first.loss_mask) == (1.0, "ab", [1, 1])
            assert await world.client.acknowledge(claimed.claim) == 1
            assert (await world.client.claim_batch("trainer", "run")).groups == []
            stats = await world.client.stats()
            assert stats.samples == {"issued": 2, "read": 2, "pending": 0}
            assert stats.groups == {"open": 0, "finished": 0, "dropped": 0, "read": 1}

    asyncio.run(body())


def test_repeating_any_request_changes_nothing(serving, row):
    """D8: a POST that is sent again, because its answer was lost, is the same request."""

    async def body():
        async with serving() as world:
            for _ in range(3):
                await world.ask("a", "b")
            claim = models.ClaimWork(worker="gen", request="1", count=1)
            first, again = await world.service.claim_work(claim), await world.service.claim_work(claim)
            assert first == again
            assert (await world.client.claim_work("gen"))[0].id == "b"
            for expected in ("stored", "known", "known"):
                written = await world.client.write("run", [row("a", 0), row("a", 1)])
                assert [j.state for j in written.trajectories] == [expected, expected]
            batch = models.ClaimBatch(reader="t", request="1", run="run")
            first, again = await world.service.claim_batch(batch), await world.service.claim_batch(batch)
            assert first == again
            assert [await world.client.acknowledge(first.claim) for _ in range(3)] == [1, 1, 1]
            assert (await world.client.stats()).samples == {"issued": 4, "read": 2, "pending": 2}

    asyncio.run(body())


def test_the_first_that_is_written_under_an_id_stays(serving):
    async def body():
        async with serving() as world:
            await world.ask("a", samples=1)
            await world.write("a", samples=[0], reward=0.25)
            written = await world.write("a", samples=[0], reward=0.75)
            assert written.trajectories[0].state == "known"
            (ended,) = (await world.client.claim_batch("t", "run")).groups
            assert ended.rollouts[0].sequences[0].reward == 0.25

    asyncio.run(body())


def test_a_trajectory_of_several_sequences_keeps_one_rollout_id(serving, row):
    async def body():
        async with serving() as world:
            await world.ask("a", samples=1)
            await world.client.write("run", [row("a", 0, parts=3)])
            (ended,) = (await world.client.claim_batch("t", "run")).groups
            assert [len(r.sequences) for r in ended.rollouts] == [3]
            assert (await world.client.stats()).samples["issued"] == 3

    asyncio.run(body())


def test_writes_that_nobody_asked_for_are_refused_row_by_row(serving, row):
    """A reply for an unknown id is refused and counted; its neighbours are stored."""

    async def body():
        async with serving() as world:
            await world.ask("a")
            rows = [row("ghost", 0), row("a", 0), row("a", 0, sample="a-9")]
            written = await world.client.write("run", rows)
            assert [j.state for j in written.trajectories] == ["refused", "stored", "refused"]
            assert (await world.client.stats()).since_start["rollouts_refused"] == 2

    asyncio.run(body())


def test_a_group_that_nobody_asked_for_can_be_pushed(serving, row):
    async def body():
        async with serving() as world:
            group = models.PushedGroup(
                id="agent/1",
                prompt="its own",
                tokens=[9],
                rollouts=[models.Rollout(sample="x", sequences=row("a", 0).sequences)],
            )
            for _ in range(2):
                asked = await world.client.push(models.Push(run="pool", groups=[group]))
                assert asked.groups[0].state == "finished"
            (ended,) = (await world.client.claim_batch("t", "pool")).groups
            assert (ended.id, ended.prompt, ended.tokens, len(ended.rollouts)) == ("agent/1", "its own", [9], 1)

    asyncio.run(body())


def test_a_dead_claimers_work_is_open_again_when_its_lease_ends(serving):
    async def body():
        async with serving() as world:
            await world.ask("a")
            (held,) = await world.client.claim_work("dead", lease_seconds=10)
            await world.write("a", samples=[1])
            world.clock["now"] = 9.9
            assert await world.client.claim_work("other") == []
            world.clock["now"] = 10.1
            (work,) = await world.client.claim_work("other")
            assert [s.id for s in work.samples] == ["a-0"], "what is written is not made again"
            assert (await world.client.extend([held.lease], 10)).lost == [held.lease]

    asyncio.run(body())


def test_a_heartbeat_keeps_a_lease_and_a_release_ends_it(serving):
    async def body():
        async with serving() as world:
            await world.ask("a")
            (work,) = await world.client.claim_work("gen", lease_seconds=10)
            world.clock["now"] = 9.0
            assert (await world.client.extend([work.lease, "w99", "nonsense"], 10)).held == [work.lease]
            world.clock["now"] = 18.0
            assert await world.client.claim_work("other") == []
            assert (await world.client.release([work.lease])).held == [work.lease]
            assert len(await world.client.claim_work("other")) == 1

    asyncio.run(body())


def test_a_batch_that_is_not_acknowledged_comes_again(serving):
    """D6: what is claimed is not gone."""

    async def body():
        async with serving() as world:
            await world.ask("a", "b", "c")
            for name in "abc":
                await world.write(name)
            first = await world.client.claim_batch("t", "run", count=2, lease_seconds=5)
            assert [g.id for g in first.groups] == ["a", "b"]
            assert await world.client.acknowledge(first.claim, [models.Key(group="a")]) == 1
            world.clock["now"] = 6.0
            second = await world.client.claim_batch("t", "run", count=9)
            assert [g.id for g in second.groups] == ["b", "c"]
            assert await world.client.acknowledge(first.claim, [models.Key(group="b")]) == 0, "the lease is over"
            assert await world.client.give_back(second.claim) == 2
            third = await world.client.claim_batch("t", "run", count=9)
            assert await world.client.acknowledge(third.claim) == 2

    asyncio.run(body())


def test_a_reader_that_starts_again_does_not_wait_for_its_own_lease(serving):
    async def body():
        async with serving() as world:
            await world.ask("a")
            await world.write("a")
            await world.client.claim_batch("t", "run", lease_seconds=3600)
            assert (await world.client.claim_batch("t", "run")).groups == []
            again = await world.client.claim_batch("t", "run", restart=True)
            assert [g.id for g in again.groups] == ["a"]

    asyncio.run(body())


def test_runs_do_not_see_each_others_groups(serving):
    async def body():
        async with serving() as world:
            await world.ask("a", run="one")
            await world.ask("a", run="two")
            await world.write("a", run="two")
            assert (await world.client.claim_batch("t", "one")).groups == []
            assert len((await world.client.claim_batch("t", "two")).groups) == 1
            assert [w.run for w in await world.client.claim_work("g", run="one", count=9)] == ["one"]

    asyncio.run(body())


def test_group_ids_that_look_alike_stay_apart(serving):
    """In the ledger no group's samples begin with another group's id and a hyphen."""

    async def body():
        async with serving() as world:
            names = ["a", "a-0", "a-0-0", "a@0", "a@0-0", "a%2D0", "a/0", "../a", "a:b"]
            await world.ask(*names)
            await world.write("a")
            assert await world.states(state="open") == {(name, 0): "open" for name in names[1:]}
            for name in names[1:]:
                await world.write(name)
            claimed = await world.client.claim_batch("t", "run", count=99)
            assert [g.id for g in claimed.groups] == names
            assert all([s.sample for s in g.rollouts] == [f"{g.id}-0", f"{g.id}-1"] for g in claimed.groups)
            assert await world.client.acknowledge(claimed.claim) == len(names)

    asyncio.run(body())


def test_failed_rollouts_are_told_and_dropped_not_scored(serving):
    async def body():
        async with serving() as world:
            await world.ask("a", "b")
            await world.write("a", samples=[0])
            await world.write("a", samples=[1], failed="the tool crashed")
            await world.write("b", failed="no")
            a, b = (await world.client.claim_batch("t", "run", count=2)).groups
            assert [(len(r.sequences), r.failed) for r in a.rollouts] == [(1, ""), (0, "the tool crashed")]
            assert [r.failed for r in b.rollouts] == ["no", "no"]
            assert (await world.client.stats()).samples == {"issued": 4, "read": 0, "pending": 1, "dropped/failed": 3}

    asyncio.run(body())


@pytest.mark.parametrize("tell", [True, False])
def test_dropped_groups_have_a_reason_and_the_reader_is_told_if_it_wants(serving, tell):
    async def body():
        async with serving() as world:
            await world.ask("a", "b")
            await world.write("a")
            await world.write("b", samples=[0])
            await world.client.drop("run", [models.Key(group=n) for n in ("a", "b", "ghost")], "too late", tell=tell)
            groups = (await world.client.claim_batch("t", "run", count=9)).groups
            assert [(g.id, g.state, g.reason, g.rollouts) for g in groups] == (
                [(n, "dropped", "too late", []) for n in "ab"] if tell else []
            )
            assert (await world.write("b", samples=[1])).trajectories[0].state == "refused"
            assert await world.client.claim_work("g") == []
            assert (await world.client.stats()).samples == {
                "issued": 4,
                "read": 0,
                "pending": 0,
                "dropped/too late": 4,
            }

    asyncio.run(body())


def test_a_later_attempt_takes_the_place_of_an_earlier_one(serving):
    async def body():
        async with serving() as world:
            await world.ask("a", "b")
            await world.write("b")
            await world.ask("a", "b", attempt=1)
            assert (await world.write("a")).trajectories[0].state == "refused"
            await world.write("a", attempt=1)
            await world.write("b", attempt=1)
            groups = (await world.client.claim_batch("t", "run", count=9)).groups
            assert [(g.id, g.attempt) for g in groups] == [("a", 1), ("b", 1)]
            assert (await world.client.stats()).samples["dropped/restarted"] == 4

    asyncio.run(body())


def test_a_group_that_has_ended_is_claimed_again_where_its_run_asks_again(serving):
    async def body():
        async with serving() as world:
            await world.ask("a")
            await world.write("a")
            for _ in range(3):
                claimed = await world.client.claim_batch("t", "run")
                assert [g.rollouts[0].sequences[0].tokens for g in claimed.groups] == [[1, 2, 3, 10, 5]]
                assert await world.client.acknowledge(claimed.claim) == 1
                assert (await world.client.claim_batch("t", "run")).groups == []
                await world.ask("a")
            await world.client.drop("run", [models.Key(group="a")], "enough")
            assert (await world.client.stats()).samples == {"issued": 2, "read": 2, "pending": 0}

    asyncio.run(body())
