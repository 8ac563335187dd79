"""What the disk does to a ledger: full, read-only, no more files, broken. Nothing that was committed is lost."""

import asyncio
import errno
import os
import resource
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from durability.ledger_audit import audit
from durability.ledger_contract import suspended_turns
from slime_core import durable
from slime_core.durable import Disk
from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger
from slime_core.testing.contracts import sample_group
from slime_core.types import Drop

pytestmark = pytest.mark.unit


class Faulty(Disk):
    """A disk whose call ``name`` fails once with ``number``, the ``nth`` time."""

    def __init__(self, name, number, nth=1):
        self.left = nth

        def fail(*args):
            self.left -= 1
            if self.left == 0:
                raise OSError(number, os.strerror(number))
            return getattr(Disk, name)(self, *args)

        setattr(self, name, fail)


async def fill(ledger, first, last):
    for position in range(first, last):
        await ledger.issue([sample_group(position)])
        await ledger.finish(sample_group(position))


async def refused(call, code):
    with pytest.raises(StorageError) as caught:
        await call
    assert caught.value.code == code, caught.value
    assert caught.value.where
    assert caught.value.fix
    return caught.value


@contextmanager
def small_disk(folder):
    """Two MiB and a way to fill them: a file system of its own for root, a limit on files for everybody else."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "slime-test", str(folder)]
    if os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0:
        try:
            yield lambda: fill_up(folder), (folder / "filler").unlink
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit, unlimit = ((resource.RLIMIT_FSIZE, (size, before[1])) for size in (64 << 10, before[0]))
    try:
        yield lambda: resource.setrlimit(*limit), lambda: resource.setrlimit(*unlimit)
    finally:
        resource.setrlimit(*unlimit)


def fill_up(folder):
    """Take every byte that is left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def test_a_full_disk_keeps_what_was_committed_and_goes_on_when_there_is_space(tmp_path):
    """Payloads, suspended turns, new rows: each meets the full disk, and goes through when there is room."""
    folder = tmp_path / "small"
    big, waiting = sample_group(10), sample_group(11)
    for sample in big.samples:
        sample.append_response([7] * 20_000, log_probs=[-0.1] * 20_000, version=0)
    turns = {waiting.samples[0].id: suspended_turns("x") * 1000}
    many = [sample_group(position) for position in range(100, 3000)]

    async def use():
        ledger = SqliteLedger(folder / "run")
        await fill(ledger, 0, 10)
        await ledger.issue([big, waiting])
        before = dict(await ledger.counts())
        make_full()
        for call in (ledger.finish(big), ledger.suspend(turns), ledger.issue(many)):
            with pytest.raises(StorageError) as caught:
                await call
            assert caught.value.code in ("STO109", *(["STO00", "STO121"] if not os.path.ismount(folder) else []))
        assert dict(await ledger.counts()) == before
        assert len(await ledger.samples([f"main/{p}-1" for p in range(10)])) == 10
        make_room()
        await ledger.finish(big)
        await ledger.suspend(turns)
        await ledger.issue(many[:500])
        assert await audit(ledger) == []
        await ledger.close()
        again = SqliteLedger(folder / "run")
        assert await audit(again) == []
        assert (await again.counts())["issued"] == before["issued"] + 1000
        assert len((await again.samples(["main/10-1"]))[0].tokens) == len(big.samples[1].tokens)
        await again.close()

    with small_disk(folder) as (make_full, make_room):
        asyncio.run(use())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["full", "quota"])
@pytest.mark.parametrize("call", ["write", "create", "sync", "sync_folder"])
def test_each_call_that_meets_a_full_disk_fails_alone_and_can_be_repeated(with_ledger, monkeypatch, call, number):
    async def body(ledger):
        await fill(ledger, 0, 3)
        if call in ("create", "sync_folder"):
            ledger.segments._roll_bytes = 1
        monkeypatch.setattr(durable, "disk", Faulty(call, number))
        await ledger.issue([sample_group(7)])
        await refused(ledger.finish(sample_group(7)), "STO109")
        assert (await ledger.groups(["main/7"]))["main/7"].state == "pending"
        await ledger.finish(sample_group(7))
        assert len(await ledger.samples(["main/0-0", "main/2-1", "main/7-0"])) == 3

    with_ledger(body)


def test_a_file_whose_sync_failed_is_never_written_or_believed_again(with_ledger, monkeypatch):
    async def body(ledger):
        await fill(ledger, 0, 1)
        await ledger.issue([sample_group(1)])
        before = (await ledger.groups(["main/0"]))["main/0"]
        monkeypatch.setattr(durable, "disk", Faulty("sync", errno.EIO))
        await refused(ledger.finish(sample_group(1)), "STO121")
        assert (await ledger.groups(["main/1"]))["main/1"].state == "pending", "it would name bytes that may be gone"
        size = ledger.segments.path(1).stat().st_size
        await ledger.finish(sample_group(1))
        assert ledger.segments.path(1).stat().st_size == size
        assert ledger.segments.path(2).exists()
        assert (await ledger.groups(["main/0"]))["main/0"] == before

    with_ledger(body)


def test_neighbours_in_a_transaction_whose_sync_failed_are_written_again_elsewhere(with_ledger, monkeypatch):
    """Ten groups share the sync that fails; each is then written to a new file, and none names the lost one."""
    groups = [sample_group(i) for i in range(10)]

    async def body(ledger):
        await ledger.issue(groups)
        monkeypatch.setattr(durable, "disk", Faulty("sync", errno.EIO))
        answers = await asyncio.gather(*(ledger.finish(group) for group in groups), return_exceptions=True)
        assert [type(a) for a in answers] in ([type(None)] * 10, [StorageError] + [type(None)] * 9)
        db = ledger.commits.db
        named = await ledger.commits.run(lambda: db.execute("SELECT DISTINCT segment FROM samples").fetchall())
        assert 1 not in {number for (number,) in named}

    with_ledger(body)


def test_a_write_that_fails_does_not_take_earlier_records_with_it(with_ledger, monkeypatch):
    """The second group of a transaction cannot be written, and the sync that should save the first fails too."""
    groups = [sample_group(i) for i in range(2)]

    class Both(Disk):
        writes = 0
        broken = False

        def write(self, fd, data, offset):
            Both.writes += 1
            if Both.writes == 4:
                Both.broken = True
                raise OSError(errno.EIO, "write")
            super().write(fd, data, offset)

        def sync(self, fd):
            if Both.broken:
                Both.broken = False
                raise OSError(errno.EIO, "sync")
            super().sync(fd)

    async def body(ledger):
        await fill(ledger, 5, 6)
        await ledger.issue(groups)
        monkeypatch.setattr(durable, "disk", Both())
        await asyncio.gather(*(ledger.finish(group) for group in groups))
        assert ledger.segments.losses == 1
        assert len(await ledger.samples(["main/0-0", "main/1-1"])) == 2
        db = ledger.commits.db
        named = await ledger.commits.run(lambda: db.execute("SELECT segment FROM samples ORDER BY serial").fetchall())
        assert [n for (n,) in named] == [1, 1, 2, 2, 2, 2]

    with_ledger(body)


def test_a_process_without_file_descriptors_gets_an_error_and_goes_on_later(with_ledger, monkeypatch):
    async def body(ledger):
        await fill(ledger, 0, 1)
        ledger.segments._roll_bytes = 1
        await ledger.issue([sample_group(1)])
        monkeypatch.setattr(durable, "disk", Faulty("create", errno.EMFILE))
        error = await refused(ledger.finish(sample_group(1)), "STO120")
        assert "ulimit" in error.fix
        await ledger.finish(sample_group(1))

    with_ledger(body)


LIMITED = """
import asyncio, os, resource, sys
from pathlib import Path
from durability.ledger_audit import audit
from slime_core.ledger.ledger import SqliteLedger
from slime_core.errors import StorageError
from slime_core.testing.contracts import sample_group

async def main():
    ledger = SqliteLedger(Path(sys.argv[1]))
    for position in range(3):
        await ledger.issue([sample_group(position)])
        await ledger.finish(sample_group(position))
    ledger.segments._roll_bytes = 1
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    await ledger.issue([sample_group(3)])
    try:
        await ledger.finish(sample_group(3))
    except StorageError as error:
        print(error.code)
    for fd in held:
        os.close(fd)
    await ledger.finish(sample_group(3))
    print(len(await ledger.samples(["main/0-0", "main/3-0"])), await audit(ledger))
    await ledger.close()

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
asyncio.run(main())
"""


def test_a_process_at_its_limit_of_files_loses_nothing(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "tools")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout == "STO120\n2 []\n", done.stderr


@pytest.mark.parametrize("what", ["folder", "database", "segments"])
def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path, what):
    """As root permissions stop nobody, so a file stands where a folder must be."""
    if what == "folder":
        (tmp_path / "run").write_text("")
    elif what == "database":
        (tmp_path / "run" / "ledger.sqlite").mkdir(parents=True)
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "segments").write_text("")
    with pytest.raises(StorageError) as caught:
        SqliteLedger(tmp_path / "run")
    assert caught.value.code in ("STO110", "STO00")
    assert caught.value.where


def test_a_disk_that_becomes_read_only_is_told(with_ledger, monkeypatch):
    async def body(ledger):
        await fill(ledger, 0, 1)
        await ledger.issue([sample_group(1)])
        for call in ("write", "sync"):
            monkeypatch.setattr(durable, "disk", Faulty(call, errno.EROFS))
            await refused(ledger.finish(sample_group(1)), "STO110")
        monkeypatch.undo()
        await ledger.drop([(sample_group(1).samples, Drop(reason="x"))])

    with_ledger(body)


def test_a_backup_that_cannot_be_written_leaves_nothing_behind(with_ledger, tmp_path):
    async def body(ledger):
        await fill(ledger, 0, 1)
        with pytest.raises(StorageError):
            await ledger.backup(tmp_path / "nowhere" / "ledger.sqlite")
        assert not [path for path in tmp_path.iterdir() if "copy" in path.name]

    with_ledger(body)
