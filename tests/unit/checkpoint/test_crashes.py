"""Every crash while durable state is written leaves the old or the new, whole; every missing safeguard is seen."""

import asyncio
import os
from contextlib import suppress

import numpy as np
import pytest

from durability.disk import RecordingDisk, crashes, recorded, tree_of, violations, write_tree
from durability.fake_trainer import FakeTrainer
from durability.memory_ledger import MemoryLedger
from slime_core import durable
from slime_core.checkpoint import CheckpointMetadata, Checkpoints, manifest
from slime_core.ledger.segments import Segments

pytestmark = pytest.mark.unit


def about(version):
    return CheckpointMetadata(state={"step": version}, config={}, plugins="p", machine={}, epoch=1)


async def publish(folder, version, keep=1, trainer=None):
    trainer = trainer or FakeTrainer()
    trainer.weights = {"embed": np.full(4, float(version)), "head": np.full(2, -float(version))}
    checkpoints = Checkpoints(folder, keep=keep, note=print)
    await checkpoints.begin(version, about(version), trainer, MemoryLedger())
    await checkpoints.wait()


def load(folder, ended, old=4, new=8):
    """One of the two is found, is whole, and no half of one was ever taken for a checkpoint."""
    notes = []
    found = Checkpoints(folder / "checkpoints", keep=1, note=notes.append).latest()
    assert found is not None, "neither"
    assert found.version in ((new,) if ended else (old, new))
    assert not [note for note in notes if "DAMAGED" in note], notes
    assert found.state == {"step": found.version}
    for version, path in manifest.names_in(folder / "checkpoints"):
        manifest.read(path, version)  # whole, those that nobody asks for too
    trainer = FakeTrainer()
    asyncio.run(trainer.restore(found.trainer))
    assert (trainer.weights["embed"] == found.version).all()
    assert (trainer.weights["head"] == -found.version).all()


def crash_of_a_publish(tmp_path, disk_class=RecordingDisk, keep=1, trainer=None, most=1):
    root = tmp_path / "run"
    (root / "checkpoints").mkdir(parents=True)
    asyncio.run(publish(root / "checkpoints", 4))
    before, disk = tree_of(root), disk_class(root)
    with recorded(disk) as calls:
        asyncio.run(publish(root / "checkpoints", 8, keep, trainer))
    return violations(before, calls, tmp_path / "after", load, most=most)


@pytest.mark.parametrize("keep", [1, 2], ids=["the old one is removed", "the old one stays"])
def test_every_crash_of_a_publish_leaves_the_old_or_the_new_checkpoint(tmp_path, keep):
    assert crash_of_a_publish(tmp_path, keep=keep) == []


class NoSync(RecordingDisk):
    def sync(self, fd):
        pass


class NoFolderSync(RecordingDisk):
    def sync_folder(self, folder):
        pass


class NoInnerFolderSync(RecordingDisk):
    def sync_folder(self, folder):
        if folder.name == "checkpoints":
            super().sync_folder(folder)


class NoOuterFolderSync(RecordingDisk):
    def sync_folder(self, folder):
        if folder.name != "checkpoints":
            super().sync_folder(folder)


class OneFileIsNotSynced(RecordingDisk):
    name = ""

    def sync(self, fd):
        if not self._names[fd].endswith(self.name):
            super().sync(fd)


class StateIsNotSynced(OneFileIsNotSynced):
    name = "state.json"


class ManifestIsNotSynced(OneFileIsNotSynced):
    name = "MANIFEST.json"


class WeightsAreNotSynced(OneFileIsNotSynced):
    name = "embed.bin"


class RenameComesFirst(RecordingDisk):
    """Files become durable only after the folder has its name."""

    def __init__(self, root):
        super().__init__(root)
        self.late = []

    def sync(self, fd):
        copy = os.dup(fd)
        self._names[copy] = self._names[fd]
        self.late.append(copy)

    def rename(self, old, new):
        super().rename(old, new)
        while self.late:
            fd = self.late.pop()
            super().sync(fd)
            self.close(fd)


class RemovedBeforeItIsRenamed(RecordingDisk):
    """An old checkpoint goes under its own name."""

    def rename(self, old, new):
        if "removed" not in new.name:
            super().rename(old, new)

    def remove_tree(self, path):
        kept = path.name.split("removed-")[-1].rsplit("-", 1)[0]
        super().remove_tree(path.with_name(kept) if "removed" in path.name else path)


MUTANTS = [
    NoSync,
    NoFolderSync,
    NoInnerFolderSync,
    NoOuterFolderSync,
    StateIsNotSynced,
    ManifestIsNotSynced,
    WeightsAreNotSynced,
    RenameComesFirst,
    RemovedBeforeItIsRenamed,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_publish_without_a_safeguard_is_caught(tmp_path, mutant):
    assert crash_of_a_publish(tmp_path, mutant)


class TellsMarksTooEarly(FakeTrainer):
    """Says that its files are durable when they are only written."""

    async def saved(self):
        if self._saving is None:
            return {}
        (path, parts), self._saving = self._saving, None
        path.mkdir()
        durable.disk.calls.append(type(durable.disk.calls[0])("make_folder", durable.disk._told(path)))
        marks = {}
        for name, data in parts.items():
            fd = durable.disk.create(path / f"{name}.bin")
            durable.disk.write(fd, data, 0)
            durable.disk.close(fd)
            marks[f"{name}.bin"] = durable.sha256_of(path / f"{name}.bin")
        return marks


def test_a_manifest_before_the_files_are_durable_is_caught(tmp_path):
    assert crash_of_a_publish(tmp_path, trainer=TellsMarksTooEarly())


def test_a_checkpoint_that_is_written_in_place_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_core.checkpoint.manifest.ASIDE", "step-")

    def in_place(self, version):
        aside = self.folder / f"step-{version}"
        durable.disk.make_folder(aside)
        return aside

    monkeypatch.setattr(Checkpoints, "_make_aside", in_place)
    monkeypatch.setattr(Checkpoints, "sweep", lambda self: None)
    assert crash_of_a_publish(tmp_path)


def replace(root):
    durable.replace_file(root / "run.json", b"new " * 40)


def replaced(folder, ended):
    data = (folder / "run.json").read_bytes()
    assert data == b"new " * 40 if ended else data in (b"old " * 40, b"new " * 40)


def crash_of_a_replace(tmp_path, disk_class, act=replace):
    root = tmp_path / "run"
    root.mkdir()
    (root / "run.json").write_bytes(b"old " * 40)
    before, disk = tree_of(root), disk_class(root)
    with recorded(disk) as calls:
        act(root)
    return violations(before, calls, tmp_path / "after", replaced)


def test_every_crash_of_a_replaced_file_leaves_the_old_or_the_new(tmp_path):
    assert crash_of_a_replace(tmp_path, RecordingDisk) == []


@pytest.mark.parametrize("mutant", [NoSync, NoFolderSync, RenameComesFirst])
def test_a_replaced_file_without_a_safeguard_is_caught(tmp_path, mutant):
    assert crash_of_a_replace(tmp_path, mutant)


def test_a_file_that_is_written_over_is_caught(tmp_path):
    def act(root):
        durable.disk.remove(root / "run.json")
        durable.write_file(root / "run.json", [b"new " * 40])
        durable.disk.sync_folder(root)

    assert crash_of_a_replace(tmp_path, RecordingDisk, act)


BODIES = [b"first" * 9, b"second" * 9, b"third" * 9]


def crash_of_a_segment(tmp_path, disk_class):
    """Two records are appended and synced, a third is appended; what was synced must be read in every state after."""
    root = tmp_path / "run"
    root.mkdir()
    segments = Segments(root / "segments")
    places = [segments.append([BODIES[0]])]
    segments.sync()
    segments.close()
    before, disk = tree_of(root), disk_class(root)
    with recorded(disk) as calls:
        segments = Segments(root / "segments")
        places.append(segments.append([BODIES[1][:7], BODIES[1][7:]]))
        segments.sync()
        synced = len(calls)
        places.append(segments.append([BODIES[2]]))
        segments.close()
    found = []
    for number, (done, tree) in enumerate(crashes(before, calls)):
        folder = tmp_path / "after" / str(number)
        write_tree(tree, folder)
        after = Segments(folder / "segments")
        try:
            assert after.read(places[0]) == BODIES[0]
            if done >= synced:
                assert after.read(places[1]) == BODIES[1]
        except Exception as error:
            found.append((done, repr(error)))
        for place, body in zip(places, BODIES):
            with suppress(OSError):
                assert after.read(place) == body, "other bytes than were written"
        after.close()
    assert len(calls) > synced > 0
    return found


def test_every_crash_of_a_segment_keeps_what_was_synced(tmp_path):
    assert crash_of_a_segment(tmp_path, RecordingDisk) == []


@pytest.mark.parametrize("mutant", [NoSync, NoFolderSync])
def test_a_segment_without_a_safeguard_is_caught(tmp_path, mutant):
    assert crash_of_a_segment(tmp_path, mutant)
