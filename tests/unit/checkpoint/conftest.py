"""Checkpoints of a fake trainer."""

import asyncio

import numpy as np
import pytest

from durability.fake_trainer import FakeTrainer
from durability.memory_ledger import MemoryLedger
from slime_core.checkpoint import CheckpointMetadata, Checkpoints

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
            await self.checkpoints.wait()

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
