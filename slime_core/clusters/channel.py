"""A child process of a run, and the frames between it and the driver, wherever it runs.

RankTrainer, EngineProcess --> Channel --+-- ProcessChannel: a socket pair to a child on this machine
                                         `-- clusters.ray.channel: a host on another, which has such a socket
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slime_core.clusters.looking import Look, look
from slime_core.clusters.wire import Frame, decode, receive_frame, send_frame

SILENT = "it wrote nothing into its log"  # why, in the error of a process that ended so
LOG_TAIL = 4000  # bytes of a dead process's log in an error


@dataclass(slots=True, frozen=True, kw_only=True)
class Child:
    """What to start: ``python -m MODULE FD PARENT``, its output appended to ``log``.

    Example: Child(module="slime_core.clusters.rank", log=run_dir / "log" / "rank-0.log")
    """

    module: str
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)  # beside the environment of who starts it
    folder: str = ""  # working directory; empty: that of who starts it


class Channel(Protocol):
    """One child. What is written arrives in order; a child that is gone is a ConnectionError on either side."""

    pid: int
    log: str  # where its output goes, as a person finds it
    node: str  # the machine it is on

    async def write(self, frame: Frame) -> None:
        """Send a frame; it may be written to several channels.

        Raises:
            ConnectionError: the child is gone.
        """
        ...

    async def read(self) -> Any:
        """The value of the child's next frame.

        Raises:
            ConnectionError: the child is gone.
        """
        ...

    async def ended(self, seconds: float) -> str:
        """How it ended, as the end of a sentence; empty where it runs on after ``seconds``."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...

    async def tail(self) -> str:
        """The end of its log."""
        ...

    async def note(self, text: str) -> None:
        """Append to its log."""
        ...

    async def look(self) -> Look:
        """What it does: its state, and where its threads are."""
        ...

    async def close(self) -> None:
        """Hang up: a child that waits for calls ends by itself."""
        ...


Start = Callable[[int, Child], Awaitable[Channel]]
"""Starts the child of a number (a rank, an engine) in the place that it is meant for."""


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    """Its answer; None where it fails or takes longer, as anything may whose machine does not answer."""
    with suppress(Exception):
        return await asyncio.wait_for(asyncio.ensure_future(work), seconds)
    return None


async def end(channel: Channel, farewell: Frame, grace: float) -> str:
    """Tell a child to end and see that it does; how it ended, empty where it had to be killed."""
    await within(grace, channel.write(farewell))
    await within(grace, channel.close())
    how: str = await within(2 * grace, channel.ended(grace)) or ""
    if not how:
        await within(grace, channel.kill())
    return how


class ProcessChannel:
    """A child on this machine; it dies with the process that started it.

    Example:
        channel = await ProcessChannel.start(child)
        await channel.write(encode({"rank": 0}))
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.pid, self.log, self.node = process.pid, str(log), socket.gethostname()
        self._process, self._path = process, log
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, child: Child, *fds: int) -> ProcessChannel:
        """Start it; ``fds`` are further descriptors that it inherits, named on its command line after the first.

        Raises:
            OSError: it cannot be started, or its log not be written.
        """
        child.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, child.log.open("ab") as out:
            passed = [theirs.fileno(), *fds]
            process = subprocess.Popen(
                [sys.executable, "-m", child.module, *map(str, passed), str(os.getpid())],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **child.env},
                cwd=child.folder or None,
                process_group=0,  # a terminal's Ctrl-C is for the driver
            )
        made = cls(process, child.log)
        made._reader, made._writer = await asyncio.open_unix_connection(sock=ours)
        return made

    async def write(self, frame: Frame) -> None:
        """See `Channel`."""
        await send_frame(self._writer, frame)

    async def read(self) -> Any:
        """See `Channel`."""
        return decode(await self.read_frame())

    async def read_frame(self) -> Frame:
        """The child's next frame as it came.

        Raises:
            ConnectionError: the child is gone.
        """
        try:
            return await receive_frame(self._reader)
        except asyncio.IncompleteReadError as cut:
            raise ConnectionResetError("the process closed its socket") from cut

    async def ended(self, seconds: float) -> str:
        """See `Channel`."""
        with suppress(subprocess.TimeoutExpired):
            return end_of(await asyncio.to_thread(self._process.wait, seconds))
        return ""

    async def kill(self) -> None:
        """See `Channel`."""
        self._process.kill()
        await asyncio.to_thread(self._process.wait)

    async def tail(self) -> str:
        """See `Channel`."""
        return self._path.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()

    async def note(self, text: str) -> None:
        """See `Channel`."""
        with self._path.open("a") as log:
            log.write(text)

    async def look(self) -> Look:
        """See `Channel`."""
        return await look(self.pid, self._path)

    async def close(self) -> None:
        """See `Channel`."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def start_here(_: int, child: Child) -> Channel:
    """A :data:`Start` of children on this machine."""
    return await ProcessChannel.start(child)


PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the process ``parent``, which started it, is gone; at once if it is.

    Signals that a terminal or a scheduler sends to all processes of a run are left to the parent: it ends its children
    when it has written what it needs. The kernel counts the thread that started the child as the parent, so a child is
    started from a thread that lives as long as the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with(parent)


def end_with(parent: int) -> None:
    """The same for a process that hears signals itself."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(1)


def end_of(code: int) -> str:
    """A process's exit code as the end of a sentence.

    Example: end_of(-9) == "was killed by SIGKILL"
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
