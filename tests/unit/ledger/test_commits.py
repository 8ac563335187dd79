"""Group commit: calls that wait together share a transaction, keep their order and fail alone."""

import asyncio
import sqlite3
import threading
from types import SimpleNamespace

import pytest

from durability.ledger_audit import audit
from slime_core.errors import StorageError
from slime_core.ledger import commits as module
from slime_core.ledger.ledger import SqliteLedger
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop

pytestmark = pytest.mark.unit


@pytest.fixture
def use(tmp_path):
    """Run an async body with a ledger; it is closed whatever happens."""

    def run(body):
        async def go():
            ledger = SqliteLedger(tmp_path)
            try:
                return await body(ledger)
            finally:
                await ledger.close()

        return asyncio.run(go())

    return run


async def commits_of(ledger):
    seen = []
    await ledger.commits.run(lambda: ledger.commits.db.set_trace_callback(lambda text: seen.append(text)))
    seen.clear()  # of its own commit
    return seen


def test_eight_writers_share_their_commits(use):
    groups = [sample_group(i) for i in range(80)]

    async def body(ledger):
        await ledger.issue(groups)
        seen = await commits_of(ledger)

        async def writer(mine):
            for group in mine:
                await ledger.finish(group)

        await asyncio.gather(*(writer(groups[i::8]) for i in range(8)))
        return seen.count("COMMIT")

    assert use(body) <= 20, "eighty calls, eight at a time"


def test_a_lone_call_is_a_transaction_of_its_own_and_waits_for_no_timer(use, monkeypatch):
    """With a clock that stands still a timer would never fire; the call is answered all the same."""
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))

    async def body(ledger):
        seen = await commits_of(ledger)
        for position in range(3):
            await ledger.issue([sample_group(position)])
        return seen.count("COMMIT")

    assert use(body) == 3


def test_a_transaction_takes_256_rows_and_5_milliseconds_at_most(use, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def body(ledger):
        seen = await commits_of(ledger)
        await asyncio.gather(*(ledger.commits.run(lambda: None, rows=100) for _ in range(5)))
        by_rows = seen.count("COMMIT")

        late = []

        def slow():
            now[0] += 0.006
            if len(late) < 3:  # comes while this transaction works
                late.append(asyncio.run_coroutine_threadsafe(ledger.commits.run(slow), loop))
                while not ledger.commits._waiting:
                    pass

        loop = asyncio.get_running_loop()
        await asyncio.gather(*(ledger.commits.run(lambda: now.append(0)) for _ in range(4)))
        together = seen.count("COMMIT") - by_rows
        await ledger.commits.run(slow)
        while len(late) < 3 or not all(call.done() for call in late):
            await asyncio.sleep(0)
        return by_rows, together, seen.count("COMMIT") - by_rows - together

    assert use(body) == (3, 1, 4), "by rows; what waits together; what comes later than 5 ms"


def test_calls_keep_their_order(use):
    order = []

    async def body(ledger):
        async def call(number):
            await ledger.commits.run(lambda: order.append(number))

        await asyncio.gather(*(call(number) for number in range(700)))

    use(body)
    assert order == list(range(700))


def test_an_answer_comes_after_the_commit_a_readers_too(use, tmp_path):
    """Another connection sees every row of an answer at the moment at which the answer is there."""
    groups = [sample_group(i) for i in range(30)]

    async def body(ledger):
        other = sqlite3.connect(ledger.path)
        counts = []

        async def read():
            counts.append(
                ((await ledger.counts())["issued"], *other.execute("SELECT count(*) FROM samples").fetchone())
            )

        for group in groups:
            await asyncio.gather(ledger.issue([group]), read())
        other.close()
        return counts

    assert all(told <= seen for told, seen in use(body))


def test_a_call_that_breaks_the_whole_transaction_fails_alone(use, tmp_path):
    """A full database rolls everything back by itself: the other calls of that transaction are made again."""
    small, large = [sample_group(i) for i in range(3)], [sample_group(i) for i in range(10, 130)]

    async def body(ledger):
        db = ledger.commits.db
        (pages,) = await ledger.commits.run(lambda: db.execute("PRAGMA page_count").fetchone())
        await ledger.commits.run(lambda: db.execute(f"PRAGMA max_page_count = {pages + 2}"))
        calls = [ledger.issue([small[0]]), ledger.issue(small[1:2]), ledger.issue(large), ledger.issue(small[2:])]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(a) for a in answers] == [type(None), type(None), StorageError, type(None)]
        assert answers[2].code == "STO109"
        assert (await ledger.counts())["issued"] == 6
        assert await audit(ledger) == []

    use(body)


def test_a_call_that_was_taken_back_before_it_began_changes_nothing(use):
    """One that has begun goes on, and nobody waits for its answer."""
    gate = threading.Event()

    async def body(ledger):
        busy = asyncio.ensure_future(ledger.commits.run(gate.wait))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(ledger.issue([sample_group(0)]))
        staying = asyncio.ensure_future(ledger.issue([sample_group(1)]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        gate.set()
        await asyncio.gather(busy, staying)
        return list(await ledger.groups(["main/0", "main/1"]))

    assert use(body) == ["main/1"]


def test_waiting_calls_are_written_when_the_ledger_closes(tmp_path):
    async def body():
        ledger = SqliteLedger(tmp_path)
        waiting = [asyncio.ensure_future(ledger.issue([sample_group(i)])) for i in range(20)]
        await asyncio.sleep(0)
        await ledger.close()
        await asyncio.gather(*waiting)
        again = SqliteLedger(tmp_path)
        counts = await again.counts()
        await again.close()
        return counts["issued"]

    assert asyncio.run(body()) == 40


def test_drops_and_their_reasons_survive_a_neighbour_that_fails(use):
    """A reason that was first named in a call that failed is named again by the next one."""
    groups = [sample_group(i) for i in range(3)]

    async def body(ledger):
        await ledger.issue(groups)
        bad = Drop(reason="new")
        trained = sample_group(9)
        await ledger.finish(trained)
        await ledger.commits.run(
            lambda: ledger.commits.db.execute("UPDATE samples SET step = 1 WHERE id = 'main/9-1'")
        )
        calls = [ledger.drop([(trained.samples, bad)]), ledger.drop([(groups[0].samples, bad)])]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(a) for a in answers] == [StorageError, type(None)]
        return dict(await ledger.counts())

    assert use(body) == {"issued": 8, "trained": 0, "pending": 6, "dropped/new": 2}
