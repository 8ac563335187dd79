"""A process of this machine in; what it does, as the kernel and it itself tell, out.

The kernel tells its state. Its stacks it writes into its log when SIGUSR1 asks it (:func:`show_stacks`), whatever its
threads do; one that is stopped cannot.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "I": "idle",
}
STOPPED = ("T", "t")
ANSWER = 3.0
"""Seconds in which a process must have written its stacks."""
SETTLED = 0.1
"""Seconds without another line after which it has."""
WAITING = ("threading.py", "selectors.py", "socket.py", "wire.py", "thread.py", "base_events.py", "queue.py")
"""Files whose topmost frame says that a thread waits for work."""
COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)', re.MULTILINE)


@dataclass(slots=True, frozen=True, kw_only=True)
class Look:
    """One process at one moment.

    Example: Look(pid=123, state="S", waits_in="futex_wait_queue", stack='Thread 0x7f... File "x.py", line 3 in f')
    """

    pid: int
    state: str  # the kernel's letter; empty: it is gone, or cannot be asked
    waits_in: str = ""  # the kernel's function in which it waits
    stack: str = ""
    why: str = ""  # why there is no stack, or no state

    @property
    def told(self) -> str:
        """Its state in words."""
        return f"{self.state} {STATES.get(self.state, '')}".strip() if self.state else self.why or "gone"


def show_stacks() -> None:
    """Have this process write where each of its threads is to stderr, its log, whenever it gets SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


async def look(pid: int, log: Path) -> Look:
    """A process of this machine whose output goes to ``log``."""
    state = state_of(pid)
    waits_in = _read(f"/proc/{pid}/wchan").strip("0")
    if not state or state in "ZX":
        return Look(pid=pid, state=state, why="it is dead")
    if state in STOPPED:
        return Look(pid=pid, state=state, waits_in=waits_in, why="it is stopped and cannot say where it is")
    if not _hears(pid):
        return Look(pid=pid, state=state, waits_in=waits_in, why="it has not begun to listen for that question")
    stack = await _ask(pid, log)
    why = "" if stack else f"it did not say where it is within {ANSWER:g} s"
    return Look(pid=pid, state=state_of(pid), waits_in=waits_in, stack=stack, why=why)


def state_of(pid: int) -> str:
    """The kernel's letter; empty where there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1]


def _hears(pid: int) -> bool:
    """Whether SIGUSR1 would be answered; where it is not caught it would kill."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> (signal.SIGUSR1 - 1) & 1)


async def _ask(pid: int, log: Path) -> str:
    """The stacks that a process writes into its log; as much as is there when it has gone quiet, or the time is up."""
    try:
        begin = log.stat().st_size
        os.kill(pid, signal.SIGUSR1)
    except OSError:
        return ""
    text, end, changed = "", time.monotonic() + ANSWER, time.monotonic()
    while time.monotonic() < end and not (text and time.monotonic() - changed > SETTLED):
        await asyncio.sleep(0.01)
        with log.open("rb") as file:
            file.seek(begin)
            found = file.read().decode(errors="replace")
        if found != text:
            text, changed = found, time.monotonic()
    return text.strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def collective(stack: str) -> str:
    """The collective in which one of the threads waits; empty where none does.

    Example: "all_reduce"
    """
    for frames in threads(stack):
        for file, _, name in frames:
            if Path(file).name in COLLECTIVES and not name.startswith(("_", "wrapper")):
                return name
    return ""


def place(stack: str) -> str:
    """Where the first thread is that does not wait for work.

    Example: "busy in loop.py:12"
    """
    for frames in threads(stack):
        if frames and Path(frames[0][0]).name not in WAITING:
            file, line, name = frames[0]
            return f"{name} in {Path(file).name}:{line}"
    return ""


def threads(stack: str) -> list[list[tuple[str, str, str]]]:
    """Frames of each thread, the innermost first: file, line, function."""
    parts = re.split(r"^(?:Current thread|Thread) 0x.*$", stack, flags=re.MULTILINE)
    found = [[(m["file"], m["line"], m["name"]) for m in _FRAME.finditer(part)] for part in parts[1:]]
    return [frames for frames in found if frames]
