"""Disks that are full, read-only, failing or slow under a checkpoint."""

import asyncio
import errno
import subprocess
import threading

import numpy as np
import pytest

from durability.fake_trainer import FakeTrainer
from slime_core import durable
from slime_core.durable import Disk
from slime_core.errors import StorageError

pytestmark = pytest.mark.unit


class FailingDisk(Disk):
    """Raises ``number`` in the nth call of ``method`` (from 0), once."""

    def __init__(self, method, number, nth=0):
        self.left, self.failed = nth, []

        def fail(*args):
            self.left -= 1
            if self.left == -1:
                self.failed.append(args)
                raise OSError(number, errno.errorcode[number])
            return getattr(Disk, method)(self, *args)

        setattr(self, method, fail)


@pytest.fixture
def failing(monkeypatch):
    """``failing("sync", errno.EIO, nth=1)`` makes `durable.disk` fail; the answer is that disk."""

    def make(method, number, nth=0):
        disk = FailingDisk(method, number, nth)
        monkeypatch.setattr(durable, "disk", disk)
        return disk

    return make


@pytest.fixture
def mount(tmp_path):
    """``mount(kib, read_only=False)``: a file system of its own of that size, as root; else the test is skipped."""
    mounted = []

    def make(kib, *options):
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={kib}k", *options]), "none", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a file system needs root; the same case runs on a disk that only says it is full")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


class SlowTrainer(FakeTrainer):
    """Its files are durable when ``let`` is set."""

    def __init__(self):
        super().__init__()
        self.let = asyncio.Event()

    async def saved(self):
        if self._saving is not None:
            await self.let.wait()
        return await super().saved()


def test_latest_does_not_move_before_everything_is_durable(saves):
    saves(4)

    async def run():
        trainer = SlowTrainer()
        await saves.checkpoints.begin(8, saves.about(), trainer, saves.ledger)
        for _ in range(20):
            await asyncio.sleep(0)
        saves.checkpoints.raise_failed()
        assert saves.reopened().latest().version == 4
        trainer.let.set()
        await saves.checkpoints.wait()
        assert saves.reopened().latest().version == 8

    asyncio.run(run())


def test_a_second_checkpoint_waits_for_the_first(saves):
    async def run():
        trainer = SlowTrainer()
        await saves.checkpoints.begin(4, saves.about(), trainer, saves.ledger)
        second = asyncio.ensure_future(saves.checkpoints.begin(5, saves.about(), FakeTrainer(), saves.ledger))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not second.done()
        trainer.let.set()
        await second
        assert "step-4" in saves.names()
        await saves.checkpoints.wait()

    asyncio.run(run())
    assert saves.names() == ["step-4", "step-5"]


def test_a_version_that_is_there_stays_as_it_is(saves):
    saves(4, state={"first": 1})(4, state={"second": 2})
    assert saves.reopened().latest().state == {"first": 1}
    assert saves.names() == ["step-4"]


# disks


STEPS = [("create", n) for n in range(4)] + [("write", n) for n in range(4)] + [("sync", n) for n in range(4)]
STEPS += [("sync_folder", n) for n in range(2)] + [("make_folder", 0), ("make_folder", 1), ("rename", 0)]


@pytest.mark.parametrize(("method", "nth"), STEPS)
def test_a_full_disk_ends_the_save_and_not_the_checkpoint_before_it(saves, failing, monkeypatch, method, nth):
    """At every call that writes."""
    saves(4)
    disk = failing(method, errno.ENOSPC, nth)
    with pytest.raises(StorageError) as caught:
        saves(7)
    assert disk.failed
    assert (caught.value.code, caught.value.exit_code) == ("STO109", 7)
    assert saves.names() == ["step-4"]
    assert saves.reopened().latest().version == 4
    saves(7)
    assert saves.reopened().latest().version == 7


def test_a_disk_that_is_full_ends_the_save(mount, saves):
    """On a file system of 96 KiB."""
    disk = mount(96)
    saves = saves.at(disk / "checkpoints")
    saves(4)
    saves.trainer.weights["embed"] = np.zeros(20_000)
    with pytest.raises(StorageError, match="STO109"):
        asyncio.run(big(saves))
    assert saves.names() == ["step-4"]
    assert saves.reopened().latest().version == 4


async def big(saves):
    await saves.checkpoints.begin(7, saves.about(), saves.trainer, saves.ledger)
    await saves.checkpoints.wait()


def test_a_read_only_file_system_is_said(mount, saves):
    """As root, whom permissions do not stop."""
    disk = mount(96)
    saves = saves.at(disk / "checkpoints")
    saves(4)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StorageError, match="STO110"):
        saves(7)
    assert saves.reopened().latest().version == 4


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_written_is_said(saves, failing, number):
    saves(4)
    failing("make_folder", number)
    with pytest.raises(StorageError, match="STO110"):
        saves(7)
    assert saves.reopened().latest().version == 4


@pytest.mark.parametrize("nth", range(4))
def test_a_failed_fsync_is_never_tried_again_on_the_same_file(saves, failing, nth):
    """What the file holds is unknown; the next save writes a new one."""
    saves(4)
    disk = failing("sync", errno.EIO, nth)
    with pytest.raises(StorageError, match="STO121"):
        saves(7)
    assert len(disk.failed) == 1
    assert saves.names() == ["step-4"]
    saves(7)
    assert saves.reopened().latest().version == 7


def test_a_background_write_that_fails_is_raised_at_the_next_step_boundary(saves, failing):
    saves(4)

    async def run():
        failing("sync", errno.ENOSPC, 2)
        await saves.checkpoints.begin(7, saves.about(), saves.trainer, saves.ledger)
        while not saves.checkpoints._task.done():
            await asyncio.sleep(0.001)
        with pytest.raises(StorageError, match="STO109"):
            saves.checkpoints.raise_failed()
        saves.checkpoints.raise_failed()
        await saves.checkpoints.wait()

    asyncio.run(run())
    assert saves.reopened().latest().version == 4


def test_a_run_that_is_cancelled_leaves_no_half_checkpoint_with_a_name(saves, monkeypatch):
    """The writing thread goes on when its task is cancelled, and nothing is pulled away under it."""
    reached, go = threading.Event(), threading.Event()

    class Waits(Disk):
        def rename(self, old, new):
            reached.set()
            go.wait(20)
            super().rename(old, new)

    monkeypatch.setattr(durable, "disk", Waits())

    async def run():
        await saves.checkpoints.begin(7, saves.about(), saves.trainer, saves.ledger)
        await asyncio.to_thread(reached.wait, 20)
        saves.checkpoints._task.cancel()
        await asyncio.wait({saves.checkpoints._task})
        go.set()

    asyncio.run(run())
    assert saves.names() == ["step-7"]
    assert saves.reopened().latest().version == 7
