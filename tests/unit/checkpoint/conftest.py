"""Checkpoints of a fake trainer, and disks that fail."""

import asyncio
import errno
import subprocess

import numpy as np
import pytest

from durability.fake_trainer import FakeTrainer
from durability.memory_ledger import MemoryLedger
from slime_core import durable
from slime_core.checkpoint import CheckpointMetadata, Checkpoints
from slime_core.durable import Disk

MACHINE = {"world": 1, "dtype": "float32", "device": "cpu", "cpu_threads": 2}


def about_of(**changes):
    values = {"state": {"stage": 0}, "config": {"seed": 3}, "plugins": "abc", "machine": MACHINE, "epoch": 1}
    return CheckpointMetadata(**{**values, **changes})


class Saves:
    """A run's checkpoints: ``saves(4, 8)`` publishes versions whose weights are their number."""

    about = staticmethod(about_of)

    def __init__(self, folder, keep=9):
        self.folder, self.keep = folder, keep
        self.notes = []
        self.trainer, self.ledger = FakeTrainer(), MemoryLedger()
        self.checkpoints = self.reopened()

    def at(self, folder=None, keep=9):
        return Saves(folder or self.folder, keep)

    def reopened(self):
        return Checkpoints(self.folder, keep=self.keep, note=self.notes.append)

    def __call__(self, *versions, **changes):
        asyncio.run(self.publish(*versions, **changes))
        return self

    async def publish(self, *versions, **changes):
        for version in versions:
            self.trainer.weights = {name: np.full(4, float(version)) for name in self.trainer.weights}
            await self.checkpoints.begin(version, self.about(**changes), self.trainer, self.ledger)
            await self.checkpoints.settle()

    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    def weights(self, found):
        trainer = FakeTrainer()
        asyncio.run(trainer.restore(found.trainer))
        return {name: tensor.tolist() for name, tensor in trainer.weights.items()}


@pytest.fixture
def saves(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return Saves(tmp_path / "run" / "checkpoints")


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
def saves_at():
    """``saves_at(folder, keep=9)``, where the folder is another than `saves`'."""
    return Saves


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
