"""Signals, clocks and closed pipes: a run ends in order with a checkpoint, or at once, and leaves nothing behind."""

import contextlib
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_cli.main import main
from slime_cli.signals import Signals, descendants
from slime_core.preemption import StopSignal
from slime_core.report import RunDir, history

pytestmark = pytest.mark.integration


PHASES = """
import os
import signal
import slime_core

def reached(phase):
    wanted, _, rest = os.environ.get("STOP_IN", "").partition(" ")
    number, _, name = rest.partition(" ")
    if phase == wanted:
        seen[phase] = seen.get(phase, 0) + 1
        if seen[phase] == int(number) and name == "HANG":
            print("hangs", flush=True)
            while True:
                signal.pause()
        if seen[phase] == int(number):
            os.kill(os.getpid(), getattr(signal, name or "SIGTERM"))

seen = {}

class Holder:
    def state(self):
        reached("checkpoint")
        return {"here": True}
    def load(self, state):
        assert state == {"here": True}

class Tracker:
    def start(self, run_dir, config):
        reached("start")
    def write(self, report):
        reached("figures")
    def close(self):
        reached("close")

@slime_core.hookimpl
def slime_state():
    return Holder()

@slime_core.hookimpl
def slime_sinks(ctx):
    return [Tracker()]

@slime_core.hookimpl
def slime_sample_done(sample, ctx):
    reached("evaluation" if ctx.evaluation else "rollout")

@slime_core.hookimpl
async def slime_filter(group, ctx):
    reached("filter")

@slime_core.hookimpl
def slime_batch(batch, ctx):
    reached("batch")

@slime_core.hookimpl
def slime_step_done(report, ctx):
    reached("step_done")
"""


def weights(path):
    return hashlib.sha256((Path(path) / "final" / "model.safetensors").read_bytes()).hexdigest()


def info(path):
    return json.loads((Path(path) / "run.json").read_text())


def shared_memory():
    """Names of POSIX shared memory that we hold or that nobody does; folders there belong to others.

    Servers of SGLang that tests beside this one start and kill leave theirs (semaphores of multiprocessing, which no
    process of ours uses, and files of their own) until somebody sweeps: they are not a run's.
    """
    names = {entry.name for entry in Path("/dev/shm").glob("*") if entry.is_file()}
    return sorted(name for name in names - mapped_by_others() if not name.startswith(("sem.mp-", "sglang_", "sgl_")))


def mapped_by_others():
    """What processes beside this one and its children have mapped: servers of tests that run at the same time."""
    ours, found = {os.getpid(), *descendants(os.getpid())}, set()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in ours:
            with contextlib.suppress(OSError):
                found |= {
                    line.rpartition("/")[2]
                    for line in (process / "maps").read_text().splitlines()
                    if "/dev/shm/" in line
                }
    return found


def left_behind():
    """What a run could leave on the machine: children, shared memory, temporary files, listening sockets."""
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()
            listening |= {fields[9]} if fields[3] == "0A" else set()
    own = {
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    }
    return {
        "children": descendants(os.getpid()),
        "shared": shared_memory(),
        "listening": {i for i in listening if f"socket:[{i}]" in own},
    }


@pytest.fixture(scope="module")
def whole(make_own, tmp_path_factory):
    """The weights of a run that nothing stopped."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert main([str(word) for word in ("run", *make_own().flags, "--run-dir", path)]) == 0
    return weights(path)


@pytest.fixture
def phases(install_plugin):
    """The plugin that sends a signal from inside a phase, with nothing counted yet."""
    install_plugin("phases", PHASES)
    yield ("--plugin", "phases")
    sys.modules.pop("phases_plugin_module", None)


@pytest.mark.parametrize(
    ("phase", "versions"),
    [
        ("start 1", {0}),  # trackers open: nothing is loaded yet
        pytest.param("evaluation 1", {0}, marks=pytest.mark.nightly),
        ("rollout 6", {1}),
        pytest.param("filter 4", {1, 2}, marks=pytest.mark.nightly),
        ("batch 2", {2}),  # between journal and optimizer step
        pytest.param("step_done 1", {1}, marks=pytest.mark.nightly),
        pytest.param(
            "figures 3", {2, 3}, marks=pytest.mark.nightly
        ),  # with the evaluation before the first step, the second step's
        ("checkpoint 2", {2}),  # once at the start, then while version 2 is being saved
        ("checkpoint 3", {4}),
    ],
)
def test_sigterm_in_any_phase_ends_with_a_checkpoint_and_goes_on_exactly(
    cli, own, phases, whole, monkeypatch, phase, versions
):
    """init, evaluation, rollout, reward, journal, step, figures, checkpoint; exit 75, and the same weights."""
    before = left_behind()
    monkeypatch.setenv("STOP_IN", phase)
    flags = (*own.flags, *phases, "--eval-prompt-data", "held", own.path / "my.jsonl@[0:2]")
    done = cli("run", *flags, "--run-dir", "cut")
    monkeypatch.delenv("STOP_IN")
    if versions == {4}:
        assert done.code == 0, "the last step was being saved: the run is done"
    else:
        assert (done.code, done.out) == (75, ""), done.err
        assert f"resume  slime run --resume {Path('cut').absolute()}" in done.err
        assert "Traceback" not in done.err
        assert (info("cut")["status"], info("cut")["error"]) == ("stopped", "RUN75")
        facts = json.loads(cli("show", "cut", "--json").out)
        assert facts["resume"]["from"] == "checkpoint"
        assert facts["resume"]["version"] in versions
        sys.modules.pop("phases_plugin_module", None)
        again = cli("run", "--resume", "cut")
        assert again.code == 0, again.err
    assert weights("cut") == whole
    assert left_behind() == before


def test_sigterm_before_there_is_a_run_ends_with_143(cli, own, install_plugin, monkeypatch):
    """While plugins are imported there is nothing to keep, and nothing is made."""
    install_plugin("early", "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n" + "x = 1\n" * 3)
    done = cli("run", *own.flags, "--plugin", "early", "--run-dir", "cut")
    assert done.code == 143
    assert "terminated" in done.err
    assert not Path("cut").exists()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGHUP", 75)])
def test_other_signals_checkpoint_too(cli, own, phases, whole, monkeypatch, name, code):
    """Ctrl-C once, and a terminal that goes away."""
    monkeypatch.setenv("STOP_IN", f"rollout 6 {name}")
    done = cli("run", *own.flags, *phases, "--run-dir", "cut")
    monkeypatch.delenv("STOP_IN")
    assert done.code == code, done.err
    assert f"stopped at version 1 ({name})" in done.err
    assert info("cut")["status"] == "stopped"
    sys.modules.pop("phases_plugin_module", None)
    assert cli("run", "--resume", "cut").code == 0
    assert weights("cut") == whole


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with Signals():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


def test_a_signal_that_is_ignored_stays_ignored():
    """nohup ignores SIGHUP, a shell ignores SIGINT of its background jobs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals, signals.requesting(stop := StopSignal()):
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason == ""
    finally:
        signal.signal(signal.SIGHUP, before)


def begin(own, tmp_path, *more, **env):
    """`slime run` in a process of its own, with its own folder for temporary files."""
    (tmp_path / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "slime_cli.main", "run", *map(str, own.flags), "--run-dir", "cut", *more],
        cwd=tmp_path,
        env={
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TMPDIR": str(tmp_path / "tmp")},
            **{"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]), **env},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where pytest runs in the background
    )


@pytest.mark.parametrize(
    ("number", "ranks", "code", "status"),
    [
        pytest.param(signal.SIGTERM, "2", 143, "terminated", id="SIGTERM with two ranks", marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, "1", 130, "interrupted", id="SIGINT"),
    ],
)
def test_the_second_signal_ends_at_once_and_leaves_nothing(own, tmp_path, phases, number, ranks, code, status):
    """A run that cannot stop in order ends all the same; nothing of it is left on the machine.

    Before that it says where it hangs, when SIGUSR1 asks.
    """
    shared = shared_memory()
    process = begin(own, tmp_path, *phases, "--actor-num-gpus-per-node", ranks, STOP_IN="step_done 1 HANG")
    assert process.stdout.readline() == "hangs\n", process.communicate()
    children = [os.pidfd_open(child) for child in descendants(process.pid)]
    assert len(children) >= (2 if ranks == "2" else 0)
    process.send_signal(signal.SIGUSR1)
    assert any(" in reached" in line for line in process.stderr), process.wait()
    process.send_signal(number)
    for line in process.stderr:
        if "a second signal ends the run at once" in line:
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "ended at once" in err
    assert info(tmp_path / "cut")["status"] == status
    for child in children:  # killed each, and soon through with dying
        assert select.select([child], [], [], 60)[0]
        os.close(child)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert shared_memory() == shared
    assert RunDir(tmp_path / "cut").holder() is None


def test_a_run_that_was_stopped_and_that_nobody_reads_goes_on_to_the_same_weights(own, tmp_path, whole):
    """The stop is longer than the reward's deadline, and no group is dropped or made twice for it.

    stdout and stderr are closed pipes; the talk is in log/run.log.
    """
    process = begin(own, tmp_path, "--reward-timeout", "1", HALT="main/4-0 SIGSTOP")
    process.stdout.close()
    process.stderr.close()
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(1.5)  # the length of the stop
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=120) == 0
    assert weights(tmp_path / "cut") == whole
    assert history.states(RunDir(tmp_path / "cut")) == {"issued": 16, "trained": 16, "pending": 0}
    assert info(tmp_path / "cut")["status"] == "finished"
    assert "1 trainer rank(s)" in (tmp_path / "cut" / "log" / "run.log").read_text()


def test_a_clock_that_jumps_changes_nothing(cli, own, whole, monkeypatch):
    """A day forward, a day back, at every look."""
    real, jumps = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + 86_400 * (-1) ** next(jumps))
    assert cli("run", *own.flags, "--run-dir", "cut").code == 0
    assert weights("cut") == whole


def test_time_that_is_up_ends_a_run_with_a_checkpoint(cli, own, whole):
    done = cli("run", *own.flags, "--run-dir", "cut", "--stop-after", "0.1")
    assert done.code == 75, done.err
    assert (
        "stopped at version 0 (--stop-after); the time is up; nothing is lost, a resume starts from checkpoint 0"
        in done.err
    )
    assert cli("run", "--resume", "cut", "--stop-after", "5h").code == 0
    assert weights("cut") == whole
