"""Where a server's process lives: what `server.Server` asks of a place, and this machine as one.

    Launch, token --start--> held ports, launcher.py (own session, log, temporary folder) --> Begun
                                     `-- its end, or stop --> its session killed, ports and folder given back

A home has one process at a time, of one server or of SGLang's router. Its log lies where the driver sees it too, so
nobody has to be asked for its end. ``clusters.ray.servers`` has the home on another machine, whose work is done there
by `Here`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from slime_core.engines.sglang import leftovers, ports

LAUNCHER = Path(__file__).with_name("launcher.py")

CLEANING = 10.0
"""Seconds in which the launcher must have killed and removed what there is, before it is killed itself."""
UNDYING = 60.0
"""Seconds after SIGKILL in which a process must be gone; one that waits for a broken device may never be."""

TAIL_BYTES = 64 << 10  # of a log that are read
HIGHEST = 55_535
"""Of a server's port: SGLang 0.5.12 makes its gRPC port of it, 10,000 above, and refuses one that is none."""

CHILD = re.compile(r"Subprocess (\S+) \(pid=(\d+)\) crashed with exit code (-?\d+)")

Listener = Literal["ours", "other", "nobody"]
"""Who listens on a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a process is started; host, port, further ports and the token are added where it lives.

    Example: Launch(python=installation.python, arguments=("--model-path", path), env={}, log=run / "log/engine-0.log")
    """

    python: str  # of SGLang's environment
    arguments: tuple[str, ...]  # of SGLang's command line
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)  # added to that of who starts it
    host: str = "127.0.0.1"  # address that it listens on
    threads: int = 1  # OMP_NUM_THREADS where ``env`` has none
    launcher: Path | None = None  # None: ours, wherever slime is installed there
    program: str = "server"  # or router: see the launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A process that was started.

    Example: Begun(pid=4711, port=30000, log_begin=0)
    """

    pid: int  # of the launcher, which leads the session of all its processes
    port: int  # of HTTP
    log_begin: int  # bytes that the log had before


class Home(Protocol):
    """A place for one process at a time."""

    place: str
    """The machine, for messages; empty for this one."""

    @property
    def pid(self) -> int:
        """Of the launcher; 0 where none runs."""
        ...

    @property
    def lost(self) -> str:
        """Why nothing can be started there any more, as the end of a sentence; empty while it can."""
        ...

    async def start(self, launch: Launch, token: str) -> Begun:
        """Start a process; none may run.

        Raises:
            OSError: it cannot be started.
        """
        ...

    async def ended(self) -> str:
        """Wait until the process that was started last has ended, and say how, as the end of a sentence."""
        ...

    async def stop(self, grace: float) -> None:
        """End all its processes, and wait until none is left; without ``grace`` they are killed."""
        ...

    async def listener(self, port: int) -> Listener:
        """Who listens on ``port`` there."""
        ...


class Here:
    """This machine.

    Example:
        home = Here()
        begun = await home.start(launch, token)
        ...
        await home.stop(15.0)
    """

    place = lost = ""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: asyncio.Task[str] | None = None
        self._holds: list[ports.Hold] = []
        self._folder = Path()  # for temporary files of the present process

    @property
    def pid(self) -> int:
        """See `Home`."""
        return self._process.pid if self._process is not None else 0

    async def start(self, launch: Launch, token: str) -> Begun:
        """See `Home`."""
        try:
            self._holds, further = _held(launch)
            self._folder = Path(tempfile.mkdtemp(prefix="slime-sglang-"))
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            with launch.log.open("ab") as out:
                begin = out.tell()
                process = subprocess.Popen(
                    [launch.python, str(launch.launcher or LAUNCHER)],
                    stdin=subprocess.PIPE,  # open as long as we live: the launcher ends with us
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=_environment(launch),
                    start_new_session=True,
                )
        except OSError:
            self._let_go()
            leftovers.remove(self._folder)
            raise
        self._process = process
        self._end = asyncio.create_task(self._bury(process, launch.log, begin), name=f"slime-sglang-{process.pid}")
        port = self._holds[0].port
        arguments = [*launch.arguments, "--host", launch.host, "--port", str(port), *further]
        asked = {
            "program": launch.program,
            "arguments": arguments,
            "token": token,
            "folder": str(self._folder),
        }
        assert process.stdin is not None
        with suppress(OSError):  # where it is gone, `ended` says so
            process.stdin.write(f"{json.dumps(asked)}\n".encode())
            process.stdin.flush()
        return Begun(pid=process.pid, port=port, log_begin=begin)

    def _let_go(self) -> None:
        for held in self._holds:
            held.close()
        self._holds = []

    async def _bury(self, process: subprocess.Popen[bytes], log: Path, begin: int) -> str:
        """Wait for the launcher's end, kill what is left of its session, and say how it ended."""
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        watched = os.pidfd_open(process.pid)
        loop.add_reader(watched, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)
        left = await _kill_session(process.pid)  # before it is reaped: its number is nobody else's yet
        code = process.wait()
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        self._let_go()
        await asyncio.to_thread(leftovers.remove, self._folder)
        return _how(code, log_since(log, begin)) + (f"; these processes do not die: {left}" if left else "")

    async def ended(self) -> str:
        """See `Home`."""
        if self._end is None:
            return "was never started"
        return await asyncio.shield(self._end)

    async def stop(self, grace: float) -> None:
        """See `Home`. What a killed process had in shared memory and temporary files is removed all the same.

        The launcher does that when its lifeline is cut.
        """
        process, end = self._process, self._end
        if process is None or end is None:
            return
        try:
            if grace > 0 and not end.done():
                process.terminate()
                await asyncio.wait({end}, timeout=grace)
        finally:  # also where the caller is cancelled while it waits
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        await asyncio.wait({end}, timeout=CLEANING)
        if not end.done():
            _kill(process.pid)
            await asyncio.wait({end}, timeout=2 * UNDYING)
        self._process = None

    async def listener(self, port: int) -> Listener:
        """See `Home`."""
        found = ports.listeners(port)
        if not found:
            return "nobody"
        return "ours" if ports.holds(ports.members(self.pid), found) else "other"


def log_since(log: Path, begin: int) -> str:
    """The end of what was written into a log from byte ``begin`` on; empty where it cannot be read."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begin, end - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _held(launch: Launch) -> tuple[list[ports.Hold], list[str]]:
    """Ports: that of HTTP, and further ones that the program would only guess, with the words that name those."""
    if launch.program == "router":
        return ports.of_router(launch.arguments, launch.host)
    first = ports.hold(launch.host, highest=HIGHEST)
    further = ports.further(launch.arguments, launch.host)
    return [first, *(held for held, _ in further)], [word for _, words in further for word in words]


def _environment(launch: Launch) -> dict[str, str]:
    env = {**os.environ, **launch.env}
    if "OMP_NUM_THREADS" not in launch.env:
        env["OMP_NUM_THREADS"] = str(launch.threads)
    return env


def _how(code: int, written: str) -> str:
    said = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
    if child := CHILD.search(written):
        name, pid, ended = child.groups()
        why = f"was killed by {_signal(-int(ended))}" if int(ended) < 0 else f"ended with exit code {ended}"
        said += f" after its process {name} ({pid}) {why}"
    return said


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill(session: int) -> list[int]:
    """Kill what is alive of a session; those that were."""
    alive = ports.members(session)
    for pid in alive:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return alive


async def _kill_session(session: int) -> list[int]:
    """Kill a session until nothing of it lives; what does all the same after a while."""
    deadline = time.monotonic() + UNDYING
    while alive := _kill(session):
        if time.monotonic() > deadline:
            return alive
        await asyncio.sleep(0.01)
    return []
