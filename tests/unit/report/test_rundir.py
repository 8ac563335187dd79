"""Run directories: numbered, never shared, never written over, locked while a process runs."""

import json
import os
import subprocess
import sys

import pytest

from slime_core.errors import ConfigError, StorageError
from slime_core.report.rundir import FOLDERS, RunDir, check_free, next_path

pytestmark = pytest.mark.unit

HOLDER = """
import sys
from pathlib import Path
from slime_core.report.rundir import RunDir
run_dir = RunDir.create("x", at=Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A run directory that another process holds, and that process."""
    path = tmp_path / "held"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    yield path, process
    process.communicate()


def test_runs_are_numbered_and_have_their_folders(tmp_path):
    with RunDir.create("demo", root=tmp_path) as first, RunDir.create("demo", root=tmp_path) as second:
        assert first.path == tmp_path / "runs/demo-0"
        assert second.path == tmp_path / "runs/demo-1"
        assert all((first.path / folder).is_dir() for folder in FOLDERS)
        assert not first.final.exists()
    assert next_path("demo", tmp_path) == tmp_path / "runs/demo-2"


def test_a_folder_of_ones_own_is_made_with_its_parents(tmp_path):
    with RunDir.create("demo", at=tmp_path / "a/b") as run_dir:
        assert run_dir.path == tmp_path / "a/b"


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    RunDir.create("demo", at=tmp_path / "empty").close()


def test_a_folder_with_another_run_is_refused_with_ways_out(tmp_path):
    RunDir.create("demo", at=tmp_path / "run").close()
    with pytest.raises(ConfigError) as caught:
        RunDir.create("demo", at=tmp_path / "run")
    error = caught.value
    assert (error.code, error.where, error.exit_code) == ("CFG12", str(tmp_path / "run"), 2)
    assert "already holds a run" in error.what
    assert f"--run-dir {tmp_path / 'run'}-2" in error.fix
    assert f"slime show {tmp_path / 'run'}" in error.fix


@pytest.mark.parametrize("content", ["file", "folder"])
def test_a_folder_with_anything_else_is_refused_and_left_alone(tmp_path, content):
    (tmp_path / "taken").mkdir()
    target = tmp_path / "taken" / "notes"
    target.mkdir() if content == "folder" else target.write_text("mine")
    with pytest.raises(ConfigError) as caught:
        RunDir.create("demo", at=tmp_path / "taken")
    assert caught.value.code == "CFG12"
    assert os.listdir(tmp_path / "taken") == ["notes"]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        check_free(tmp_path / "file")
    assert caught.value.code == "CFG12"


def test_a_run_that_another_process_holds_names_its_pid_and_host(holder):
    path, process = holder
    with pytest.raises(ConfigError) as caught:
        RunDir.create("demo", at=path)
    error = caught.value
    assert (error.code, error.where) == ("CFG16", str(path))
    assert f"pid {process.pid} on {os.uname().nodename}" in error.why
    with pytest.raises(ConfigError) as caught:
        RunDir(path).lock()
    assert caught.value.code == "CFG16"
    assert RunDir(path).holder()["pid"] == process.pid


def test_a_killed_process_lets_go_of_its_run(holder):
    path, process = holder
    process.kill()
    process.wait()
    assert RunDir(path).holder() is None
    run_dir = RunDir(path)
    run_dir.lock()
    assert json.loads((path / "lock").read_text())["pid"] == os.getpid()
    run_dir.close()


def test_looking_for_a_holder_takes_no_lock(tmp_path):
    run_dir = RunDir.create("demo", at=tmp_path / "run")
    assert run_dir.holder() is None
    run_dir.close()
    assert RunDir(run_dir.path).holder() is None
    run_dir.lock()
    run_dir.close()


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        RunDir.create("demo", root=tmp_path / "file")
    assert (caught.value.code, caught.value.exit_code) == ("STO110", 7)
    assert "--run-dir" in caught.value.fix


@pytest.mark.parametrize("made", [True, False])
def test_a_path_without_a_run_is_named_in_full(tmp_path, monkeypatch, made):
    monkeypatch.chdir(tmp_path)
    if made:
        (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError) as caught:
        RunDir.open(tmp_path / "x")
    assert (caught.value.code, caught.value.where) == ("CFG05", str(tmp_path / "x"))
    assert str(tmp_path) in caught.value.why


def test_info_is_merged_and_survives_a_broken_file(tmp_path):
    with RunDir.create("demo", root=tmp_path) as run_dir:
        run_dir.write_info({"a": 1, "b": 2})
        run_dir.write_info({"b": 3})
        assert run_dir.read_info() == {"a": 1, "b": 3}
        run_dir.info.write_text("{")
        assert run_dir.read_info() == {}
        assert sorted(path.name for path in run_dir.path.iterdir() if path.name.startswith(".")) == []


def test_tracebacks_never_overwrite_each_other(tmp_path):
    with RunDir.create("demo", root=tmp_path) as run_dir:
        first, second = run_dir.save_error("traceback", "one"), run_dir.save_error("traceback", "two")
        assert (first.read_text(), second.read_text()) == ("one", "two")
