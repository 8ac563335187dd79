"""A damaged ledger, or one without its write-ahead log, is refused; a checkpoint's copy takes its place."""

import asyncio
import hashlib
import shutil
import sqlite3

import pytest

from durability.ledger_audit import audit
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.ledger.repair import main, newest_copy, repair
from slime_core.ledger.schema import own_folder
from slime_core.testing.contracts import sample_group

pytestmark = pytest.mark.unit


async def fill(ledger, first, last):
    for position in range(first, last):
        await ledger.issue([sample_group(position)])
        await ledger.finish(sample_group(position))


def run_with_checkpoints(folder, *, ledger_dir=""):
    """Five groups, a copy at step 3, three more groups, a copy at step 12, two more groups; answers the copies."""

    async def body():
        ledger = SqliteLedger(folder, ledger_dir)
        copies = []
        for step, first, last in ((3, 0, 5), (12, 5, 8)):
            await fill(ledger, first, last)
            copy = folder / "checkpoints" / f"step-{step}" / "ledger.sqlite"
            copy.parent.mkdir(parents=True)
            mark = await ledger.backup(copy)
            data = copy.read_bytes()
            assert (mark.size, mark.sha256) == (len(data), hashlib.sha256(data).hexdigest())
            copies.append(copy)
        await fill(ledger, 8, 10)
        await ledger.close()
        return copies

    return asyncio.run(body())


def issued(folder, ledger_dir=""):
    async def body():
        ledger = SqliteLedger(folder, ledger_dir)
        try:
            assert await audit(ledger) == []
            return (await ledger.counts())["issued"]
        finally:
            await ledger.close()

    return asyncio.run(body())


def flip_page(path, table="samples"):
    """Damage the page at which a table's tree begins."""
    db = sqlite3.connect(path)
    ((root,),) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchall()
    db.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * 4096)
        file.write(b"\xff" * 600)


def test_a_copy_holds_what_was_committed_and_is_one_file(tmp_path):
    first, _ = run_with_checkpoints(tmp_path)
    assert [path.name for path in first.parent.iterdir()] == ["ledger.sqlite"]
    with sqlite3.connect(first) as db:
        assert db.execute("SELECT count(*) FROM samples WHERE state = 1").fetchone() == (10,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    db.close()
    assert not list(tmp_path.glob(".*"))


def test_a_corrupt_page_is_refused_and_the_newest_copy_takes_its_place(tmp_path, capsys):
    run_with_checkpoints(tmp_path)
    flip_page(tmp_path / "ledger.sqlite")
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert caught.value.code == "STO117"
    assert "slime run --resume" in caught.value.fix
    assert main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "16 samples" in told
    assert "4 rows were newer" in told
    assert (tmp_path / "corrupt-1-ledger.sqlite").exists()
    assert issued(tmp_path) == 16


@pytest.mark.parametrize("table", ["tally", "members", "sqlite_autoindex_samples_1"])
def test_damage_is_noticed_where_nothing_has_been_read_yet(tmp_path, table):
    run_with_checkpoints(tmp_path)
    flip_page(tmp_path / "ledger.sqlite", table)
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert caught.value.code == "STO117"


def test_a_write_ahead_log_that_was_removed_is_noticed(tmp_path):
    """Killed with commits in the log, which somebody then took for rubbish."""
    run, dead = tmp_path / "run", tmp_path / "dead"

    async def body():
        ledger = SqliteLedger(run)
        await fill(ledger, 0, 30)
        shutil.copytree(run, dead)  # as it lies there at the moment of a kill
        await ledger.close()

    asyncio.run(body())
    whole = shutil.copytree(dead, tmp_path / "whole")
    assert issued(whole) == 60
    (dead / "ledger.sqlite-wal").unlink()
    (dead / "ledger.sqlite-shm").unlink()
    with pytest.raises(StorageError) as caught:
        SqliteLedger(dead)
    assert caught.value.code == "STO117"
    assert "60" in caught.value.why
    assert "-wal" in caught.value.why


def test_an_older_file_in_its_place_is_noticed(tmp_path):
    first, _ = run_with_checkpoints(tmp_path)
    shutil.copy(first, tmp_path / "ledger.sqlite")
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert "has lost commits" in caught.value.what


def test_a_ledger_that_is_gone_is_not_begun_anew(tmp_path):
    run_with_checkpoints(tmp_path)
    (tmp_path / "ledger.sqlite").unlink()
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path)
    assert caught.value.code == "STO117"
    assert not (tmp_path / "ledger.sqlite").exists()
    assert main([str(tmp_path)]) == 0
    assert issued(tmp_path) == 16


def test_a_copy_by_name_and_a_ledger_elsewhere(tmp_path):
    run, local = tmp_path / "run", tmp_path / "local"
    first, _ = run_with_checkpoints(run, ledger_dir=local)
    shutil.rmtree(local)  # another machine
    done = repair(run, first, local)
    assert (done.path.parent, done.rows, done.newer, done.damaged) == (own_folder(run, local), 10, None, ())
    assert issued(run, local) == 10


def test_repairing_twice_keeps_both(tmp_path):
    first, second = run_with_checkpoints(tmp_path)
    assert repair(tmp_path, second).newer == 4
    assert repair(tmp_path, first).newer == 6
    assert {path.name for path in tmp_path.glob("corrupt-*")} == {"corrupt-1-ledger.sqlite", "corrupt-2-ledger.sqlite"}


def test_a_copy_that_is_damaged_too_is_refused_and_nothing_changes(tmp_path, capsys):
    _, newest = run_with_checkpoints(tmp_path)
    flip_page(newest, "tally")
    before = (tmp_path / "ledger.sqlite").read_bytes()
    assert main([str(tmp_path)]) == 7
    assert "STO117" in capsys.readouterr().err
    newest.write_bytes(b"nothing of ours")
    assert main([str(tmp_path)]) == 7
    assert (tmp_path / "ledger.sqlite").read_bytes() == before
    assert issued(tmp_path) == 20


def test_a_ledger_in_use_is_not_repaired(tmp_path):
    first, _ = run_with_checkpoints(tmp_path)

    async def body():
        ledger = SqliteLedger(tmp_path)
        with pytest.raises(StorageError) as caught:
            repair(tmp_path, first)
        assert caught.value.code == "STO116"
        await ledger.close()

    asyncio.run(body())


def test_the_newest_copy_is_that_of_the_highest_step(tmp_path, capsys):
    assert main([str(tmp_path)]) == 7
    assert "no checkpoint has a copy" in capsys.readouterr().err
    run_with_checkpoints(tmp_path)
    assert newest_copy(tmp_path).parent.name == "step-12"
