"""The ledger on disk: its contract, its rules, what survives a kill, and what damage is called."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest

from slime_core.buffer.ledger import SqliteLedger
from slime_core.errors import PluginError, StorageError
from slime_core.testing.contracts import LEDGER_CHECKS, sample_group
from slime_core.types import Batch, Drop, Group

pytestmark = pytest.mark.unit


def batch_of(version, ids):
    count = len(ids)
    empty = np.zeros(0)
    return Batch(
        version=version,
        sample_ids=list(ids),
        tasks=["default"] * count,
        group=np.zeros(count, np.int64),
        rollout=np.arange(count),
        reward=np.zeros(count),
        tokens=empty.astype(np.int32),
        offsets=np.zeros(count + 1, np.int64),
        loss_mask=empty.astype(np.float32),
        response_offsets=np.zeros(count + 1, np.int64),
    )


def ids_of(*groups):
    return [sample.id for group in groups for sample in group.samples]


@pytest.fixture
def use(tmp_path):
    """Run an async test body with a ledger, and check at its end that the books balance, row by row."""

    def run(body, *, folder=tmp_path):
        async def go():
            ledger = SqliteLedger(folder)
            try:
                answer = await body(ledger)
                counts = dict(await ledger.counts())
            finally:
                await ledger.close()
            assert counts == recount(folder)
            dropped = sum(count for name, count in counts.items() if name.startswith("dropped/"))
            assert counts["issued"] == counts["trained"] + counts["pending"] + dropped
            return answer

        return asyncio.run(go())

    return run


def recount(folder):
    """The counts by looking at every row."""
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        rows = db.execute("SELECT state, name FROM samples LEFT JOIN reasons ON reasons.id = reason").fetchall()
    db.close()
    counts = {"issued": len(rows), "trained": 0, "pending": 0}
    for state, reason in rows:
        name = ("pending", "pending", "trained", f"dropped/{reason}")[state]
        counts[name] = counts.get(name, 0) + 1
    return counts


def query(folder, text):
    db = sqlite3.connect(folder / "ledger.sqlite")
    try:
        return db.execute(text).fetchall()
    finally:
        db.close()


@pytest.mark.parametrize("check", LEDGER_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(use, check):
    use(check)


def test_everything_is_still_there_after_reopening(use):
    group = sample_group(0, fan_out=True)

    async def write(ledger):
        await ledger.issue([group, sample_group(1)])
        await ledger.finish(group)
        await ledger.drop([(sample_group(1).samples, Drop(reason="zero_std"))])
        await ledger.journal(batch_of(4, ids_of(group)))
        await ledger.trained(5, "f00d")

    async def read(ledger):
        assert await ledger.composition(5) == ids_of(group)
        back = await ledger.samples(ids_of(group))
        assert [s.to_dict() for s in back] == [s.to_dict() for s in group.samples]
        return dict(await ledger.counts())

    use(write)
    assert use(read) == {"issued": 5, "trained": 3, "pending": 0, "dropped/zero_std": 2}


def test_repeating_any_call_changes_nothing(use):
    group, other = sample_group(0), sample_group(1)

    async def body(ledger):
        for _ in range(3):
            await ledger.issue([group, other])
            await ledger.finish(group)
            await ledger.drop([(other.samples, Drop(reason="first"))])
            await ledger.journal(batch_of(0, ids_of(group)))
        for _ in range(3):
            await ledger.trained(1, "f00d")
            await ledger.issue([group, other])
            await ledger.finish(group)
        await ledger.drop([(other.samples, Drop(reason="second"))])
        return dict(await ledger.counts())

    assert use(body) == {"issued": 4, "trained": 2, "pending": 0, "dropped/first": 2}


def test_a_finished_payload_is_written_once(use, tmp_path):
    group = sample_group(0)

    async def body(ledger):
        await ledger.issue([group])
        await ledger.finish(group)
        size = (tmp_path / "segments" / "000001.seg").stat().st_size
        await ledger.finish(group)
        assert (tmp_path / "segments" / "000001.seg").stat().st_size == size

    use(body)


def refused(error, what):
    assert isinstance(error, StorageError)
    assert what in error.what, error
    assert error.where
    return True


@pytest.mark.parametrize(
    ("first", "then", "what"),
    [
        ("drop", "finish", "is dropped and cannot be finished"),
        ("train", "drop", "is trained and cannot be dropped"),
        ("train", "restart", "is trained and cannot be issued again"),
        ("drop", "journal", "is dropped and cannot be journaled"),
        ("issue", "journal", "is pending and cannot be journaled"),
        ("train", "journal", "is trained and cannot be journaled"),
    ],
)
def test_a_sample_leaves_its_state_only_forward(use, first, then, what):
    group = sample_group(0)

    async def act(ledger, name):
        if name in ("finish", "train"):
            await ledger.finish(group)
        if name == "train":
            await ledger.journal(batch_of(0, ids_of(group)))
            await ledger.trained(1)
        if name == "drop":
            await ledger.drop([(group.samples, Drop(reason="x"))])
        if name == "restart":
            again = sample_group(0)
            for sample in again.samples:
                sample.attempt = 1
            await ledger.issue([again])
        if name == "journal":
            await ledger.journal(batch_of(7, ids_of(group)))

    async def body(ledger):
        await ledger.issue([group])
        await act(ledger, first)
        before = dict(await ledger.counts())
        with pytest.raises(StorageError) as caught:
            await act(ledger, then)
        assert refused(caught.value, what)
        assert dict(await ledger.counts()) == before
        assert await ledger.composition(8) == []

    use(body)


def test_a_later_attempt_takes_the_place_of_an_open_one(use):
    old, new = sample_group(0), sample_group(0)
    for sample in new.samples:
        sample.attempt, sample.response = 1, "again"

    async def body(ledger):
        await ledger.issue([old])
        await ledger.finish(old)
        await ledger.issue([new])
        await ledger.finish(new)
        assert [s.response for s in await ledger.samples(ids_of(new))] == ["again", "again"]
        await ledger.issue([old])
        return dict(await ledger.counts())

    assert use(body) == {"issued": 4, "trained": 0, "pending": 2, "dropped/restarted": 2}


def test_fan_out_siblings_stand_for_the_sample_that_was_issued(use):
    """Rollout 1 was issued as main/7-1 and came back as two samples with other names; nothing stays pending for it."""
    issued, neighbour = sample_group(7), sample_group(70)
    done = sample_group(7, fan_out=True)
    done.samples[1].id, done.samples[2].id = "main/7-1.0", "main/7-1.1"

    async def body(ledger):
        await ledger.issue([issued, neighbour])
        await ledger.finish(done)
        return dict(await ledger.counts())

    assert use(body) == {"issued": 6, "trained": 0, "pending": 5, "dropped/replaced": 1}


def test_samples_that_were_never_issued_are_counted_when_they_are_dropped(use):
    async def body(ledger):
        await ledger.drop([(sample_group(0).samples, Drop(reason="infra_error"))])
        return dict(await ledger.counts())

    assert use(body) == {"issued": 2, "trained": 0, "pending": 0, "dropped/infra_error": 2}


def test_a_step_is_journaled_in_order_and_once(use):
    groups = [sample_group(i) for i in range(3)]
    order = list(reversed(ids_of(*groups)))

    async def body(ledger):
        await ledger.issue(groups)
        for group in groups:
            await ledger.finish(group)
        await ledger.journal(batch_of(0, order))
        await ledger.journal(batch_of(0, order))
        with pytest.raises(StorageError) as caught:
            await ledger.journal(batch_of(0, order[:4]))
        assert refused(caught.value, "another composition")
        assert await ledger.composition(1) == order
        with pytest.raises(StorageError) as caught:
            await ledger.journal(batch_of(1, [order[0], order[0]]))
        assert refused(caught.value, "twice")

    use(body)


def test_a_version_trains_only_what_was_journaled_and_with_one_fingerprint(use):
    group = sample_group(0)

    async def body(ledger):
        await ledger.issue([group])
        await ledger.finish(group)
        with pytest.raises(StorageError) as caught:
            await ledger.trained(1)
        assert refused(caught.value, "never journaled")
        await ledger.journal(batch_of(0, ids_of(group)))
        await ledger.trained(1, "f00d")
        with pytest.raises(StorageError) as caught:
            await ledger.trained(1, "beef")
        assert refused(caught.value, "other weights")

    use(body)


def test_a_payload_that_is_not_there_is_named(use):
    async def body(ledger):
        await ledger.issue([sample_group(0)])
        for name in ("main/0-0", "nobody"):
            with pytest.raises(StorageError, match=name):
                await ledger.samples([name])

    use(body)


def test_a_group_that_cannot_be_stored_leaves_no_trace(use):
    bad = sample_group(0)
    bad.samples[1].metadata["x"] = object()

    async def body(ledger):
        await ledger.issue([bad])
        with pytest.raises(PluginError, match="main/0-1"):
            await ledger.finish(bad)
        assert query(ledger.path.parent, "SELECT count(*) FROM samples WHERE segment IS NOT NULL") == [(0,)]
        return dict(await ledger.counts())

    assert use(body) == {"issued": 2, "trained": 0, "pending": 2}


def test_arrays_lie_beside_the_samples_that_refer_to_them(use, tmp_path):
    group = sample_group(0)
    experts = np.arange(30, dtype=np.int16).reshape(5, 3, 2)

    async def body(ledger):
        for sample in group.samples:
            sample.rollout_routed_experts = ledger.segments.write_array(experts)
        await ledger.issue([group])
        await ledger.finish(group)
        (back,) = await ledger.samples(["main/0-1"])
        assert np.array_equal(ledger.segments.read_array(back.rollout_routed_experts), experts)

    use(body)


def test_the_event_loop_runs_on_while_the_disk_is_slow(use, tmp_path):
    """Another connection holds the write lock until the loop has turned; a ledger on the loop's thread would hang."""
    group = sample_group(0)

    async def body(ledger):
        other = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.ensure_future(ledger.issue([group]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        other.execute("ROLLBACK")
        other.close()
        await waiting

    use(body)


def test_sqlite_is_durable_and_has_our_marks(use, tmp_path):
    async def body(ledger):
        call = ledger.commits.run
        assert await call(lambda: ledger.commits.db.execute("PRAGMA synchronous").fetchone()) == (2,)
        assert await call(lambda: ledger.commits.db.execute("PRAGMA journal_mode").fetchone()) == ("wal",)
        assert await call(lambda: threading.current_thread().name.startswith("ledger"))

    use(body)
    assert query(tmp_path, "PRAGMA user_version") == [(2,)]
    assert query(tmp_path, "PRAGMA application_id") == [(0x534C4D31,)]
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]


def test_no_sample_can_be_deleted(use, tmp_path):
    async def body(ledger):
        await ledger.issue([sample_group(0)])

    use(body)
    with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
        query(tmp_path, "DELETE FROM samples")


def test_groups_that_finish_together_share_a_transaction_and_fail_alone(use):
    groups = [sample_group(i) for i in range(20)]
    groups[7].samples[0].metadata["x"] = object()
    commits = []

    async def body(ledger):
        await ledger.issue(groups)
        await ledger.drop([(groups[3].samples, Drop(reason="x"))])
        await ledger.commits.run(
            lambda: ledger.commits.db.set_trace_callback(lambda text: commits.append(text == "COMMIT"))
        )
        answers = await asyncio.gather(*(ledger.finish(group) for group in groups), return_exceptions=True)
        failed = {i: type(answer) for i, answer in enumerate(answers) if answer is not None}
        assert failed == {3: StorageError, 7: PluginError}
        stored = [i for i in range(20) if i not in failed]
        back = await ledger.samples(ids_of(*(groups[i] for i in stored)))
        assert [s.to_dict() for s in back] == [s.to_dict() for i in stored for s in groups[i].samples]
        return dict(await ledger.counts())

    assert use(body) == {"issued": 40, "trained": 0, "pending": 38, "dropped/x": 2}
    assert 1 <= sum(commits) < 10


def test_a_payload_is_durable_before_the_commit_that_names_it(use, monkeypatch):
    events = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), sync(fd))[1])

    async def body(ledger):
        await ledger.finish(sample_group(0))
        await ledger.commits.run(lambda: ledger.commits.db.set_trace_callback(events.append))
        events.clear()
        await ledger.finish(sample_group(1))
        assert [e for e in events if e in ("fsync", "COMMIT")] == ["fsync", "COMMIT"]

    use(body)


def test_a_row_stays_under_300_bytes(use, tmp_path):
    groups = [sample_group(i) for i in range(400)]

    async def body(ledger):
        await ledger.issue(groups)
        for group in groups:
            for sample in group.samples:
                sample.reward = 0.123456789
        await asyncio.gather(*(ledger.finish(group) for group in groups))
        await ledger.journal(batch_of(0, ids_of(*groups)))
        await ledger.trained(1)

    use(body)
    ((pages, size),) = query(tmp_path, "SELECT page_count, page_size FROM pragma_page_count, pragma_page_size")
    assert pages * size / 800 < 300


def script(path, text):
    db = sqlite3.connect(path)
    db.executescript(text)
    db.close()


@pytest.mark.parametrize(
    ("first", "damage", "code"),
    [
        ("nothing", lambda path: path.write_bytes(b"this is not a database, whatever it is called" * 100), "STO117"),
        ("nothing", lambda path: script(path, "CREATE TABLE t (x);"), "STO113"),
        ("ledger", lambda path: script(path, "PRAGMA user_version = 99;"), "STO113"),
    ],
    ids=["no database", "another program's", "a later schema"],
)
def test_113_117_a_file_that_is_not_this_ledger_is_refused(tmp_path, first, damage, code):
    if first == "ledger":
        asyncio.run(SqliteLedger(tmp_path).close())
    damage(tmp_path / "ledger.sqlite")
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert caught.value.code == code
    assert "ledger.sqlite" in caught.value.where
    assert caught.value.fix


def test_110_a_run_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert caught.value.code == "STO110"


def test_109_a_full_database_keeps_what_was_committed(use):
    groups = [sample_group(i) for i in range(500)]

    async def body(ledger):
        await ledger.issue(groups[:1])
        await ledger.commits.run(lambda: ledger.commits.db.execute("PRAGMA max_page_count = 20"))
        with pytest.raises(StorageError) as caught:
            await ledger.issue(groups[1:])
        assert caught.value.code == "STO109"
        assert "slime run --resume" in caught.value.fix
        assert dict(await ledger.counts()) == {"issued": 2, "trained": 0, "pending": 2}
        await ledger.commits.run(lambda: ledger.commits.db.execute("PRAGMA max_page_count = 100000"))
        await ledger.issue(groups)
        return (await ledger.counts())["issued"]

    assert use(body) == 1000


def test_112_a_damaged_segment_names_the_file(use, tmp_path):
    group = sample_group(0)

    async def body(ledger):
        await ledger.issue([group])
        await ledger.finish(group)
        path = tmp_path / "segments" / "000001.seg"
        data = bytearray(path.read_bytes())
        data[-1] ^= 0xFF
        path.write_bytes(data)
        assert len(await ledger.samples(["main/0-0"])) == 1
        with pytest.raises(StorageError) as caught:
            await ledger.samples(["main/0-1"])
        assert caught.value.code == "STO112"

    use(body)


def test_a_closed_ledger_says_so_and_closes_twice(tmp_path):
    async def body():
        ledger = SqliteLedger(tmp_path)
        await ledger.close()
        await ledger.close()
        with pytest.raises(StorageError, match="closed"):
            await ledger.counts()

    asyncio.run(body())


KILLED = """
import asyncio, sys
from pathlib import Path
from slime_core.buffer.ledger import SqliteLedger
from slime_core.testing.contracts import sample_group

async def main():
    ledger = SqliteLedger(Path(sys.argv[1]))
    for position in range(100_000):
        group = sample_group(position)
        await ledger.issue([group])
        await ledger.finish(group)
        print(position, flush=True)

asyncio.run(main())
"""


def test_every_finished_group_survives_a_kill(use, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    done = -1
    for _ in range(40):
        done = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    done = int(rest[-1]) if rest else done

    async def body(ledger):
        ids = [name for position in range(done + 1) for name in ids_of(sample_group(position))]
        back = await ledger.samples(ids)
        wanted = [s for position in range(done + 1) for s in sample_group(position).samples]
        assert [s.to_dict() for s in back] == [s.to_dict() for s in wanted]
        again = Group(prompt=sample_group(done).prompt, samples=sample_group(done).samples, rollouts={})
        await ledger.finish(again)

    use(body)
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]
