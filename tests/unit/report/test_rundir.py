"""Run directories: numbered, never shared, never written over, locked while a process runs."""

import json
import os
import subprocess
import sys
import threading

import pytest

from slime_cli import trim
from slime_cli.starts import STARTS, begin, end, save_error, starts_of
from slime_cli.trim import trim_figures
from slime_core.errors import ConfigError, StorageError
from slime_core.report import rundir
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
    with RunDir.create("demo", at=tmp_path / "run") as run_dir:
        run_dir.config.write_text("")
    with pytest.raises(ConfigError) as caught:
        RunDir.create("demo", at=tmp_path / "run")
    error = caught.value
    assert (error.code, error.where, error.exit_code) == ("CFG12", str(tmp_path / "run"), 2)
    assert "already holds a run" in error.what
    assert f"--run-dir {tmp_path / 'run'}-2" in error.fix
    assert f"slime show {tmp_path / 'run'}" in error.fix
    assert f"slime run --resume {tmp_path / 'run'}" in error.fix


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


def test_those_who_look_whether_a_process_runs_keep_none_from_it(tmp_path):
    path, ended = tmp_path / "run", threading.Event()
    RunDir.create("x", at=path).close()

    def look():
        while not ended.is_set():
            RunDir(path).holder()

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(200):
            run_dir = RunDir(path)
            run_dir.lock()
            run_dir.close()
    finally:
        ended.set()
        for looker in lookers:
            looker.join()


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
        assert run_dir.read_info() == {"a": 1, "b": 3, "epoch": 1}
        run_dir.info.write_text("{")
        assert run_dir.read_info() == {}
        assert sorted(path.name for path in run_dir.path.iterdir() if path.name.startswith(".")) == []


def test_tracebacks_never_overwrite_each_other(tmp_path):
    with RunDir.create("demo", root=tmp_path) as run_dir:
        first, second = save_error(run_dir, "traceback", "one"), save_error(run_dir, "traceback", "two")
        assert (first.read_text(), second.read_text()) == ("one", "two")


@pytest.fixture
def old(tmp_path):
    """The folder of a run that was started once and that nobody holds."""
    with RunDir.create("demo", at=tmp_path / "run") as run_dir:
        run_dir.write_config("seed = 1\n")
        begin(run_dir, 0, {"command": ["slime", "run"]})
    return run_dir.path


def test_every_reopening_is_a_later_epoch(old):
    for epoch in (2, 3, 4):
        with RunDir.reopen(old) as run_dir:
            assert run_dir.epoch == epoch
            assert json.loads(run_dir.info.read_text())["epoch"] == epoch


@pytest.mark.parametrize("info", ["{", "", '{"epoch": "many"}', None])
def test_a_broken_run_json_does_not_give_an_epoch_twice(old, info):
    (old / "run.json").unlink() if info is None else (old / "run.json").write_text(info)
    with RunDir.reopen(old, epoch=7) as run_dir:
        assert run_dir.epoch == 8
    (old / "run.json").write_text("{")
    with RunDir.reopen(old) as run_dir:
        assert run_dir.epoch == 2


def test_a_run_that_another_process_holds_is_not_reopened(holder):
    path, _ = holder
    (path / "config.toml").write_text("")
    before = (path / "run.json").read_bytes()
    with pytest.raises(ConfigError) as caught:
        RunDir.reopen(path)
    assert caught.value.code == "CFG16"
    assert (path / "run.json").read_bytes() == before


def test_a_folder_that_is_no_run_is_not_reopened(tmp_path):
    with pytest.raises(ConfigError) as caught:
        RunDir.reopen(tmp_path)
    assert caught.value.code == "CFG05"
    assert os.listdir(tmp_path) == []


def test_reopening_clears_what_a_killed_process_left_aside(old):
    for folder in ("evaluations", "weights/.v-9.tmp"):
        (old / folder).mkdir(parents=True)
    for name in (
        ".run.json.77.tmp",
        ".metrics.jsonl.77.tmp",
        "evaluations/.a-000003.json.77.tmp",
        "log/rendezvous-77",
    ):
        (old / name).write_text("half")
    (old / "log" / "run.log").write_text("kept")
    RunDir.reopen(old).close()
    assert not [*old.glob(".*"), *old.glob("evaluations/.*"), *old.glob("log/rendezvous-*")]
    assert (old / "log" / "run.log").exists()
    assert (old / "weights" / ".v-9.tmp").exists()  # a folder is its owner's to clear


def test_a_run_that_cannot_be_written_is_a_storage_error(old, monkeypatch):
    def refuse(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(rundir, "replace_file", refuse)
    with pytest.raises(StorageError) as caught:
        RunDir.reopen(old)
    assert (caught.value.code, caught.value.exit_code) == ("STO109", 7)
    monkeypatch.undo()
    RunDir.reopen(old).close()


def test_starts_are_kept_with_how_each_ended(old):
    with RunDir.reopen(old) as run_dir:
        begin(run_dir, 3, {"command": ["slime", "run", "--resume"]})
        end(run_dir, "stopped", {"version": 5})
    with RunDir.reopen(old) as run_dir:
        begin(run_dir, 5, {})
        end(run_dir, "finished", {"version": 9, "seconds": 1.5})
    killed, stopped, finished = starts_of(RunDir(old))
    assert (killed["epoch"], killed["status"], killed["from_version"]) == (1, "running", 0)
    assert (stopped["epoch"], stopped["status"], stopped["from_version"], stopped["version"]) == (2, "stopped", 3, 5)
    assert (finished["status"], finished["pid"], finished["host"]) == ("finished", os.getpid(), os.uname().nodename)
    info = RunDir(old).read_info()
    assert (info["status"], info["version"], info["command"]) == ("finished", 9, ["slime", "run", "--resume"])


def test_only_the_newest_starts_are_kept(old):
    with RunDir.reopen(old) as run_dir:
        run_dir.write_info({"starts": [{"epoch": 0, "status": "running"}] * STARTS})
        begin(run_dir, 0, {})
        assert len(starts_of(run_dir)) == STARTS
        assert starts_of(run_dir)[-1]["epoch"] == 2


def lines(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def step(version):
    return {"kind": "step", "version": version}


def measured(version, name="heldout", run=0):
    return {"kind": "eval", "version": version, "name": name, "run": run}


@pytest.mark.parametrize(
    ("version", "evaluations", "left"),
    [
        (0, 0, []),
        (0, 1, [measured(0)]),
        (1, 1, [measured(0), step(1)]),
        (2, 0, [measured(0), step(1), step(2)]),
        (2, 1, [measured(0), step(1), step(2), measured(2), measured(2, "other")]),
        (2, 2, [measured(0), step(1), step(2), measured(2), measured(2, "other"), measured(2, run=1)]),
        (9, 2, [measured(0), step(1), step(2), measured(2), measured(2, "other"), measured(2, run=1), step(3)]),
    ],
)
def test_figures_of_steps_that_will_be_made_again_go(old, version, evaluations, left):
    with RunDir.reopen(old) as run_dir:
        every = [measured(0), step(1), step(2), measured(2), measured(2, "other"), measured(2, run=1), step(3)]
        run_dir.metrics.write_bytes(lines(*every) + b'{"kind": "step", "versi')
        run_dir.samples.write_bytes(lines({"version": 1}, {"version": 2}, {"version": 3}))
        gone = trim_figures(run_dir, version, evaluations=evaluations)
        assert run_dir.metrics.read_bytes() == lines(*left)
        samples = [json.loads(line)["version"] for line in run_dir.samples.read_bytes().splitlines()]
        assert samples == [made for made in (1, 2, 3) if made <= version]
        assert gone == len(every) + 1 - len(left) + 3 - len(samples)
        assert trim_figures(run_dir, version, evaluations=evaluations) == 0


@pytest.mark.parametrize("torn", [b"", b"{", b"[1]\n", b"\xff\xfe\n", b'{"version": "x"}\n', b'{"version": 1}'])
def test_a_torn_line_goes(old, torn):
    with RunDir.reopen(old) as run_dir:
        run_dir.metrics.write_bytes(lines(step(1)) + torn)
        trim_figures(run_dir, 5)
        assert run_dir.metrics.read_bytes() == lines(step(1))


def test_a_run_without_figures_is_trimmed_to_nothing(old):
    with RunDir.reopen(old) as run_dir:
        assert trim_figures(run_dir, 0) == 0
        assert not run_dir.metrics.exists()


def test_trimming_that_fails_leaves_the_figures_whole(old, monkeypatch):
    with RunDir.reopen(old) as run_dir:
        run_dir.metrics.write_bytes(lines(step(1), step(2)))

        def refuse(path, data):
            raise OSError(28, "No space left on device", str(path))

        monkeypatch.setattr(trim, "replace_file", refuse)
        with pytest.raises(StorageError) as caught:
            trim_figures(run_dir, 1)
        assert caught.value.code == "STO109"
        assert run_dir.metrics.read_bytes() == lines(step(1), step(2))
