"""A folder made of files in parallel: whole or not there, and what was finished before an end is not made again."""

import errno
import json
import os
import shutil
import threading

import pytest

from slime_convert.job import Job, PlannedFile
from slime_core import durable
from slime_core.errors import ConfigError, StorageError

pytestmark = pytest.mark.unit

PLAN = {"sources": 1}


class Making:
    """Files of known content, which count how often they are made."""

    def __init__(self, count=4, size=100):
        self.made = []
        self.lock = threading.Lock()
        self.files = [
            PlannedFile(name=f"f{n}", size=size, parts=lambda n=n: self._parts(n, size)) for n in range(count)
        ]

    def _parts(self, number, size):
        with self.lock:
            self.made.append(f"f{number}")
        for place in range(0, size, 30):
            yield bytes([number]) * min(30, size - place)


class FullDisk(durable.Disk):
    """Has no room for one file."""

    def __init__(self, name, error=errno.ENOSPC):
        self.name, self.error, self.open = name, error, {}

    def create(self, path):
        fd = super().create(path)
        self.open[fd] = path.name
        return fd

    def write(self, fd, data, offset):
        if self.open.get(fd) == self.name and offset > 0:
            raise OSError(self.error, os.strerror(self.error), self.name)
        super().write(fd, data, offset)

    def close(self, fd):
        self.open.pop(fd, None)
        super().close(fd)


def make(target, making, plan=PLAN, **options):
    with Job(target, plan, making.files, **options) as job:
        job.write()
        job.publish()
        return job


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


WHOLE = {f"f{n}": bytes([n]) * 100 for n in range(4)}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_folder_appears_with_all_files_and_nothing_else_stays(tmp_path, workers):
    moved = []
    make(tmp_path / "a" / "out", Making(), workers=workers, moved=moved.append)
    assert content(tmp_path / "a" / "out") == WHOLE
    assert os.listdir(tmp_path / "a") == ["out"]
    assert sum(moved) == 400


@pytest.mark.parametrize(
    ("error", "code"), [(errno.ENOSPC, "STO109"), (errno.EDQUOT, "STO109"), (errno.EIO, "STO121")]
)
def test_a_disk_that_fails_loses_nothing_and_the_same_job_goes_on(tmp_path, monkeypatch, error, code):
    monkeypatch.setattr(durable, "disk", FullDisk("f2", error))
    with pytest.raises(StorageError) as caught:
        make(tmp_path / "out", Making())
    assert caught.value.code == code
    assert "f2" in str(caught.value)
    assert "finished files are kept" in caught.value.fix
    assert not (tmp_path / "out").exists()
    assert {path.name for path in (tmp_path / ".tmp-out").iterdir()} == {"f0", "f1"}
    monkeypatch.setattr(durable, "disk", durable.Disk())
    again, notes = Making(), []
    job = make(tmp_path / "out", again, note=notes.append)
    assert (sorted(again.made), job.reused) == (["f2", "f3"], 2)
    assert notes == ["2 of 4 files are kept from an earlier try"]
    assert content(tmp_path / "out") == WHOLE


@pytest.mark.parametrize("change", ["flipped", "shorter", "gone", "unlisted", "torn line"])
def test_only_whole_files_of_an_earlier_try_are_kept(tmp_path, change):
    with Job(tmp_path / "out", PLAN, Making().files) as job:
        job.write()
    aside, journal = tmp_path / ".tmp-out", tmp_path / ".tmp-out.journal"
    lines = journal.read_text().splitlines(keepends=True)
    if change == "flipped":
        (aside / "f1").write_bytes(b"\1" * 99 + b"x")
    elif change == "shorter":
        (aside / "f1").write_bytes(b"\1" * 50)
    elif change == "gone":
        (aside / "f1").unlink()
    elif change == "unlisted":
        journal.write_text("".join(line for line in lines if '"f1"' not in line))
    else:
        journal.write_text("".join(line for line in lines if '"f1"' not in line) + '{"file": "f1", "si')
    (aside / "stray").write_text("x")
    again = Making()
    make(tmp_path / "out", again)
    assert again.made == ["f1"]
    assert content(tmp_path / "out") == WHOLE


def test_a_job_of_another_plan_begins_anew_and_says_so(tmp_path):
    with Job(tmp_path / "out", PLAN, Making().files) as job:
        job.write()
    again, notes = Making(), []
    make(tmp_path / "out", again, plan={"sources": 2}, note=notes.append)
    assert len(again.made) == 4
    assert "it starts again" in notes[0]


def test_a_process_that_dies_after_the_rename_leaves_a_whole_folder(tmp_path):
    make(tmp_path / "out", Making())
    (tmp_path / ".tmp-out.journal").write_text(json.dumps({"plan": PLAN}) + "\n")  # what it did not get to remove
    with pytest.raises(ConfigError, match="there already"):
        make(tmp_path / "out", Making())
    assert content(tmp_path / "out") == WHOLE


def test_a_folder_that_is_there_is_replaced_by_force_and_only_when_the_new_one_is_whole(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(ConfigError, match="CFG12"):
        make(tmp_path / "out", Making())
    monkeypatch.setattr(durable, "disk", FullDisk("f3"))
    with pytest.raises(StorageError):
        make(tmp_path / "out", Making(), force=True)
    assert content(tmp_path / "out") == {"mine": b"kept"}
    monkeypatch.setattr(durable, "disk", durable.Disk())
    make(tmp_path / "out", Making(), force=True)
    assert content(tmp_path / "out") == WHOLE
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_may_be_there(tmp_path):
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", Making())
    assert content(tmp_path / "out") == WHOLE


def test_two_processes_do_not_make_the_same_folder(tmp_path):
    with Job(tmp_path / "out", PLAN, Making().files), pytest.raises(ConfigError) as caught:
        make(tmp_path / "out", Making())
    assert caught.value.code == "CFG16"


def test_a_disk_without_room_is_refused_before_a_byte_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 601, 399))
    making = Making()
    with pytest.raises(StorageError) as caught:
        make(tmp_path / "out", making)
    assert caught.value.code == "STO109"
    assert "needs 400 bytes more, the disk has 399" in str(caught.value)
    assert making.made == []


def test_a_source_that_fails_stops_the_others_and_is_what_is_told(tmp_path):
    def broken():
        yield b"x"
        raise RuntimeError("the source broke")

    making = Making(count=20, size=30000)
    files = [*making.files[:3], PlannedFile(name="bad", size=10, parts=broken), *making.files[3:]]
    with pytest.raises(RuntimeError, match="the source broke"), Job(tmp_path / "out", PLAN, files, workers=2) as job:
        job.write()
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".tmp-out" / "bad").exists()
    journal = (tmp_path / ".tmp-out.journal").read_text()
    listed = {json.loads(line).get("file") for line in journal.splitlines()} - {None}
    assert listed == {path.name for path in (tmp_path / ".tmp-out").iterdir()}


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        make(tmp_path / "file" / "out", Making())
