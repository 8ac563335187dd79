"""Kill a run at random moments and start it again until it ends: how durability is proven, ours and a plugin's.

    fork -> start(resume=False) --SIGKILL--> fork -> start(resume=True) --SIGKILL--> ... -> exit 0 -> `audit`

The process that forks has imported everything and runs one thread, no event loop and no database, so that a start
costs what a run's own start costs. Half of the kills come at a uniformly random moment, half within two milliseconds
of a durable boundary, where it gets there: the child stops itself (SIGSTOP), and is killed standing or running on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slime_core import failpoints

Start = Callable[[bool], None]
"""What a child runs: make the run, or with True go on with it; returns when the run has ended."""

PR_SET_PDEATHSIG = 1
HUNG_SECONDS = 60.0
NEAR_SECONDS = 0.002  # after a boundary


@dataclass(slots=True, frozen=True, kw_only=True)
class Kill:
    """When a child dies: ``seconds`` after its start, or ``late`` seconds after it came to ``boundary``, if sooner."""

    seconds: float
    boundary: str = ""
    nth: int = 1
    late: float = 0.0


@dataclass(slots=True, frozen=True, kw_only=True)
class Ended:
    """How a child ended: ``code`` is its exit status, -9 where it was killed."""

    code: int
    seconds: float
    left: tuple[int, ...] = ()  # processes of its session that outlived it
    stood: bool = False  # it came to the boundary


@dataclass(slots=True)
class Story:
    """What became of one run."""

    kills: int = 0
    starts: int = 0
    seconds: float = 0.0
    boundaries: dict[str, int] = field(default_factory=dict)  # kills at each
    wrong: list[str] = field(default_factory=list)  # empty where all is well


def plan(rng: random.Random, seconds: float) -> Kill:
    """One random kill of a run that takes ``seconds`` from its start to its end."""
    moment = rng.uniform(0.0, seconds)
    if rng.random() < 0.5:
        return Kill(seconds=moment)
    late = 0.0 if rng.random() < 0.5 else rng.uniform(0.0, NEAR_SECONDS)
    return Kill(seconds=moment, boundary=rng.choice(failpoints.NAMES), nth=rng.randint(1, 5), late=late)


def survive(
    start: Start,
    *,
    seed: int,
    seconds: float,
    kills: int,
    log: Path,
    between: Callable[[], list[str]] = lambda: [],
) -> Story:
    """Kill a run up to ``kills`` times, then let it end. ``between`` looks at what each kill has left.

    ``start`` must exit with 0 alone; every other end, and every process that outlives its parent, is a wrong.
    """
    rng, story, begun = random.Random(seed), Story(), time.monotonic()
    tries = 0
    while True:
        tries += 1
        kill = plan(rng, seconds) if story.kills < kills and tries < 3 * kills else None
        ended = run_child(lambda: start(story.starts > 0), log=log, kill=kill)
        story.starts += 1
        if ended.left:
            story.wrong.append(f"start {story.starts}: processes {ended.left} outlived it ({kill})")
        if ended.code == -signal.SIGKILL and kill is not None:
            story.kills += 1
            if ended.stood:
                story.boundaries[kill.boundary] = story.boundaries.get(kill.boundary, 0) + 1
            story.wrong += [f"after kill {story.kills} ({kill}): {text}" for text in between()]
        elif ended.code != 0:
            story.wrong.append(f"start {story.starts} ended with {ended.code} ({kill}):\n{tail(log)}")
        if ended.code == 0 or story.wrong:
            story.seconds = time.monotonic() - begun
            return story


def run_child(start: Callable[[], None], *, log: Path, kill: Kill | None = None, hung: float = HUNG_SECONDS) -> Ended:
    """Run ``start`` in a forked child in a session of its own; its output goes to ``log``.

    A child that takes longer than ``hung`` seconds writes its stacks there and is killed.

    Raises:
        RuntimeError: this process has several threads, so that it must not fork.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a process with threads must not fork; set OMP_NUM_THREADS=1 before it imports numpy")
    begun = time.monotonic()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _child(start, log, kill, parent)
    try:
        stood = kill is not None and _kill(pid, kill)
        code = _wait(pid, hung)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    ended = time.monotonic() - begun
    return Ended(code=code, seconds=ended, left=left_behind(pid), stood=stood)


def left_behind(session: int) -> tuple[int, ...]:
    """Processes of a session that are still there after a moment; they are killed."""
    deadline = time.monotonic() + 2.0
    while (found := _members(session)) and time.monotonic() < deadline:
        time.sleep(0.01)  # a child's death signal is under way
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


def tail(log: Path, lines: int = 40) -> str:
    """The last lines of a log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


def ask(work: Callable[[], object], *, log: Path) -> object:
    """The JSON answer of ``work``, run in a child (so that no database is ever opened in the process that forks).

    Raises:
        RuntimeError: it failed; the message has its traceback.
    """
    reader, writer = os.pipe()

    def answer() -> None:
        with os.fdopen(os.dup(writer), "w", encoding="utf-8") as file:
            json.dump(work(), file)

    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(answer, log, None, os.getppid())
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        text = file.read()
    code = _wait(pid, HUNG_SECONDS)
    if code != 0:
        raise RuntimeError(f"the child ended with {code}:\n{tail(log)}")
    return json.loads(text)


def _child(start: Callable[[], None], log: Path, kill: Kill | None, parent: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(3)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout = sys.stderr = os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="replace")
        faulthandler.enable(file=fd)
        faulthandler.register(signal.SIGQUIT, file=fd)
        failpoints.arm(f"{kill.boundary}:{kill.nth}=stop" if kill is not None and kill.boundary else "")
        start()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(code)


def _kill(pid: int, kill: Kill) -> bool:
    """Kill a child when its time has come, unless it ends sooner; the answer is whether it came to the boundary."""
    stood = bool(kill.boundary) and _stopped(pid, kill.seconds)
    if stood and kill.late:
        os.kill(pid, signal.SIGCONT)
    wait = kill.late if stood else 0.0 if kill.boundary else kill.seconds
    if not _has_ended(pid, wait):
        os.kill(pid, signal.SIGKILL)
    return stood


def _stopped(pid: int, seconds: float) -> bool:
    """Wait until a child stands still; False where it has not, in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is not None:
            return found.si_code == os.CLD_STOPPED
        time.sleep(0.0005)
    return False


def _has_ended(pid: int, seconds: float) -> bool:
    """Wait for a child's end for a while; its status stays to be read."""
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def _wait(pid: int, seconds: float) -> int:
    """A child's exit status; one that takes too long says where it is, and is killed."""
    if not _has_ended(pid, seconds):
        os.kill(pid, signal.SIGQUIT)  # faulthandler writes every thread's place to the log
        time.sleep(0.5)
        os.kill(pid, signal.SIGABRT)
        if not _has_ended(pid, 5.0):
            os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _members(session: int) -> tuple[int, ...]:
    """Living processes of a session."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
        except OSError:
            continue
        state, _, _, its_session = stat[stat.rindex(b")") + 2 :].split()[:4]
        if int(its_session) == session and state not in (b"Z", b"X"):
            found.append(int(entry.name))
    return tuple(found)
