"""Outside readers: a group is with one of them at a time, and trained when it was acknowledged."""

import asyncio

import pytest

from slime_core.buffer.claims import Claims
from slime_core.errors import StorageError
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop, Group

pytestmark = pytest.mark.unit


@pytest.fixture
def desk(with_ledger):
    """Run ``body(ledger, claims, clock)`` with six issued groups, the first four of them finished."""

    def run(body):
        async def go(ledger):
            now = [100.0]
            groups = [sample_group(i) for i in range(6)]
            await ledger.issue(groups)
            for group in groups[:4]:
                await ledger.finish(group)
            return await body(ledger, Claims(ledger, lambda: now[0]), now)

        return with_ledger(go)

    return run


def test_readers_share_the_finished_groups_oldest_first(desk):
    async def body(ledger, claims, now):
        answers = await asyncio.gather(*(claims.claim(f"reader {i}", 1, 60) for i in range(5)))
        assert [list(answer.groups) for answer in answers[:4]] == [["main/0"], ["main/1"], ["main/2"], ["main/3"]]
        assert answers[4] is None
        samples = answers[1].groups["main/1"]
        assert [s.to_dict() for s in samples] == [s.to_dict() for s in sample_group(1).samples]

    desk(body)


def test_acknowledged_groups_have_trained_and_saying_so_again_changes_nothing(desk):
    async def body(ledger, claims, now):
        claim = await claims.claim("a", 3, 60)
        assert (await ledger.counts())["trained"] == 0
        for _ in range(2):
            await claims.ack(claim.id)
            assert dict(await ledger.counts()) == {"issued": 12, "trained": 6, "pending": 6}
        assert list((await claims.claim("b", 9, 60)).groups) == ["main/3"]
        with pytest.raises(StorageError, match="is acknowledged"):
            await claims.release(claim.id)

    desk(body)


def test_what_was_given_back_goes_to_the_next_reader(desk):
    async def body(ledger, claims, now):
        claim = await claims.claim("a", 2, 60)
        await claims.release(claim.id)
        await claims.release(claim.id)
        assert list((await claims.claim("b", 9, 60)).groups) == ["main/0", "main/1", "main/2", "main/3"]
        with pytest.raises(StorageError, match="given back"):
            await claims.ack(claim.id)

    desk(body)


def test_a_lease_that_ran_out_gives_the_groups_to_the_next_reader(desk):
    async def body(ledger, claims, now):
        first = await claims.claim("a", 4, 60)
        now[0] += 59
        assert await claims.claim("b", 1, 60) is None
        await claims.renew(first.id, 60)
        now[0] += 59
        assert await claims.claim("b", 1, 60) is None
        now[0] += 1
        assert list((await claims.claim("b", 1, 60)).groups) == ["main/0"]
        for late in (claims.ack(first.id), claims.renew(first.id, 60)):
            with pytest.raises(StorageError, match="lease ran out"):
                await late

    desk(body)


def test_a_late_acknowledgement_is_taken_while_nobody_else_has_the_groups(desk):
    async def body(ledger, claims, now):
        claim = await claims.claim("a", 4, 60)
        now[0] += 1000
        await claims.ack(claim.id)
        assert (await ledger.counts())["trained"] == 8

    desk(body)


def test_after_a_restart_open_claims_have_run_out(desk):
    async def body(ledger, claims, now):
        first = await claims.claim("a", 2, 1e9)
        again = Claims(ledger, lambda: now[0])
        second = await again.claim("b", 9, 60)
        assert list(second.groups) == ["main/0", "main/1", "main/2", "main/3"]
        assert second.id != first.id
        with pytest.raises(StorageError, match="lease ran out"):
            await again.ack(first.id)

    desk(body)


def test_groups_that_are_not_whole_are_not_given(desk):
    """One sample of a group is still on its way; of another group a part was dropped, and the rest is given."""

    async def body(ledger, claims, now):
        part, rest = sample_group(4), sample_group(5)
        await ledger.commits.run(lambda: ledger.rows._store(4, 0, part.samples[0], ledger.segments.append([b"x"])))
        kept = Group(prompt=rest.prompt, samples=rest.samples[1:], rollouts={11: [0]})
        await ledger.finish(kept, [(rest.samples[:1], Drop(reason="infra_error"))])
        claim = await claims.claim("a", 9, 60)
        assert list(claim.groups) == ["main/0", "main/1", "main/2", "main/3", "main/5"]
        assert [s.id for s in claim.groups["main/5"]] == ["main/5-1"]

    desk(body)


def test_a_claimed_group_is_neither_dropped_nor_journaled_nor_restarted(desk):
    async def body(ledger, claims, now):
        await claims.claim("a", 1, 60)
        group, again = sample_group(0), sample_group(0)
        for sample in again.samples:
            sample.attempt = 1
        for call in (
            ledger.drop([(group.samples, Drop(reason="x"))]),
            ledger.issue([again]),
            ledger.journal_step(1, "main", [s.id for s in group.samples]),
        ):
            with pytest.raises(StorageError, match="with a reader"):
                await call

    desk(body)


def test_peeking_takes_nothing(desk):
    async def body(ledger, claims, now):
        assert list(await claims.peek(2)) == ["main/0", "main/1"]
        assert list((await claims.claim("a", 2, 60)).groups) == ["main/0", "main/1"]
        assert list(await claims.peek(9)) == ["main/2", "main/3"]

    desk(body)


def test_a_claim_that_nobody_made_is_refused(desk):
    async def body(ledger, claims, now):
        with pytest.raises(StorageError, match="no claim 77"):
            await claims.ack(77)

    desk(body)


def test_payloads_of_acknowledged_groups_are_pruned(desk):
    async def body(ledger, claims, now):
        await claims.ack((await claims.claim("a", 1, 60)).id)
        await claims.claim("b", 1, 60)
        await ledger.prune(0)
        with pytest.raises(StorageError, match="main/0-0"):
            await ledger.samples(["main/0-0"])
        assert len(await ledger.samples(["main/1-0", "main/2-0"])) == 2

    desk(body)
