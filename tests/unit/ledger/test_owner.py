"""One process owns a ledger; another one is refused by name, whoever has an old owner's pid now."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys

import pytest

from slime_core.errors import StorageError
from slime_core.ledger.commits import LOCK, Owner, start_of
from slime_core.ledger.ledger import SqliteLedger
from slime_core.testing.contracts import sample_group

pytestmark = pytest.mark.unit

HOLDER = """
import asyncio, sys
from pathlib import Path
from slime_core.ledger.ledger import SqliteLedger

ledger = SqliteLedger(Path(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""
LOCKER = """
import sqlite3, sys

db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


def child(text, *args):
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def end(process):
    process.communicate()


def refused(folder):
    with pytest.raises(StorageError) as caught:
        SqliteLedger(folder)
    assert caught.value.code == "STO116"
    assert "ledger.sqlite" in caught.value.where
    return caught.value


def test_a_second_process_is_refused_and_the_first_is_named(tmp_path):
    holder = child(HOLDER, tmp_path)
    try:
        assert holder.stdout.readline() == "open\n"
        error = refused(tmp_path)
        assert f"process {holder.pid} on" in error.what
        assert f"stop process {holder.pid}" in error.fix
    finally:
        end(holder)
    asyncio.run(SqliteLedger(tmp_path).close())


def test_a_foreign_program_that_locks_the_database_is_named(with_ledger, tmp_path):
    async def body(ledger):
        await ledger.issue([sample_group(0)])
        await ledger.commits.run(lambda: ledger.commits.db.execute("PRAGMA busy_timeout = 50"))
        other = child(LOCKER, ledger.path)
        try:
            assert await asyncio.to_thread(other.stdout.readline) == "locked\n"
            with pytest.raises(StorageError) as caught:
                await ledger.issue([sample_group(1)])
            assert caught.value.code == "STO116"
            assert str(other.pid) in caught.value.why
            assert str(other.pid) in caught.value.fix
        finally:
            await asyncio.to_thread(end, other)
        await ledger.issue([sample_group(1)])
        return (await ledger.counts())["issued"]

    assert with_ledger(body) == 4


def test_a_file_left_by_a_dead_process_blocks_nobody_even_if_its_pid_lives_again(tmp_path):
    """The pid in the file is this very process's; the start time is not."""
    left = {"pid": os.getpid(), "started": start_of(os.getpid()) - 1000, "host": "here"}
    (tmp_path / LOCK).write_text(json.dumps(left))
    asyncio.run(SqliteLedger(tmp_path).close())


def test_a_lock_whose_owner_has_ended_is_not_blamed_on_who_has_its_pid_now(tmp_path):
    """A child inherited the lock: to stop the process that has the old number would hit a stranger."""
    owner = Owner(tmp_path / "ledger.sqlite")
    owner._holder["started"] -= 1
    owner.note(0, 0)
    error = refused(tmp_path)
    assert "a child of process" in error.what
    assert "has ended" in error.what
    assert "stop process" not in error.fix
    owner.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff" * 600, b'{"serial": "many"}'])
def test_a_lock_file_that_says_nothing_is_no_obstacle(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    asyncio.run(SqliteLedger(tmp_path).close())


def test_the_start_of_a_process_is_known_and_of_no_process_is_not():
    assert start_of(os.getpid()) > 0
    assert start_of(2**22 + 1) == 0


def test_a_lock_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert "cannot be locked" in caught.value.what


def test_a_ledger_that_cannot_be_opened_lets_go_of_its_lock(tmp_path):
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 1000)
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            SqliteLedger(tmp_path)
        assert caught.value.code == "STO117"


def test_closing_lets_the_next_owner_in(tmp_path):
    for _ in range(3):
        asyncio.run(SqliteLedger(tmp_path).close())
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        assert db.execute("SELECT count(*) FROM samples").fetchone() == (0,)
    db.close()
