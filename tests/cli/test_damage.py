"""`slime run --resume` where the ledger or a segment is damaged: named, and made again to the same weights."""

import asyncio
import hashlib
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from durability.ledger_audit import audit
from slime_cli.main import main
from slime_core import failpoints
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.report import RunDir, history

pytestmark = pytest.mark.integration


def weights(path):
    return hashlib.sha256((Path(path) / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def runs(make_own, tmp_path_factory):
    """A whole run, and one that ended after its fourth step; its checkpoint is of the second."""
    folder, flags = tmp_path_factory.mktemp("runs"), [*map(str, make_own().flags), "--no-async-save"]
    assert main(["run", *flags, "--run-dir", str(folder / "whole")]) == 0
    failpoints.arm("loop.reported:4=raise")
    try:
        assert main(["run", *flags, "--run-dir", str(folder / "cut")]) == 7
    finally:
        failpoints.arm("")
    return folder


@pytest.fixture
def cut(runs, tmp_path):
    """A copy of the run that ended."""
    return Path(shutil.copytree(runs / "cut", tmp_path / "cut"))


def audited(path):
    """What is wrong with a ledger."""

    async def look():
        ledger = SqliteLedger(path)
        try:
            return await audit(ledger)
        finally:
            await ledger.close()

    return asyncio.run(look())


def remove(path):
    path.unlink()


def flip(path):
    """Overwrite the end of every page but the first: rows are there, the middle of a page may be free."""
    data = bytearray(path.read_bytes())
    for end in range(2 * 4096, len(data) + 1, 4096):
        data[end - 600 : end] = b"\xff" * 600
    path.write_bytes(data)


def shorten(path):
    """Cut the last samples off."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 8 // 10])


@pytest.mark.parametrize("damage", [remove, flip])
def test_a_checkpoints_copy_takes_the_place_of_a_damaged_ledger(cli, runs, cut, damage):
    damage(cut / "ledger.sqlite")
    with pytest.raises(StorageError, match="STO117") as caught:
        SqliteLedger(cut)
    words = re.match(r"slime (run --resume \S+)", caught.value.fix)[1].split()
    done = cli(*words)
    assert done.code == 0, done.err
    assert f"DAMAGED LEDGER {cut}/ledger.sqlite" in done.err
    assert "The copy of checkpoint 2 takes its place" in done.err
    assert weights(cut) == weights(runs / "whole")
    assert history.states(RunDir(cut)) == {"issued": 16, "trained": 16, "pending": 0}
    assert audited(cut) == []


@pytest.mark.parametrize(("damage", "begin"), [(shorten, 4), (remove, 3)])
def test_samples_that_cannot_be_read_are_generated_again(cli, runs, cut, damage, begin):
    (segment,) = cut.glob("segments/*.seg")
    damage(segment)
    with closing(sqlite3.connect(cut / "ledger.sqlite")) as db:
        (last,) = db.execute("SELECT id FROM samples ORDER BY segment DESC, offset DESC LIMIT 1").fetchone()

    async def read():
        ledger = SqliteLedger(cut)
        try:
            with pytest.raises(StorageError, match=r"STO11[12]") as caught:
                await ledger.samples([last])
            return caught.value
        finally:
            await ledger.close()

    words = re.search(r"slime (run --resume \S+)", asyncio.run(read()).fix)[1].split()
    done = cli(*words)
    assert done.code == 0, done.err
    assert f"DAMAGED SEGMENT {segment}: sample main/" in done.err
    assert f"the steps from version {begin} on train again" in done.err
    assert weights(cut) == weights(runs / "whole")
    assert history.states(RunDir(cut)) == {"issued": 16, "trained": 16, "pending": 0}
    if damage is not remove:
        assert audited(cut) == []


def test_a_damaged_ledger_without_a_checkpoint_is_refused(cli, cut):
    shutil.rmtree(cut / "checkpoints")
    flip(cut / "ledger.sqlite")
    done = cli("run", "--resume", cut)
    assert done.code == 7
    assert "error STO117" in done.err
    assert "there is no checkpoint" in done.err
    assert "fix: put the file back, or start another run" in done.err
