"""The ledger's files: durable, ours, small; damaged, full, taken away or killed, they are told or kept."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading

import pytest
from books import batch_of, ids_of, query

from durability.ledger_audit import audit
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.testing.contracts import sample_group
from slime_core.types import Group

pytestmark = pytest.mark.unit


def test_the_event_loop_runs_on_while_the_disk_is_slow(with_ledger, tmp_path):
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

    with_ledger(body)


def test_sqlite_is_durable_and_has_our_marks(with_ledger, tmp_path):
    async def body(ledger):
        call = ledger.commits.run
        assert await call(lambda: ledger.commits.db.execute("PRAGMA synchronous").fetchone()) == (2,)
        assert await call(lambda: ledger.commits.db.execute("PRAGMA journal_mode").fetchone()) == ("wal",)
        assert await call(lambda: threading.current_thread().name.startswith("ledger"))

    with_ledger(body)
    assert query(tmp_path, "PRAGMA user_version") == [(4,)]
    assert query(tmp_path, "PRAGMA application_id") == [(0x534C4D31,)]
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]


def test_no_sample_can_be_deleted(with_ledger, tmp_path):
    async def body(ledger):
        await ledger.issue([sample_group(0)])

    with_ledger(body)
    with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
        query(tmp_path, "DELETE FROM samples")


def test_a_payload_is_durable_before_the_commit_that_names_it(with_ledger, monkeypatch):
    events = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), sync(fd))[1])

    async def body(ledger):
        await ledger.finish(sample_group(0))
        await ledger.commits.run(lambda: ledger.commits.db.set_trace_callback(events.append))
        events.clear()
        await ledger.finish(sample_group(1))
        assert [e for e in events if e in ("fsync", "COMMIT")] == ["fsync", "COMMIT"]

    with_ledger(body)


def test_a_row_stays_under_300_bytes(with_ledger, tmp_path):
    groups = [sample_group(i) for i in range(400)]

    async def body(ledger):
        await ledger.issue(groups)
        for group in groups:
            for sample in group.samples:
                sample.reward = 0.123456789
        await asyncio.gather(*(ledger.finish(group) for group in groups))
        await ledger.journal(batch_of(0, ids_of(*groups)))
        await ledger.trained(1)

    with_ledger(body)
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
def test_a_file_that_is_not_this_ledger_is_refused(tmp_path, first, damage, code):
    if first == "ledger":
        asyncio.run(SqliteLedger(tmp_path).close())
    damage(tmp_path / "ledger.sqlite")
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert caught.value.code == code
    assert "ledger.sqlite" in caught.value.where
    assert caught.value.fix


def test_a_ledger_of_the_schema_before_is_gone_on_with(tmp_path):
    asyncio.run(SqliteLedger(tmp_path).close())
    script(
        tmp_path / "ledger.sqlite",
        "ALTER TABLE samples DROP COLUMN model;"
        "ALTER TABLE samples ADD COLUMN claim INTEGER; CREATE INDEX waiting ON samples (claim, serial) WHERE state = 1;"
        "CREATE TABLE claims (id INTEGER PRIMARY KEY, reader TEXT NOT NULL, state INTEGER NOT NULL DEFAULT 0) STRICT;"
        "CREATE TABLE applied (client TEXT, message INTEGER) STRICT; PRAGMA user_version = 2;",
    )

    async def body():
        ledger = SqliteLedger(tmp_path)
        group = sample_group(0)
        group.samples[1].model = "critic"
        await ledger.issue([group])
        await ledger.finish(group)
        await ledger.journal(batch_of(0, ids_of(group)))
        await ledger.trained(1)
        await ledger.rewind(0)
        await ledger.prune(1)
        assert dict(await ledger.counts()) == {"issued": 2, "trained": 0, "pending": 2}
        assert await audit(ledger) == []
        await ledger.close()

    asyncio.run(body())
    assert query(tmp_path, "SELECT model FROM samples ORDER BY serial") == [(None,), ("critic",)]


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert caught.value.code == "STO110"


def test_a_full_database_keeps_what_was_committed(with_ledger):
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

    assert with_ledger(body) == 1000


def test_a_damaged_segment_names_the_file(with_ledger, tmp_path):
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
        assert dict(await ledger.counts()) == {"issued": 2, "trained": 0, "pending": 2}

    with_ledger(body, sound=False)


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
from slime_core.ledger.ledger import SqliteLedger
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


def test_every_finished_group_survives_a_kill(with_ledger, tmp_path):
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

    with_ledger(body)
    assert query(tmp_path, "PRAGMA integrity_check") == [("ok",)]
