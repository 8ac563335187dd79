"""The driver's end of one candidate: bytes to it, bytes from it, deadlines, and how it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self

from slime_sandbox.cgroups import ControlGroup
from slime_sandbox.inside import OUT_OF_MEMORY, UNJAILED
from slime_sandbox.types import Limits, Outcome, Status
from slime_sandbox.wire import FRAME, collect, packet_pair

if TYPE_CHECKING:
    from slime_sandbox.box import Sandbox

CHUNK = 1 << 16
OVER_MEMORY = "exceeded its memory limit"
START_SECONDS = 60.0
"""How long a jail may take to be ready, on a busy machine."""
GRACE_SECONDS = 5.0
"""How long a jail may take to be gone after it was told to, before it is killed itself."""


class CandidateEnded(Exception):
    """The candidate sends nothing any more; ``outcome`` says why."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason or outcome.status)
        self.outcome = outcome


class CandidateProcess:
    """One candidate, made by `Sandbox.spawn`; a context manager that leaves nothing behind, whatever happens in it.

    Example:
        async with box.spawn("my_plugin.runner:main", limits=Limits(wall_seconds=5)) as child:
            await child.send(source)
            answer = await child.receive(deadline=2.0)  # seconds from now; raises Ended
            outcome = await child.finish()
    """

    def __init__(
        self,
        box: Sandbox,
        request: dict[str, Any],
        limits: Limits,
        files: Mapping[str, bytes],
        level: str,
        layers: tuple[str, ...],
    ) -> None:
        self._box, self._request, self._limits, self._files = box, request, limits, files
        self._level, self._layers = level, layers
        self._loop = asyncio.get_running_loop()
        self._output = bytearray()
        self._facts: dict[str, Any] = {}
        self._cut: tuple[Status, str] | None = None  # why this side ended it
        self._exit = self._loop.create_future()
        self._data: socket.socket | None = None  # stays open until the end: what an ended candidate sent can be read
        self._ends: list[Any] = []
        self._open: set[str] = set()  # what the end of this candidate still waits for
        self._began = time.monotonic()
        self._seconds = 0.0
        self._outcome: Outcome | None = None
        self._jail = -1  # pidfd of the warden
        self._group: ControlGroup | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
            for content in self._files.values():
                await self.send(content)
        except OSError as error:  # this side has no descriptors, processes or groups left
            self._facts["infra"] = f"no candidate could be started: {error}"
            self._close()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            if self._open:
                self._end("died", "was not waited for")
                await self._finished()
            elif self._outcome is None:
                self._close()
        finally:
            if self._data is not None:
                self._data.close()

    async def _begin(self) -> None:
        with ExitStack() as theirs_open:
            self._data, data = socket.socketpair()
            theirs_open.enter_context(data)
            self._report, report = packet_pair()
            self._ends.append(self._report)
            theirs_open.enter_context(report)
            reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._pipe, output = os.fdopen(reading, "rb", 0), theirs_open.enter_context(os.fdopen(writing, "wb", 0))
            self._ends.append(self._pipe)
            os.set_blocking(writing, True)
            self._data.setblocking(False)
            self._report.setblocking(False)
            child_ends = [report.fileno(), data.fileno(), output.fileno()]
            if self._box.groups is not None and self._request["gpu"]:
                self._group = self._box.groups.take(self._limits.memory_bytes)
                child_ends.append(self._group.procs)
            await self._box.submit(self._request, child_ends)
        self._began = time.monotonic()
        self._open |= {"output", "report"}
        self._loop.add_reader(self._pipe, self._read_output)
        self._loop.add_reader(self._report, self._read_report)
        self._timer = self._loop.call_later(START_SECONDS, self._never)

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """One message to the entry. What an ended candidate does not hear is lost: `receive` and `finish` say why."""
        if self._data is not None:
            with suppress(OSError):
                await self._loop.sock_sendall(self._data, FRAME.pack(len(data)))
                await self._loop.sock_sendall(self._data, data)

    async def receive(self, deadline: float | None = None) -> bytes:
        """The entry's next message, within ``deadline`` seconds from now; raises `CandidateEnded` where none comes."""
        try:
            return await asyncio.wait_for(self._receive(), deadline)
        except TimeoutError:
            self._end("timeout", f"did not answer in {deadline:g} s")
        except (OSError, EOFError):
            pass
        raise CandidateEnded(await self._finished())

    async def finish(self) -> Outcome:
        """How it ended. It is told that no message follows, and has until ``wall_seconds`` to end by itself."""
        if self._data is not None:
            with suppress(OSError):
                self._data.shutdown(socket.SHUT_WR)
        return await self._finished()

    async def _receive(self) -> bytes:
        (length,) = FRAME.unpack(await self._read(FRAME.size))
        if length > self._limits.result_bytes:
            self._end("too_much_output", f"answered {length} bytes, the limit is {self._limits.result_bytes}")
            raise EOFError
        return await self._read(length)

    async def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = await self._loop.sock_recv(self._data, min(length - len(data), 1 << 20)) if self._data else b""
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _read_output(self) -> None:
        try:
            part = os.read(self._pipe.fileno(), CHUNK)
        except BlockingIOError:
            return
        room = self._limits.output_bytes - len(self._output)
        self._output += part[:room]
        if len(part) > room:
            self._end("too_much_output", f"printed more than {self._limits.output_bytes} bytes")
        if not part:
            self._shut("output", self._pipe)

    def _read_report(self) -> None:
        try:
            message, descriptors = collect(self._report)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = None, []
        if message is None:
            self._shut("report", self._report)
            return
        self._facts |= message
        for number in descriptors:
            self._jail = number
            self._open.add("jail")
            self._loop.add_reader(number, self._shut, "jail", number)
        if "jailed" in message and self._cut is None and "exit" not in self._facts:
            self._began = time.monotonic()  # its own time, not that of who made its jail
            self._timer.cancel()
            self._timer = self._loop.call_later(self._limits.wall_seconds, self._late)
        if "exit" in message or "infra" in message:
            self._seconds = time.monotonic() - self._began
            self._leave()

    def _shut(self, name: str, reader: Any) -> None:
        self._loop.remove_reader(reader)
        self._open.discard(name)
        if name == "report" and "output" in self._open:  # nobody lives who could write: what there is, is there
            self._read_rest()
        if not self._open and self._outcome is None:
            self._timer.cancel()
            self._close()

    def _read_rest(self) -> None:
        with suppress(OSError):
            while part := os.read(self._pipe.fileno(), CHUNK):
                self._output += part[: self._limits.output_bytes - len(self._output)]
        self._shut("output", self._pipe)

    def _never(self) -> None:
        self._end("infra", f"did not start in {START_SECONDS:g} s")

    def _late(self) -> None:
        self._end("timeout", f"did not end in {self._limits.wall_seconds:g} s")

    def _end(self, status: Status, reason: str) -> None:
        """Kill it, because of ``reason``; only the first counts."""
        if self._cut is None and "exit" not in self._facts and "infra" not in self._facts:
            self._cut = (status, reason)
        self._leave()

    def _leave(self) -> None:
        """Have the jail taken down: it is when nobody listens to it."""
        with suppress(OSError):
            self._report.shutdown(socket.SHUT_WR)
        self._timer.cancel()
        self._timer = self._loop.call_later(GRACE_SECONDS, self._kill)

    def _kill(self) -> None:
        if self._jail >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._jail, signal.SIGKILL)

    async def _finished(self) -> Outcome:
        await asyncio.shield(self._exit)
        assert self._outcome is not None
        return self._outcome

    def _close(self) -> None:
        """All processes are gone: give everything back, once."""
        if self._outcome is not None:
            return
        self._outcome = self._build_outcome()
        if self._group is not None and self._box.groups is not None:
            self._box.groups.give(self._group)
        self._open.clear()
        for end in self._ends:
            self._loop.remove_reader(end)
            end.close()
        if self._jail >= 0:
            self._loop.remove_reader(self._jail)
            os.close(self._jail)
        self._exit.set_result(None)

    def _build_outcome(self) -> Outcome:
        facts, code = self._facts, self._facts.get("exit")
        status, reason = self._cut or _judge(facts)
        if self._group and status in ("died", "infra") and self._group.ran_out():
            status, reason = "memory", OVER_MEMORY
        return Outcome(
            status=status,
            reason=reason,
            stdout=self._output.decode(errors="replace"),
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else 0,
            seconds=self._seconds or time.monotonic() - self._began,
            violations=facts.get("violations", {}),
            level=self._level,
            layers=self._layers,
        )


def _judge(facts: Mapping[str, Any]) -> tuple[Status, str]:
    """What the jail and the fork server said about a candidate, as a status and in words."""
    code = facts.get("exit")
    if "infra" in facts or (code == UNJAILED and "jailed" not in facts):
        return "infra", facts.get("infra", "a layer of the jail could not be set up")
    if "over" in facts:
        return (
            ("memory", OVER_MEMORY) if facts["over"] == "memory" else ("died", "wrote more than its folder may hold")
        )
    if code is None:
        return "infra", "the jail ended without giving a reason"
    if code == OUT_OF_MEMORY:
        return "memory", OVER_MEMORY
    if code < 0:
        name = _signal_name(-code)
        return ("timeout", "used up its processor time") if name == "SIGXCPU" else ("died", f"was killed by {name}")
    return ("died", f"ended with exit code {code}") if code else ("ok", "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
