"""A hook that holds the interpreter or the event loop: limits are kept and signals heard by a process beside the run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slime_cli.starts import begin
from slime_core.report import RunDir

pytestmark = pytest.mark.integration

DRIVER = """
import asyncio, ctypes, re, sys, time
from pathlib import Path

from slime_cli.signals import Signals
from slime_cli.watched import watched
from slime_core.plugins.boundary import HookImpl, HookThreads, Provider, call, call_now
from slime_core.preemption import StopSignal


def slow(way):
    return re.match(r"(a+)+$", "a" * 60 + "b")


async def slow_later(way):
    return slow(way)


def asleep(way):
    return ctypes.PyDLL(None).sem_wait(bytes(32))


async def loops(way):
    while True:
        pass


def loops_now(way):
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass


async def blocks(way):
    time.sleep(8)
    await asyncio.sleep(0)


async def waits(way):
    await asyncio.sleep(8)


def asked(fn, limit=float(sys.argv[3])):
    provider = Provider(name="geo", origin="geo==1.0", source="plugin", home=Path(__file__))
    answer = HookImpl(provider=provider, hook="slime_reward", fn=fn, takes=None)
    about = {"about": "prompt 'main/3'", "key": "reward.reward_timeout"}
    if sys.argv[2].endswith("now"):
        return call_now(answer, {"way": 1}, limit=limit, **about)
    return asyncio.run(signals.drive(call(HookThreads(), answer, {"way": 1}, deadline=limit, **about)))


WAYS = {"now": slow, "thread": slow, "awaited": slow_later, "asleep": asleep}
WAYS |= {"loops": loops, "loops now": loops_now, "blocks": blocks, "waits": waits}
run, way, timeout = Path(sys.argv[1]), sys.argv[2], float(sys.argv[4])
with Signals() as signals, signals.requesting(StopSignal()), watched(run, timeout):
    print("begins", flush=True)
    asleep(way) if way == "core" else asked(WAYS[way])
"""


def place(folder, name, text):
    """Where the driver stands, as messages say it."""
    line = next(number for number, one in enumerate(DRIVER.splitlines(), 1) if text in one)
    return f"{name} ({folder / 'driver.py'}:{line})"


def ticks(pid):
    """Processor time of a process, in clock ticks."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


TOGETHER = [("thread", 600, 0), ("thread", 0.5, 0), ("loops", 0.5, 0), ("blocks", 600, 0), ("core", 600, 0.5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the driver's program is."""
    path = tmp_path_factory.mktemp("driver")
    (path / "driver.py").write_text(DRIVER)
    return path


@pytest.fixture(scope="module")
def start(folder):
    """Start a process that holds its interpreter for ever, in a run; its first words are still to be read."""
    processes = []

    def start(*words):
        with RunDir.create("demo", at=folder / f"run-{len(processes)}") as run_dir:
            begin(run_dir, 0, {})
            run_dir.ledger.touch()
        command = [sys.executable, str(folder / "driver.py"), str(run_dir.path), *map(str, words)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return processes[-1], run_dir

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def together(start):
    """Those that several tests wait for, which takes seconds of each, at the same time."""
    return {words: start(*words) for words in TOGETHER}


@pytest.fixture
def driver(start, together):
    """A process that has begun, one of those that began together where it can be."""

    def driver(*words):
        process, run_dir = together.pop(words, None) or start(*words)
        assert process.stdout.readline() == "begins\n"
        return process, run_dir

    return driver


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, "interrupted", id="SIGINT"),
        pytest.param(signal.SIGTERM, "terminated", id="SIGTERM", marks=pytest.mark.nightly),
    ],
)
def test_a_second_signal_ends_a_run_whose_interpreter_is_held_and_the_first_says_by_whom(
    driver, folder, number, status
):
    process, run_dir = driver("thread", 600, 0)
    stood = place(folder, "slow", "re.match")
    begun = ticks(process.pid)
    while ticks(process.pid) < begun + 40:  # by then it is the expression that takes the processor
        os.sched_yield()
    process.send_signal(number)
    assert process.stderr.readline() == "\n"
    told = f"{number.name}: not handled yet: Python is blocked at {stood}; a second signal ends the run at once\n"
    assert process.stderr.readline() == told
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert f"{number.name} again: ended at once" in said
    assert f"blocked at {stood}" in said
    assert run_dir.read_info()["status"] == status


@pytest.mark.parametrize(
    "way", ["thread", *(pytest.param(way, marks=pytest.mark.nightly) for way in ("now", "awaited", "asleep"))]
)
def test_a_hook_that_holds_the_interpreter_is_ended_at_its_limit_and_named_with_its_line(driver, folder, way):
    process, run_dir = driver(way, 0.5, 0)
    _, said = process.communicate(timeout=60)
    stood = place(folder, *(("asleep", "sem_wait") if way == "asleep" else ("slow", "re.match")))
    assert process.returncode == -signal.SIGKILL
    assert "error PLG60  geo.slime_reward did not answer in 0.5 s for prompt 'main/3'" in said
    assert f"blocked at {stood}" in said
    assert "reward.reward_timeout=1" in said
    assert f"slime run --resume {run_dir.path}" in said
    assert "(exit 137)" in said
    info = run_dir.read_info()
    assert (info["status"], info["error"], info["exit_code"]) == ("failed", "PLG60", 137)
    assert info["starts"][-1]["status"] == "failed"
    assert (run_dir.log / "hang-0.txt").read_text().strip() in said


@pytest.mark.parametrize(
    ("way", "function"),
    [
        ("loops", "loops"),
        pytest.param("loops now", "loops_now", marks=pytest.mark.nightly),
    ],
)
def test_a_hook_that_loops_on_the_event_loop_is_ended_at_its_limit_and_named_with_its_line(
    driver, folder, way, function
):
    """Where asyncio cannot run, because the hook holds its loop."""
    process, run_dir = driver(way, 0.5, 0)
    _, said = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert "error PLG60  geo.slime_reward did not answer in 0.5 s for prompt 'main/3'" in said
    assert "it holds the event loop" in said
    assert f"blocked at {function} ({folder / 'driver.py'}:" in said
    assert "own_process" in said
    assert run_dir.read_info()["error"] == "PLG60"


@pytest.mark.parametrize("way", ["blocks", pytest.param("waits", marks=pytest.mark.nightly)])
def test_a_blocking_call_in_an_async_hook_is_named_with_its_line_and_one_that_waits_is_not(driver, folder, way):
    """A line on the terminal and in the log with plugin, hook and line; not an error."""
    process, run_dir = driver(way, 600, 0)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    stood = place(folder, "blocks", "time.sleep(8)")
    lags = [line for line in said.splitlines() if "blocked the event loop" in line]
    assert len(lags) == (way == "blocks"), said
    if lags:
        assert lags[0].startswith("geo.slime_reward (prompt 'main/3') has blocked the event loop for ")
        assert f"at {stood}" in lags[0]
        assert lags[0] in (run_dir.log / "run.log").read_text()


def test_code_of_no_hook_that_holds_the_interpreter_is_ended_after_hang_timeout(driver, folder):
    process, run_dir = driver("core", 600, 0.5)
    _, said = process.communicate(timeout=60)
    stood = place(folder, "asleep", "sem_wait")
    assert f"error HNG125  the driver's interpreter is blocked at {stood}" in said
    assert run_dir.read_info()["error"] == "HNG125"


def test_the_watchdog_ends_with_the_block_and_leaves_handlers_and_descriptors_as_they_were(tmp_path):
    source = """
import os, signal, sys
from pathlib import Path
from slime_cli.signals import descendants
from slime_cli.watched import watched
before = os.listdir("/proc/self/fd")
with watched(Path(sys.argv[1]), 1.0):
    assert len(descendants(os.getpid())) == 1
assert descendants(os.getpid()) == []
assert os.listdir("/proc/self/fd") == before
assert signal.set_wakeup_fd(-1) == -1
"""
    subprocess.run([sys.executable, "-c", source, str(tmp_path)], check=True, env={**os.environ, "COLUMNS": "80"})


def test_the_state_of_the_driver_can_be_read_while_it_runs(tmp_path):
    from slime_core.heartbeat import HeartbeatMemory, HookCall

    memory = HeartbeatMemory(os.memfd_create("heartbeat"))
    call = HookCall(
        limit=3.0, hook="geo.slime_reward", provider="geo", key="k", source="/x", subject="prompt " + "é" * 900
    )
    slot = memory.begin_call(call)
    memory.beat(), memory.signal(), memory.signal(), memory.loop_beat()
    other = HeartbeatMemory(memory.descriptor)
    assert (other.beats, other.signals, other.loop_beats) == (1, 2, 1)
    assert json.dumps(
        [(one.limit, one.hook, one.source) for calls in other.calls().values() for one in calls]
    ) == json.dumps([(3.0, "geo.slime_reward", "/x")])
    memory.end_call(slot)
    assert other.calls() == {}
    os.close(memory.descriptor)
