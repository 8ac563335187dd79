"""Who is named when a part hangs, and what the page says; the processes are real where the kernel is asked."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slime_core.clusters.channel import Child, ProcessChannel
from slime_core.clusters.hangs import (
    Look,
    Member,
    ProcessReport,
    Servers,
    cause,
    collective,
    look,
    place,
    render,
    watching,
)
from slime_core.config.schema import Config
from slime_core.config.sections.cluster import ClusterSection
from slime_core.errors import Hung, TrainerError
from slime_core.report import Report, RunDir

pytestmark = pytest.mark.integration

REDUCING = """Thread 0x0000aaaa (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 2961 in all_reduce
  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/x/slime_core/trainers/fsdp/worker.py", line 210 in step

Current thread 0x0000bbbb (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 468 in select
  File "/usr/lib/python3.11/asyncio/base_events.py", line 1898 in _run_once
"""
BUSY = """Thread 0x0000aaaa (most recent call first):
  File "/x/mine/hook.py", line 7 in compute
  File "/x/slime_core/trainers/fsdp/worker.py", line 210 in step
"""
BARRIER = REDUCING.replace("2961 in all_reduce", "4012 in barrier")


def rank(number, stack="", state="S", doing="step", **facts):
    known = Look(pid=100 + number, state=state, stack=stack, **facts)
    return ProcessReport(name=f"rank {number}", node=socket.gethostname(), doing=doing, seconds=35.0, look=known)


DRIVER = ProcessReport(
    name="driver", node=socket.gethostname(), doing="train", seconds=35.0, look=Look(pid=1, state="S")
)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        pytest.param(
            [rank(0, REDUCING), rank(1, state="T"), rank(2, REDUCING)],
            "rank 1 (pid 101) is stopped (state T), for 35 s in step; rank 0, rank 2 wait for it in all_reduce",
            id="stopped",
        ),
        pytest.param(
            [rank(0, REDUCING), rank(1, BUSY)],
            "rank 1 (pid 101) is in compute in hook.py:7, for 35 s in step; rank 0 waits for it in all_reduce",
            id="elsewhere",
        ),
        pytest.param(
            [rank(0, REDUCING), rank(1, BARRIER)],
            "trainer ranks wait in different collectives, for 35 s in step: rank 0 in all_reduce, rank 1 in barrier",
            id="different collectives",
        ),
        pytest.param(
            [rank(0, doing=""), rank(1, BUSY)],
            "rank 1 (pid 101) makes no progress, for 35 s in step: it is in compute in hook.py:7",
            id="alone",
        ),
        pytest.param(
            [rank(0, REDUCING), rank(1, state="", note="no answer from node-3 in 12 s")],
            "rank 1 (pid 101) cannot be asked: no answer from node-3 in 12 s, for 35 s in step; rank 0 waits for it in "
            "all_reduce",
            id="out of reach",
        ),
        pytest.param([], "driver (pid 1) makes no progress, for 35 s in train", id="the driver itself"),
    ],
)
def test_the_first_line_names_who_keeps_the_others_waiting(seen, told):
    late = "rank 1" if seen else "driver"
    assert cause([DRIVER, *seen], late) == told


def test_stacks_tell_the_collective_and_the_place():
    assert (collective(REDUCING), collective(BUSY), collective("")) == ("all_reduce", "", "")
    assert (place(BUSY), place("")) == ("compute in hook.py:7", "")


def test_a_page_has_every_process_and_its_stack():
    page = render(
        "why", {"run": "/r"}, [DRIVER, rank(0, REDUCING), rank(1, state="T", note="it is stopped")], "here I am"
    )
    assert page.startswith("HANG  why\nrun     /r\n\nprocess  pid")
    assert "-- driver (pid 1)\nhere I am\n" in page
    assert f"-- rank 0 (pid 100)\n{REDUCING}" in page
    assert "-- rank 1 (pid 101)\nit is stopped\n" in page


SLEEPER = """
import os, sys
from slime_core.clusters.hangs import show_stacks
if sys.argv[1] == "hears":
    show_stacks()
def waits_here():
    os.write(1, b"ready")
    sys.stdin.read()
waits_here()
"""


@pytest.fixture
def sleeper(tmp_path):
    """A process that waits for input, with its log; ``hears``: it writes its stacks when it is asked."""
    started = []

    def start(word):
        log = tmp_path / f"{word}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                [sys.executable, "-c", SLEEPER, word], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out
            )
        started.append(child)
        assert child.stdout.read(5) == b"ready"
        return child, log

    yield start
    for child in started:
        child.kill()
        child.stdin.close()
        child.stdout.close()
        child.wait()


def test_a_process_tells_where_it_is(sleeper):
    child, log = sleeper("hears")
    found = asyncio.run(look(child.pid, log))
    assert found.state in "SR"
    assert " in waits_here" in found.stack
    assert child.poll() is None


def test_a_process_that_does_not_listen_is_not_killed_by_the_question(sleeper):
    child, log = sleeper("deaf")
    found = asyncio.run(look(child.pid, log))
    assert (found.stack, found.note) == ("", "it does not handle SIGUSR1 yet")
    assert child.poll() is None


def test_a_process_that_is_stopped_or_dead_is_said_to_be(sleeper):
    child, log = sleeper("hears")
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert asyncio.run(look(child.pid, log)).description == "T stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert asyncio.run(look(child.pid, log)).description == "Z dead"
    child.wait()
    assert asyncio.run(look(child.pid, log)).description == "it is dead"


class Part:
    """One process that has been asked for something, long ago."""

    def __init__(self, channel, since, doing="step"):
        self.member = Member(name="rank 0", channel=channel, doing=doing, since=since)

    def members(self):
        return [self.member]


@pytest.fixture
def report(tmp_path):
    with RunDir.create("run", at=tmp_path / "run") as run_dir:
        yield Report(run_dir, Config())


def config(seconds):
    return Config(cluster=ClusterSection(hang_timeout=seconds))


def test_a_hanging_rank_is_ended_and_the_watched_block_raises(report, tmp_path):
    told = []
    report.on_hang = told.append

    async def run():
        channel = await ProcessChannel.start(Child(module="slime_core.clusters.ranks", log=tmp_path / "child.log"))
        try:
            async with watching(config(0.5), report) as watch:
                watch.add(Part(channel, asyncio.get_running_loop().time()))
                await asyncio.Event().wait()
        finally:
            assert await channel.ended(5.0)
            await channel.close()

    with pytest.raises(Hung, match="rank 0") as caught:
        asyncio.run(run())
    assert told == [caught.value]
    assert (caught.value.code, caught.value.exit_code) == ("HNG125", 9)
    assert (report.run_dir.log / "hang-0.txt").read_text().startswith(f"HANG  {caught.value.what}\n")


def test_a_phase_of_the_driver_has_a_deadline_too(report):
    async def run():
        async with watching(config(0.5), report):
            report.phase("train")
            await asyncio.Event().wait()

    with pytest.raises(Hung, match=r"driver .* makes no progress, for .* in train"):
        asyncio.run(run())


class Server:
    title, owned = "SGLang server 3", True

    def __init__(self, pid):
        self.host = SimpleNamespace(pid=pid, place="", state=self._state)

    async def _state(self):
        return "S" if self.host.pid else ""


def test_servers_are_lines_of_the_page_and_are_left_to_their_own_watch(report):
    async def run():
        async with watching(config(0.5), report) as watch:
            watch.add(Servers([Server(os.getpid()), Server(0)]))
            report.phase("train")
            await asyncio.Event().wait()

    with pytest.raises(Hung, match="driver"):
        asyncio.run(run())
    page = (report.run_dir.log / "hang-0.txt").read_text()
    assert f"SGLang server 3  {os.getpid()} " in page
    assert "it is not running" in page


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_errors_pass_where_nothing_hangs(report, seconds):
    async def run():
        async with watching(config(seconds), report) as watch:
            watch.add(Part(None, 0.0, doing=""))
            raise TrainerError("its own")

    with pytest.raises(TrainerError, match="its own"):
        asyncio.run(run())
