"""Detached runs without their cluster: what a folder tells of one, what its driver does next, `attach` and `stop`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_cli.detaching import actor_name
from slime_cli.driver_process import Letter, next_words
from slime_cli.failure import CliSession
from slime_cli.following import named, plain, target_of
from slime_cli.main import main
from slime_cli.restarts import past
from slime_cli.submit import Detach, forget
from slime_core.clusters.detached import DriverRecord, code_of, read_record
from slime_core.errors import ConfigError, SlimeError
from slime_core.report import RunDir

pytestmark = pytest.mark.integration


def record(**parts):
    return DriverRecord(**{"actor": "driver:x-0", "address": "10.0.0.5:6379", "epoch": 0, "submitted": 1.0, **parts})


def test_an_actors_name_is_of_the_run_directory_however_it_is_named(tmp_path, monkeypatch):
    path = tmp_path / "runs" / "demo-0"
    path.mkdir(parents=True)
    (tmp_path / "link").symlink_to(path)
    monkeypatch.chdir(tmp_path)
    name = actor_name(path)
    assert name.startswith("driver:demo-0-")
    assert plain(name) == "demo-0"
    assert {actor_name(Path("runs/demo-0")), actor_name(tmp_path / "link")} == {name}
    assert actor_name(tmp_path / "other" / "demo-0") != name


def test_a_record_is_what_was_written_and_a_torn_one_is_none(tmp_path):
    assert read_record(tmp_path) is None
    record(asked="stop").write(tmp_path)
    assert read_record(tmp_path) == record(asked="stop")
    ended = record().asking("now").ending(75, 3)
    assert (ended.asked, ended.code, ended.last) == ("now", 75, 3)
    (tmp_path / "driver.json").write_text('{"actor": ')
    assert read_record(tmp_path) is None


@pytest.mark.parametrize(
    ("info", "code"),
    [
        ({"status": "finished"}, 0),
        ({"status": "stopped"}, 75),
        ({"status": "interrupted"}, 130),
        ({"status": "terminated"}, 143),
        ({"status": "failed", "error": "TRN105", "exit_code": 6}, 6),
        ({"status": "failed", "error": "ValueError"}, 1),
        ({"status": "running"}, 137),
        ({}, 137),
    ],
)
def test_how_a_run_ended_is_an_exit_code(info, code):
    assert code_of(info) == code


def made(tmp_path, *starts, **info):
    """A run directory with these starts, by status."""
    with RunDir.create("x", at=tmp_path / "x") as run_dir:
        rows = [{"epoch": n, "pid": 40 + n, "host": "node-a", "status": status} for n, status in enumerate(starts, 1)]
        status = starts[-1] if starts else None
        run_dir.write_info({"epoch": len(starts), "starts": rows, "status": status, **info})
        if starts:
            run_dir.write_config("")
    return run_dir


def letter(run_dir, **parts):
    given = {"run_dir": str(run_dir.path), "words": ["run", "--run-dir", "x", "r.toml"], "epoch": 0, "allowed": 3}
    return Letter(**{**given, **parts})


@pytest.fixture
def quick(monkeypatch):
    """No pause before a restart."""
    monkeypatch.setattr("slime_cli.driver_process.pause", lambda number: 0.0)


def test_the_first_process_runs_the_command_as_it_was_typed(tmp_path):
    run_dir = made(tmp_path)
    assert next_words(letter(run_dir), run_dir, CliSession()) == ["run", "--run-dir", "x", "r.toml"]
    old = made(tmp_path / "old", "finished")
    words = ["run", "--resume", "x", "--lr", "1"]
    assert next_words(letter(old, words=words, epoch=1), old, CliSession()) == words


def test_time_that_is_left_goes_on_from_the_submission(tmp_path):
    run_dir = made(tmp_path)
    words = next_words(letter(run_dir, until=time.time() + 100), run_dir, CliSession())
    assert words[:2] == ["run", "--stop-after"]
    assert 90 < float(words[2]) <= 100
    late = next_words(letter(run_dir, until=time.time() - 100), run_dir, CliSession())
    assert float(late[2]) == 1.0


def test_a_process_that_was_lost_is_a_restart_that_knows_its_past(tmp_path, quick, capsys):
    run_dir = made(tmp_path, "running")
    run_dir.metrics.write_text('{"kind": "step", "version": 2}\n')
    given = letter(run_dir, forced=["lr"], verify_step=3, secrets={"plugin.x.api_key": "hush"})
    words = next_words(given, run_dir, CliSession(verbose=True))
    assert words == ["run", "--resume", str(run_dir.path), "--force-key", "lr", "--verify-step", "3", "--verbose"]
    found = past()
    assert (found.number, found.allowed, found.secrets) == (1, 3, {"plugin.x.api_key": "hush"})
    assert found.deaths[0].summary == "SLM01 the driver, process 41 on node-a, was lost (at version 2)"
    assert "RESTART 1 of 3 in 0 s, after: SLM01" in capsys.readouterr().err


def test_restarts_of_the_driver_count_with_those_that_it_made_itself(tmp_path, quick):
    """It had lost a rank before it was lost itself, at the same version: it would end so again."""
    before = {
        "version": 0,
        "kind": "TrainerError",
        "error": {"what": "rank 1 is gone", "code": "TRN105", "where": "a"},
    }
    before["error"] |= {"why": "b", "fix": "c"}
    run_dir = made(tmp_path, "failed", "running", deaths=[before])
    with pytest.raises(SlimeError, match="TRN105 rank 1 is gone") as told:
        next_words(letter(run_dir), run_dir, CliSession())
    assert "restart 1 ended with SLM01 the driver, process 42" in told.value.why
    assert "step 1 was not finished after the restart either" in told.value.why
    allowed = made(tmp_path / "two", "running")
    with pytest.raises(SlimeError, match=r"0 restart\(s\) were allowed"):
        next_words(letter(allowed, allowed=0), allowed, CliSession())


@pytest.mark.parametrize("status", ["finished", "stopped", "terminated"])
def test_a_run_that_had_ended_as_its_keeper_was_lost_is_not_begun_again(tmp_path, status):
    run_dir = made(tmp_path, status)
    assert next_words(letter(run_dir), run_dir, CliSession()) is None


def test_the_drivers_words_name_the_run_directory_and_keep_the_users(tmp_path):
    def words(**parts):
        given = {
            "session": CliSession(),
            "words": ("r.toml", "--lr", "1"),
            "run_dir": None,
            "resume": None,
            "old": None,
        }
        return Detach(**{**given, "forced": (), "stop_after": None, "verify_step": 0, **parts}).first(Path("/runs/x"))

    assert words() == ["run", "--run-dir", "/runs/x", "r.toml", "--lr", "1"]
    assert words(resume="auto", verify_step=2)[:6] == [
        "run",
        "--resume",
        "auto",
        "--run-dir",
        "/runs/x",
        "--verify-step",
    ]
    again = words(resume="runs/x", forced=("lr",), session=CliSession(verbose=True))
    assert again[:6] == ["run", "--resume", "/runs/x", "--force-key", "lr", "--verbose"]


def test_a_folder_is_taken_away_again_only_where_nothing_has_begun(tmp_path):
    for name, begun in (("a", False), ("b", True)):
        with RunDir.create(name, at=tmp_path / name) as run_dir:
            record().write(run_dir.path)
            (run_dir.log / "driver.log").touch()
            if begun:
                run_dir.write_config("")
        forget(run_dir.path)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b" / "run.json").exists()


def test_a_folder_with_a_record_and_the_drivers_output_is_still_free(tmp_path):
    with RunDir.create("x", at=tmp_path / "x") as run_dir:
        record().write(run_dir.path)
        (run_dir.log / "driver.log").write_text("importing\n")
    with RunDir.create("x", at=tmp_path / "x") as again:
        assert again.path == run_dir.path


def test_attach_shows_a_finished_run_and_ends_as_it_did(cli, small):
    done = cli("attach", small.run)
    assert done.code == 0
    assert "grpo step 3/3" in done.err


def test_attach_ends_with_what_the_newer_of_two_processes_ended_with(cli, tmp_path):
    """A detached run that somebody went on with in the foreground."""
    run_dir = made(tmp_path, "stopped", "failed", exit_code=6, error="TRN105")
    record().ending(75, 1).write(run_dir.path)
    assert cli("attach", run_dir.path).code == 6
    record().ending(6, 2).write(run_dir.path)
    (run_dir.log / "driver.log").write_text("the driver said this\n")
    done = cli("attach", run_dir.path)
    assert (done.code, "the driver said this" in done.err) == (6, True)


def test_a_run_that_somebody_goes_on_with_is_not_looked_for_on_its_old_cluster(tmp_path):
    """Its record has no end: the cluster was gone before the actor could write one."""
    run_dir = made(tmp_path, "running")
    record().write(run_dir.path)
    assert target_of(run_dir.path).detached
    run_dir.write_info({"detached": True})
    assert target_of(run_dir.path).detached
    run_dir.write_info({"detached": False, "status": "finished"})
    assert not target_of(run_dir.path).detached
    assert target_of(run_dir.path).code == 0


GIVEN_UP = """
import subprocess, sys, time
from pathlib import Path
from slime_ray.driver import Driver

keeper = Driver.__new__(Driver)
keeper._path, keeper._name = Path(sys.argv[1]), "old"
keeper._child = subprocess.Popen(["sleep", "600"])
print(keeper._child.pid, flush=True)
try:
    keeper._look()
    print("it is the keeper still", flush=True)
finally:
    keeper._child.kill()
"""


@pytest.mark.parametrize("keeper", ["new", "old"])
def test_a_keeper_that_was_given_up_ends_its_process_and_touches_nothing(tmp_path, keeper):
    """Its machine was out of reach, and another has the actor's name by now: one kill by that name would end it."""
    pytest.importorskip("ray", reason="not proven: Ray is not installed")
    record(keeper=keeper).write(tmp_path)
    done = subprocess.run([sys.executable, "-c", GIVEN_UP, tmp_path], capture_output=True, text=True, timeout=120)
    pid, *said = done.stdout.split("\n")
    assert (done.returncode, said[0]) == (0, "it is the keeper still" if keeper == "old" else "")
    assert not Path(f"/proc/{pid}").exists()
    assert read_record(tmp_path) == record(keeper=keeper)


def test_a_cluster_that_is_gone_is_told_with_the_way_to_go_on(cli, tmp_path):
    pytest.importorskip("ray", reason="not proven: Ray is not installed")
    run_dir = made(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"  # nobody's, when it is closed
    record(address=address).write(run_dir.path)
    for verb in ("attach", "stop"):
        done = cli(verb, run_dir.path)
        assert done.code == 2
        assert f"error CFG17  no Ray cluster can be joined at {address}" in done.err
        assert f"slime run --resume {run_dir.path}" in done.err


@pytest.mark.parametrize("words", [("attach",), ("attach", "nobody"), ("stop", "nobody")], ids=" ".join)
def test_without_ray_detached_runs_are_told_to_need_it(cli, monkeypatch, words):
    for name in [name for name in sys.modules if name.startswith("slime_ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    done = cli(*words)
    assert done.code == 2, done.err
    assert "error CFG04  detached runs live on a Ray cluster, and ray is not installed here" in done.err
    assert 'pip install "ray[default]>=2.54"' in done.err
    assert ("name the run directory" in done.err) == (len(words) > 1)


@pytest.mark.parametrize("verb", ["attach", "stop"])
def test_a_name_that_is_no_folder_is_said_to_be_none_where_no_cluster_is(cli, tmp_path, monkeypatch, verb):
    pytest.importorskip("ray", reason="not proven: Ray is not installed")
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"127.0.0.1:{door.getsockname()[1]}"  # nobody's, when it is closed
    monkeypatch.setenv("RAY_ADDRESS", address)
    for words in ((), ("--address", address)):
        assert "--ray-address" not in cli("attach", *words).err
    done = cli(verb, "demo-7")
    assert done.code == 2
    assert "error CFG17" in done.err
    assert f"why: 'demo-7' is not a folder in {tmp_path}, so it was looked up on a Ray cluster; " in done.err
    assert "fix: name the run directory, such as runs/NAME-0\n" in done.err
    assert "--ray-address" not in done.err


def test_a_run_directory_in_a_job_of_ray_is_refused(cli, own, tmp_path, monkeypatch):
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    done = cli("run", *own.flags)
    assert done.code == 2
    assert "error CFG20" in done.err
    assert list(folder.iterdir()) == []


def test_attach_and_stop_refuse_what_is_no_run(cli, tmp_path):
    for verb in ("attach", "stop"):
        done = cli(verb, tmp_path)
        assert done.code == 2
        assert "error CFG05" in done.err
    with pytest.raises(ConfigError, match="CFG05"):
        named(f"{tmp_path}/gone/", "")


@pytest.mark.nightly
def test_a_run_in_the_foreground_is_followed_and_stopped_in_order(own, tmp_path, capsys):
    """It is held in a reward; another process asks it to end, a third one has followed it all the while."""
    (own.path / "judge.py").write_text(HELD)
    path = tmp_path / "held"
    words = [sys.executable, "-m", "slime_cli.main", "run", *map(str, own.flags), "--run-dir", str(path)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            until((own.path / "held").exists)
            attach = [sys.executable, "-m", "slime_cli.main", "attach", str(path)]
            with subprocess.Popen(attach, stderr=subprocess.PIPE, text=True) as follower:
                assert "main step 1/4" in until_said(follower, "main step 1/4")
                assert main(["stop", str(path)]) == 0
                assert follower.wait(60) == 75
                follower.stderr.close()
            assert run.wait(60) == 75
        finally:
            run.kill()
            run.stderr.close()
    assert "ended with exit code 75" in capsys.readouterr().err
    assert json.loads((path / "run.json").read_text())["exit_code"] == 75
    assert main(["stop", str(path)]) == 2
    assert "no process runs in this run directory" in capsys.readouterr().err


HELD = '''
import asyncio
from itertools import count
from pathlib import Path

calls = count(1)

async def reward(args, sample, **kwargs):
    """The sixth call, in the second step, waits until the run is asked to end."""
    if next(calls) == 6:
        Path(__file__).with_name("held").touch()
        await asyncio.sleep(600)
    return len(sample.response) % 3 / 3
'''


def until(happened):
    """Wait for what another process does."""
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def until_said(process, words):
    """Its talk up to a line with the words."""
    said = ""
    while words not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    return said


STUBBORN = """
import signal, sys, time
from pathlib import Path
from slime_core.report import RunDir
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with RunDir.reopen(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_stop_now_kills_a_process_that_does_not_listen(tmp_path, monkeypatch, capsys):
    run_dir = made(tmp_path, "running")
    monkeypatch.setattr("slime_cli.stop.NOW", 0.5)
    with subprocess.Popen([sys.executable, "-c", STUBBORN, str(run_dir.path)], stdout=subprocess.PIPE) as held:
        try:
            assert held.stdout.readline() == b"held\n"
            assert main(["stop", str(run_dir.path), "--now"]) == 0
            assert held.wait(30) == -signal.SIGKILL
        finally:
            held.kill()
    assert "ended with exit code 137" in capsys.readouterr().err


def test_a_process_on_another_machine_is_not_signalled(tmp_path, monkeypatch, capsys):
    run_dir = made(tmp_path, "running")
    with RunDir.reopen(run_dir.path):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        assert main(["stop", str(run_dir.path)]) == 2
    said = capsys.readouterr().err
    assert "the run's process is on another machine" in said
    assert f"kill -TERM {os.getpid()}" in said
