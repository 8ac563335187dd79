"""Checkpoints are published whole, found whole or set aside loudly, and removed only for newer ones that verify."""

import asyncio
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from durability.memory_ledger import MemoryLedger
from slime_core import durable
from slime_core.checkpoint import Checkpoints, manifest
from slime_core.durable import Disk
from slime_core.errors import StorageError
from slime_core.seeds import set_generators

pytestmark = pytest.mark.unit


def test_a_checkpoint_comes_back_as_it_was(saves):
    saves(4, state={"stage": 1, "deep": {"list": [1, 2.5, None, "x"]}}, epoch=7)
    found = saves.reopened().latest()
    assert (found.version, found.epoch, found.plugins, found.machine) == (4, 7, "abc", saves.about().machine)
    assert found.state == {"stage": 1, "deep": {"list": [1, 2.5, None, "x"]}}
    assert found.config == {"seed": 3}
    assert found.ledger == {"issued": 0, "trained": 0, "pending": 0}
    assert saves.weights(found) == {"embed": [4.0] * 4, "head": [4.0] * 4}
    assert sorted(p.name for p in found.path.iterdir()) == ["MANIFEST.json", "state.json", "trainer"]


def test_there_is_none_in_an_empty_or_absent_folder(tmp_path):
    assert Checkpoints(tmp_path / "none", keep=1, note=print).latest() is None
    assert Checkpoints(tmp_path, keep=1, note=print).latest() is None
    assert Checkpoints(tmp_path, keep=1, note=print).oldest() is None


def test_the_newest_is_the_one_with_the_highest_version_whatever_the_clock_says(saves):
    saves(4, 10, 9)
    os.utime(saves.folder / "step-4")
    (saves.folder / "latest").symlink_to("step-4")
    assert saves.checkpoints.latest().version == 10
    assert saves.checkpoints.oldest() == 4


def test_state_that_changes_after_the_call_is_not_in_the_checkpoint(saves):
    state = {"step": 4, "plugins": {"one": [1]}}

    async def run():
        await saves.checkpoints.begin(4, saves.about(state=state), saves.trainer, saves.ledger)
        state["plugins"]["one"].append(2)
        saves.trainer.weights["embed"] += 100
        await saves.checkpoints.wait()

    asyncio.run(run())
    found = saves.reopened().latest()
    assert found.state["plugins"] == {"one": [1]}
    assert saves.weights(found)["embed"] == [0.0] * 4


def test_a_version_that_is_there_and_damaged_is_written_again(saves):
    saves(4)
    (saves.folder / "step-4" / "state.json").write_text("{}")
    saves.checkpoints = saves.reopened()
    saves(4, state={"second": 2})
    assert saves.reopened().latest().state == {"second": 2}
    assert any(name.startswith("corrupt-step-4-") for name in saves.names())


# retention


def test_the_newest_that_verify_are_kept(saves):
    saves.checkpoints = saves.at(keep=2).checkpoints
    saves(1, 2, 3, 4)
    assert saves.names() == ["step-3", "step-4"]


def test_a_damaged_old_one_does_not_count_as_kept(saves):
    saves(1, 2, 3)
    (saves.folder / "step-3" / "trainer" / "embed.bin").write_bytes(b"x")
    again = saves.at(keep=2)
    again(4)
    assert [name for name in again.names() if name.startswith("step")] == ["step-2", "step-4"]
    assert any("DAMAGED CHECKPOINT step-3" in note for note in again.notes)


class FlipsBits(Disk):
    """What is written to a file of this name is not what the caller gave; the size is."""

    def __init__(self, name):
        self.name, self.fds = name, set()

    def create(self, path):
        fd = super().create(path)
        if path.name == self.name:
            self.fds.add(fd)
        return fd

    def close(self, fd):
        super().close(fd)
        self.fds.discard(fd)

    def write(self, fd, data, offset):
        bad = bytes([data[0] ^ 1]) + bytes(data[1:])
        super().write(fd, bad if fd in self.fds else data, offset)


def test_an_old_checkpoint_stays_where_the_new_one_is_not_what_was_written(saves, monkeypatch):
    saves(1, 2)
    again = saves.at(keep=2)
    monkeypatch.setattr(durable, "disk", FlipsBits("head.bin"))
    with pytest.raises(StorageError, match="STO112"):
        again(3)
    assert [name for name in again.names() if name.startswith("step")] == ["step-1", "step-2"]
    assert saves.reopened().latest().version == 2


def test_folders_of_dead_writers_are_removed(saves):
    for name in (".tmp-7-0123456789ab", ".tmp-removed-step-2-0123456789ab"):
        (saves.folder / name / "trainer").mkdir(parents=True)
        (saves.folder / name / "trainer" / "embed.bin").write_bytes(b"half")
    saves(8)
    assert saves.names() == ["step-8"]


# damage


def damage(path, kind):
    data = bytearray(path.read_bytes()) if path.exists() else bytearray()
    if kind == "bit":
        data[len(data) // 2] ^= 4
    elif kind == "short":
        del data[len(data) // 2 :]
    elif kind == "empty":
        data.clear()
    elif kind == "long":
        data += b"more"
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes(data)


FILES = ["trainer/embed.bin", "trainer/head.bin", "state.json", "MANIFEST.json"]


@pytest.mark.parametrize("kind", ["bit", "short", "empty", "long", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_costs_a_step_and_is_said_loudly(saves, name, kind):
    """A missing shard, a flipped bit, a manifest that is short or empty."""
    saves(4, 7)
    damage(saves.folder / "step-7" / name, kind)
    found = saves.reopened().latest()
    assert found.version == 4
    assert saves.weights(found)["embed"] == [4.0] * 4
    loud = [note for note in saves.notes if note.startswith("DAMAGED CHECKPOINT")]
    assert name.rpartition("/")[2] in loud[0]
    assert loud[1] == "DAMAGED CHECKPOINT costs 3 steps: the run resumes from checkpoint 4"
    (corrupt,) = [one for one in saves.names() if one.startswith("corrupt-step-7-")]
    assert corrupt in loud[0]
    assert saves.reopened().latest().version == 4


@pytest.mark.parametrize(("kind", "code"), [("bit", "STO112"), ("gone", "STO111")])
def test_strict_raises_and_changes_nothing(saves, kind, code):
    saves(4, 7)
    damage(saves.folder / "step-7" / "trainer" / "head.bin", kind)
    with pytest.raises(StorageError, match=code):
        saves.checkpoints.latest(strict=True)
    assert saves.names() == ["step-4", "step-7"]
    assert saves.notes == []


def test_a_file_that_the_manifest_does_not_list_is_not_trusted(saves):
    """An extra shard."""
    saves(4, 7)
    (saves.folder / "step-7" / "trainer" / "extra.bin").write_bytes(b"x")
    assert saves.reopened().latest().version == 4
    assert "STO111" in saves.notes[0]
    assert "trainer/extra.bin" in saves.notes[0]


def test_a_run_whose_checkpoints_are_all_damaged_starts_over(saves):
    saves(4, 7)
    for version in (4, 7):
        damage(saves.folder / f"step-{version}" / "state.json", "bit")
    assert saves.reopened().latest() is None
    assert "costs 7 steps: the run resumes from version 0" in saves.notes[-1]


@pytest.mark.parametrize("value", [[], {}, {"schema": 1}, {"schema": True}, 3, None, "x"], ids=repr)
def test_json_that_is_no_manifest_is_damage(saves, value):
    saves(4, 7)
    (saves.folder / "step-7" / "MANIFEST.json").write_text(json.dumps(value))
    assert saves.reopened().latest().version == 4


@pytest.mark.parametrize("name", ["/etc/passwd", "../step-4/state.json", "trainer/../../step-4/state.json"])
def test_a_manifest_that_lists_files_elsewhere_is_damage(saves, name):
    saves(4, 7)
    file = saves.folder / "step-7" / "MANIFEST.json"
    data = json.loads(file.read_text())
    data["files"][name] = next(iter(data["files"].values()))
    file.write_bytes(manifest.sealed(data))
    assert saves.reopened().latest().version == 4
    assert "outside the folder" in saves.notes[0]


def test_every_flipped_bit_of_a_manifest_is_seen(saves):
    """In the file that holds the hashes; a flip within the indentation may leave the same JSON."""
    saves(4)
    file = saves.folder / "step-4" / "MANIFEST.json"
    whole = file.read_bytes()
    want = json.loads(whole)
    draw = random.Random(0)
    for place in [whole.index(b'"schema": 1') + 10, *(draw.randrange(len(whole)) for _ in range(400))]:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        code = ""
        try:
            manifest.read(file.parent, 4, full=False)
        except StorageError as error:
            code = error.code
        assert code == "STO112" or json.loads(file.read_bytes()) == want


def test_a_folder_under_another_version_is_damage(saves):
    saves(4)
    shutil.copytree(saves.folder / "step-4", saves.folder / "step-9")
    assert saves.reopened().latest().version == 4


def test_a_checkpoint_of_a_later_slime_is_refused_and_left_alone(saves):
    """A future schema."""
    saves(4, 7)
    file = saves.folder / "step-7" / "MANIFEST.json"
    file.write_bytes(manifest.sealed({**json.loads(file.read_text()), "schema": manifest.SCHEMA + 1}))
    with pytest.raises(StorageError, match="STO113") as caught:
        saves.reopened().latest()
    assert "resume with the slime that wrote it" in caught.value.fix
    assert saves.names() == ["step-4", "step-7"]


def test_only_half_written_ones_are_none(saves):
    (saves.folder / ".tmp-4-0123456789ab" / "trainer").mkdir(parents=True)
    (saves.folder / ".tmp-4-0123456789ab" / "state.json").write_text("{}")
    assert saves.reopened().latest() is None
    assert "no complete checkpoint" in saves.notes[0]


@pytest.mark.parametrize("how", ["moved", "linked"])
def test_a_run_directory_may_be_moved_or_linked(saves, tmp_path, how):
    saves(4)
    if how == "moved":
        (tmp_path / "run").rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").symlink_to("run")
    again = saves.at(tmp_path / "elsewhere" / "checkpoints", keep=1)
    assert again.checkpoints.latest().version == 4
    again(5)
    assert again.names() == ["step-5"]
    assert str(tmp_path) not in (again.folder / "step-5" / "MANIFEST.json").read_text()


# the ledger and the generators


class FarLedger(MemoryLedger):
    """A ledger with a file, somewhere."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    async def backup(self, path: Path):
        return durable.write_file(path, [b"rows"])


@pytest.mark.parametrize("folder", ["local", "run"])
def test_a_copy_of_the_ledger_goes_with_each_checkpoint(saves, tmp_path, folder):
    saves.ledger = FarLedger(tmp_path / folder / "ledger.sqlite")
    saves(4)
    found = saves.reopened().latest()
    assert found.ledger_copy.read_bytes() == b"rows"
    damage(found.ledger_copy, "bit")
    assert saves.reopened().latest() is None


def test_the_drivers_generators_go_on_where_they_were(saves):
    random.seed(5)
    np.random.seed(6)
    saves(4)
    want = [random.random(), random.gauss(0, 1), *np.random.random(3), np.random.standard_normal()]
    set_generators(saves.reopened().latest().random)
    assert [random.random(), random.gauss(0, 1), *np.random.random(3), np.random.standard_normal()] == want
