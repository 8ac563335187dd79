"""Detection of hangs: one page and the end of the run, when a part of it makes no progress any more.

    trainer calls, engines with requests, phases of the driver -> older than hang_timeout?
        -> look at every process -> log/hang-N.txt, the terminal -> Hung, with the first cause

A deadline is of progress: an answer of any request of an engine, each call of the trainer, each phase of a step. It
does not run while this process itself stood still (SIGSTOP, a suspended machine).

The kernel tells the state of a process. Its stacks it writes into its log when SIGUSR1 asks it (:func:`show_stacks`),
whatever its threads do; one that is stopped cannot.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.errors import Hung

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Ledger, ServerProcess
    from slime_core.report import Report

OFTEN = 5.0  # seconds between two looks, at most
ASKED = 12.0  # seconds in which a process, or its host, must say where it is
KILLED = 5.0  # seconds in which it must be gone
PHASES = frozenset({"score", "verify", "train", "sync"})
"""Phases of the driver with a deadline; rollouts and evaluations have those of their hooks."""
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


class ProcessProbe(Protocol):
    """What the watch asks of a process, wherever that is; `channel.Channel` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def node(self) -> str:
        """The machine it is on."""
        ...

    async def look(self) -> Look:
        """What it does."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of the run; ``doing`` is empty where nobody waits for it."""

    name: str
    channel: ProcessProbe
    doing: str = ""
    since: float = 0.0  # monotonic seconds of the last sign of progress while it does that
    patience: float = 0.0  # seconds that it has at least


class Watched(Protocol):
    """A part of the run that knows its processes and what they are asked."""

    def members(self) -> Sequence[Member]:
        """All of them, now."""
        ...


class Servers:
    """Servers of ours as lines of the page: their own watch judges them, nobody waits for them here."""

    def __init__(self, servers: Sequence[ServerProcess]) -> None:
        self._servers = [server for server in servers if server.owned]

    def members(self) -> list[Member]:
        """See `Watched`."""
        return [Member(name=server.title, channel=ServerLook(server.host)) for server in self._servers]


@dataclass(slots=True, frozen=True)
class ServerLook:
    """Implements `ProcessProbe` over the `host.ProcessHost` of a server."""

    host: Any

    @property
    def pid(self) -> int:
        """See `ProcessProbe`; it changes when the server is restarted."""
        return int(self.host.pid)

    @property
    def node(self) -> str:
        """See `ProcessProbe`."""
        return self.host.place or socket.gethostname()

    async def look(self) -> Look:
        """See `ProcessProbe`; what SIGUSR1 does there is the server's own affair."""
        state: str = await self.host.state()
        reason = "its watch judges it by its tokens" if state else "it is not running"
        return Look(pid=self.pid, state=state, note=reason)

    async def kill(self) -> None:
        """The cluster's end does that in order."""


class HangWatch:
    """See the module.

    Example:
        async with watching(config, report) as watch:
            watch.add(ranks)
    """

    def __init__(self, config: Config, report: Report) -> None:
        self.timeout = config.cluster.hang_timeout
        self.hung: Hung | None = None
        self.ledger: Ledger | None = None
        self._report, self._parts = report, list[Watched]()
        self._awake = time.monotonic()  # deadlines count from here, where they began earlier

    def add(self, part: Watched) -> None:
        """Watch a part, from before it starts."""
        self._parts.append(part)

    def late(self) -> str:
        """Who has made no progress for too long; empty where nobody."""
        now = time.monotonic()
        for member in self._members():
            if member.doing and self._age(member.since, now) > max(self.timeout, member.patience):
                return member.name
        phase, since = self._report.doing
        return "driver" if phase in PHASES and self._age(since, now) > self.timeout else ""

    def _age(self, since: float, now: float) -> float:
        return now - max(since, self._awake)

    def _members(self) -> list[Member]:
        return [member for part in self._parts for member in part.members()]

    async def run(self, task: asyncio.Task[Any]) -> None:
        """Look until somebody is late; then write the page, end what hangs and ``task``."""
        period = min(OFTEN, self.timeout / 10)
        while not (name := self.late()):
            before = time.monotonic()
            await asyncio.sleep(period)
            if time.monotonic() - before > 2 * period + 1:
                self._awake = time.monotonic()
        processes = await self._look()
        path, first = self._page(processes, name, await self._queues())
        self.hung = Hung(
            first,
            where=str(path),
            why=f"no progress for {self.timeout:g} s (cluster.hang_timeout)",
            fix="read the page; what was finished is in the ledger: slime run --resume RUN_DIR\n"
            "work that takes longer than that: --hang-timeout SECONDS",
        )
        self._report.hung(self.hung)
        task.cancel("hung")
        await asyncio.gather(*(within(KILLED, member.channel.kill()) for member in self._members()))

    async def _look(self) -> list[ProcessReport]:
        members = self._members()
        looks = await asyncio.gather(*(within(ASKED, member.channel.look()) for member in members))
        phase, since = self._report.doing
        now, processes = time.monotonic(), [ProcessReport.driver(phase, since)]
        for member, reply in zip(members, looks, strict=True):
            missing = f"no answer from {member.channel.node} in {ASKED:g} s"
            state = reply or Look(pid=member.channel.pid, state="", note=missing)
            node, age = member.channel.node, now - member.since if member.doing else None
            processes.append(ProcessReport(name=member.name, node=node, doing=member.doing, seconds=age, look=state))
        return processes

    async def _queues(self) -> str:
        """What waits: requests at engines, samples in the ledger."""
        flying = [f"{m.name} {m.doing}" for m in self._members() if m.name.startswith("engine") and m.doing]
        counts = await within(ASKED, self.ledger.counts()) if self.ledger is not None else None
        texts = [f"{counts[name]} {name}" for name in ("issued", "pending", "trained")] if counts else ["unknown"]
        return f"in flight: {', '.join(flying) or 'no request'}; samples: {', '.join(texts)}"

    def _page(self, processes: Sequence[ProcessReport], late: str, queues: str) -> tuple[Path, str]:
        """Write it; its path and first line."""
        first = cause(processes, late)
        phase, since = self._report.doing
        facts = {
            "run": str(self._report.run_dir.path),
            "phase": f"{phase or 'between two phases'} for {time.monotonic() - since:.0f} s, "
            f"version {self._report.version}",
            "queues": queues,
        }
        text = render(first, facts, processes, own_stack())
        path = self._report.run_dir.save_hang(text)
        for line in text.splitlines():
            self._report.note(line)
        return path, first


@asynccontextmanager
async def watching(config: Config, report: Report) -> AsyncIterator[HangWatch]:
    """A watch over the block's parts.

    Raises:
        Hung: HNG125, one of them hung; it replaces whatever the block ended with then.
    """
    watch, task = HangWatch(config, report), asyncio.current_task()
    assert task is not None
    looking = asyncio.create_task(watch.run(task), name="slime-hangs") if watch.timeout else None
    try:
        yield watch
    except BaseException as error:
        if watch.hung is None:
            raise
        if isinstance(error, asyncio.CancelledError):
            task.uncancel()
        raise watch.hung from error
    finally:
        if looking is not None:
            if watch.hung is None:  # else it ends what hangs
                looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


HEADS = ("process", "pid", "node", "state", "call", "since", "is in")


@dataclass(slots=True, frozen=True, kw_only=True)
class ProcessReport:
    """One process, and what others wait for it to do.

    Example: ProcessReport(name="rank 1", node="node-3", doing="step", seconds=35.0, look=look)
    """

    name: str
    node: str
    doing: str  # empty: nobody waits for it
    seconds: float | None
    look: Look

    @classmethod
    def driver(cls, phase: str, since: float) -> ProcessReport:
        """This process, in a phase of the loop."""
        node, seconds = socket.gethostname(), time.monotonic() - since if phase else None
        return cls(
            name="driver",
            node=node,
            doing=phase,
            seconds=seconds,
            look=Look(pid=os.getpid(), state=state_of(os.getpid())),
        )

    @property
    def within(self) -> str:
        """The collective that it waits in, else the function that it runs, else the kernel's."""
        return collective(self.look.stack) or place(self.look.stack) or self.look.waits_in

    @property
    def label(self) -> str:
        """`rank 1 (pid 123 on node-3)`; the node only where it is another one."""
        elsewhere = "" if self.node == socket.gethostname() else f" on {self.node}"
        return f"{self.name} (pid {self.look.pid}{elsewhere})"

    @property
    def duration(self) -> str:
        """`for 35 s in step`."""
        return f"for {self.seconds:.0f} s in {self.doing}" if self.seconds is not None else "now"


def cause(processes: Sequence[ProcessReport], late: str) -> str:
    """The first line: who keeps the others waiting.

    A process that is stopped, dead or not to be reached comes first; then one that is busy elsewhere while others wait
    in a collective; then ``late``, who was noticed.

    Example: "rank 1 (pid 123) is stopped (state T), for 35 s in step; rank 0 waits for it in all_reduce"
    """
    busy = [one for one in processes if one.doing and one.name != "driver"]
    stuck = next((one for one in processes if one.look.state in STOPPED), None)
    if stuck is not None:
        return f"{stuck.label} is stopped (state {stuck.look.state}), {stuck.duration}{_waiting(busy, stuck)}"
    ended = next(
        (one for one in processes if one.look.state in ("", "Z", "X") and not one.name.startswith("SGLang")), None
    )
    if ended is not None:
        return f"{ended.label} cannot be asked: {ended.look.description}, {ended.duration}{_waiting(busy, ended)}"
    together = [one for one in busy if collective(one.look.stack)]
    apart = [one for one in busy if not collective(one.look.stack)]
    if together and apart:
        return f"{apart[0].label} is in {apart[0].within}, {apart[0].duration}{_waiting(busy, apart[0])}"
    kinds = {collective(one.look.stack) for one in together}
    if len(kinds) > 1:
        where = ", ".join(f"{one.name} in {one.within}" for one in together)
        return f"trainer ranks wait in different collectives, {together[0].duration}: {where}"
    waiting = next((one for one in processes if one.name == late), processes[0])
    return f"{waiting.label} makes no progress, {waiting.duration}" + (
        f": it is in {waiting.within}" if waiting.within else ""
    )


def _waiting(busy: Sequence[ProcessReport], cause: ProcessReport) -> str:
    """`; rank 0 waits for it in all_reduce`."""
    others = [one for one in busy if one is not cause and collective(one.look.stack)]
    if not others or not cause.name.startswith(("rank", "host")):
        return ""
    names = f"{', '.join(one.name for one in others)} {'waits' if len(others) == 1 else 'wait'}"
    return f"; {names} for it in {collective(others[0].look.stack)}"


def render(first: str, facts: Mapping[str, str], processes: Sequence[ProcessReport], driver: str) -> str:
    """The page."""
    rows = [HEADS, *(_row(one) for one in processes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [f"HANG  {first}", *(f"{name:8}{text}" for name, text in facts.items()), "", *table]
    for one in processes:
        stack = driver if one.name == "driver" else one.look.stack or one.look.note
        lines += ["", f"-- {one.label}", stack]
    return "\n".join(lines) + "\n"


def _row(one: ProcessReport) -> tuple[str, ...]:
    seconds = f"{one.seconds:.0f} s" if one.seconds is not None else ""
    state = one.look.description if one.look.state else "?"
    return (one.name, str(one.look.pid), one.node, state, one.doing or "nothing", seconds, one.within or one.look.note)


def own_stack() -> str:
    """Where the threads of this process are."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace").strip()


@dataclass(slots=True, frozen=True, kw_only=True)
class Look:
    """One process at one moment.

    Example: Look(pid=123, state="S", waits_in="futex_wait_queue", stack='Thread 0x7f... File "x.py", line 3 in f')
    """

    pid: int
    state: str  # the kernel's letter; empty: it is gone, or cannot be asked
    waits_in: str = ""  # the kernel's function in which it waits
    stack: str = ""
    note: str = ""  # why there is no stack, or no state

    @property
    def description(self) -> str:
        """Its state in words."""
        return f"{self.state} {STATES.get(self.state, '')}".strip() if self.state else self.note or "gone"


def show_stacks() -> None:
    """Have this process write where each of its threads is to stderr, its log, whenever it gets SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


async def look(pid: int, log: Path) -> Look:
    """A process of this machine whose output goes to ``log``."""
    state = state_of(pid)
    waits_in = _read(f"/proc/{pid}/wchan").strip("0")
    if not state or state in "ZX":
        return Look(pid=pid, state=state, note="it is dead")
    if state in STOPPED:
        return Look(pid=pid, state=state, waits_in=waits_in, note="it is stopped and cannot print its stack")
    if not _hears(pid):
        return Look(pid=pid, state=state, waits_in=waits_in, note="it does not handle SIGUSR1 yet")
    stack = await _ask(pid, log)
    reason = "" if stack else f"it did not print its stack within {ANSWER:g} s"
    return Look(pid=pid, state=state_of(pid), waits_in=waits_in, stack=stack, note=reason)


def state_of(pid: int) -> str:
    """The kernel's letter; empty where there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].strip()[:1]


def _hears(pid: int) -> bool:
    """Whether SIGUSR1 would be answered; where it is not caught it would kill."""
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", _read(f"/proc/{pid}/status"), re.MULTILINE)
    return bool(match and int(match[1], 16) >> (signal.SIGUSR1 - 1) & 1)


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
            text_now = file.read().decode(errors="replace")
        if text_now != text:
            text, changed = text_now, time.monotonic()
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
    stacks = [[(m["file"], m["line"], m["name"]) for m in _FRAME.finditer(part)] for part in parts[1:]]
    return [frames for frames in stacks if frames]


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    """Its answer; None where it fails or takes longer, as anything may whose machine does not answer."""
    with suppress(Exception):
        return await asyncio.wait_for(asyncio.ensure_future(work), seconds)
    return None
