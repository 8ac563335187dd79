"""One SGLang server: started and stopped by us, or another's that runs already.

    Launch --start--> launcher.py (own session, log, held ports) --ready--> Address --stop or death--> nothing left

Every start is a new generation with ports of its own, so an answer of an old one can be told by its address. The token
goes to nobody but a process of ours: before it is sent, the listener on the port is looked up.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from slime_core.engines.sglang import leftovers, ports
from slime_core.engines.sglang.address import Address
from slime_core.engines.sglang.handshake import handshake
from slime_core.errors import EngineError

EXTERNAL = "rollout.rollout_external_engine_addrs"
LAUNCHER = Path(__file__).with_name("launcher.py")

GRACE = 15.0
"""Seconds from SIGTERM to SIGKILL; the launcher, which is told first, gives the server 10 of them."""

CLEANING = 10.0
"""Seconds in which the launcher must have killed and removed what there is, before it is killed itself."""
UNDYING = 60.0
"""Seconds after SIGKILL in which a process must be gone; one that waits for a broken device may never be."""

POLL = 0.2  # seconds between looks while a server starts
ASK = 30.0  # seconds for one answer while it starts: SGLang's /health makes a token when it is idle
PORT_TRIES = 4  # starts on other ports where somebody took the one that was held
TAIL_BYTES, TAIL_LINES, TAIL_WIDTH = 64 << 10, 30, 300
HIGHEST = 55_535
"""Of a server's port: SGLang 0.5.12 makes its gRPC port of it, 10,000 above, and refuses one that is none."""

ACCESS = re.compile(r'"(GET|POST) \S+ HTTP/[0-9.]+" 200')  # requests that were served say nothing of an end
CHILD = re.compile(r"Subprocess (\S+) \(pid=(\d+)\) crashed with exit code (-?\d+)")
IN_USE = re.compile(r"address already in use", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server of ours is started; host, port, further ports and the token are added by `Server`.

    Example: Launch(python=installation.python, arguments=("--model-path", path), env={}, log=run / "log/engine-0.log")
    """

    python: str  # of SGLang's environment
    arguments: tuple[str, ...]  # of SGLang's command line
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)  # added to ours
    host: str = "127.0.0.1"
    threads: int = 1  # OMP_NUM_THREADS where ``env`` has none
    launcher: Path = LAUNCHER
    program: str = "server"  # or router: see the launcher


class Server:
    """A server of ours (``launch``) or another's (``attach``).

    Example:
        server = Server.launch(Launch(...), number=0)
        await server.start()
        await server.ready(900.0)
        ...
        await server.stop()
    """

    def __init__(self, address: Address, launch: Launch | None) -> None:
        self.address = address  # of its present generation
        self.facts: Mapping[str, Any] = {}  # what it said of itself when it was last ready
        self.log = launch.log if launch is not None else None
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._end: asyncio.Task[str] | None = None
        self._holds: list[ports.Hold] = []
        self._folder = Path()  # for temporary files of the present generation
        self._served = False  # it was ready once
        self._last = ""  # why it was not ready at the last look
        self._from = 0  # where the present generation's part of the log begins

    @classmethod
    def launch(cls, launch: Launch, *, number: int = 0, group: str = "rollout", token: str = "") -> Self:
        """A server of ours, not started; its token is drawn here, unless it shares one."""
        token = token or secrets.token_urlsafe(32)
        return cls(Address(url="", token=token, number=number, group=group, generation=0), launch)

    @classmethod
    def attach(cls, url: str, *, token: str = "", ca: str = "", number: int = 0, group: str = "rollout") -> Self:
        """A server that somebody else runs: never started and never stopped by us."""
        return cls(Address(url=url.rstrip("/"), token=token, ca=ca, number=number, group=group), None)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"SGLang server {self.address.number}"

    @property
    def owned(self) -> bool:
        """Whether we started it, and may stop it."""
        return self._launch is not None

    @property
    def pid(self) -> int:
        """Of the launcher, which leads the session of all its processes; 0 where none runs."""
        return self._process.pid if self._process is not None else 0

    # -- start and end

    async def start(self) -> None:
        """Start the process, a new generation of ``address``.

        Another's server is not started; where it had been ready before, it counts as a new generation from here on.

        Raises:
            EngineError: ENG69 where no process can be started.
        """
        if self._launch is None:
            if self._served:
                self.address = replace(self.address, generation=self.address.generation + 1)
            return
        await self.stop(grace=0)
        launch = self._launch
        try:
            port, further = self._hold_ports(launch)
            self._folder = Path(tempfile.mkdtemp(prefix="slime-sglang-"))
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            with launch.log.open("ab") as out:
                self._from = out.tell()
                self._process = subprocess.Popen(
                    [launch.python, str(launch.launcher)],
                    stdin=subprocess.PIPE,  # open as long as we live: the launcher ends with us
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=_environment(launch),
                    start_new_session=True,
                )
        except OSError as error:
            self._let_go()
            leftovers.remove(self._folder)
            raise EngineError(
                f"{self.title} cannot be started: {error}",
                code="ENG69",
                where=str(launch.log),
                fix="sglang.python names the python of an environment that has sglang",
            ) from None
        host = f"[{launch.host}]" if ":" in launch.host else launch.host
        generation = self.address.generation + 1
        self.address = replace(self.address, url=f"http://{host}:{port}", generation=generation)
        self._end = asyncio.create_task(self._bury(self._process), name=f"slime-sglang-{self.address.number}")
        arguments = [*launch.arguments, "--host", launch.host, "--port", str(port), *further]
        asked = json.dumps(
            {
                "program": launch.program,
                "arguments": arguments,
                "token": self.address.token,
                "folder": str(self._folder),
            }
        )
        assert self._process.stdin is not None
        with suppress(OSError):  # where it is gone, `ready` says so
            self._process.stdin.write(f"{asked}\n".encode())
            self._process.stdin.flush()

    def _hold_ports(self, launch: Launch) -> tuple[int, list[str]]:
        """The port of HTTP, and arguments for the further ports of SGLang that it would only guess."""
        self._holds = [ports.hold(launch.host, highest=HIGHEST)]
        further = ports.further(launch.arguments, launch.host)
        self._holds += [held for held, _ in further]
        return self._holds[0].port, [word for _, words in further for word in words]

    def _let_go(self) -> None:
        for held in self._holds:
            held.close()
        self._holds = []

    async def _bury(self, process: subprocess.Popen[bytes]) -> str:
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
        return self._how(code) + (f"; these processes do not die: {left}" if left else "")

    def _how(self, code: int) -> str:
        said = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        if child := CHILD.search(self._written()):
            name, pid, ended = child.groups()
            why = f"was killed by {_signal(-int(ended))}" if int(ended) < 0 else f"ended with exit code {ended}"
            said += f" after its process {name} ({pid}) {why}"
        return said

    async def died(self) -> str:
        """Wait until its process ends, and say how, as the end of a sentence; for another's server, wait forever."""
        if self._end is None:
            if self._launch is None:
                await asyncio.Event().wait()
            return "was stopped"
        return await asyncio.shield(self._end)

    @property
    def running(self) -> bool:
        """Whether its process lives; always, as far as we know, for another's."""
        return self._launch is None or (self._end is not None and not self._end.done())

    async def stop(self, grace: float = GRACE) -> None:
        """End all its processes and wait until none is left; a no-op where none runs, and for another's server.

        Without ``grace`` they are killed, and what they had in shared memory and temporary files is removed all the
        same: the launcher does it when its lifeline is cut.
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
        self._process = self._end = None

    # -- readiness

    async def ready(self, timeout: float) -> None:
        """Wait until it serves, at most ``timeout`` seconds; a port that somebody took is left for another one.

        Raises:
            EngineError: ENG69 it does not answer in time, or ended; ENG71, ENG73, ENG93 as `handshake`.
        """
        deadline = time.monotonic() + timeout
        for _ in range(PORT_TRIES):
            state = await self._wait(deadline)
            if state == "ready":
                self._served = True
                return
            if state == "late":
                raise self._silent(f"did not answer in {timeout:g} s")
            await self.start()
        raise self._silent(f"found its port taken {PORT_TRIES} times")

    async def _wait(self, deadline: float) -> str:
        """``ready``; ``taken``: somebody else listens on the port; ``late``."""
        self._last = "nobody listens there yet"
        where = str(self.log) if self.owned else EXTERNAL
        while (left := deadline - time.monotonic()) > 0:
            if not self.running:
                if IN_USE.search(self._written()):
                    return "taken"
                raise self._silent(await self.died())
            found = self._listener()
            if found == "other":
                return "taken"
            if found == "ours":
                self._last = await self._greet(where, min(ASK, left))
                if not self._last:
                    return "ready"
            await asyncio.sleep(min(POLL, left))
        return "late"

    async def _greet(self, where: str, timeout: float) -> str:
        """Empty where it is ready, else what keeps it from that."""
        greeting = await handshake(self.address, owned=self.owned, where=where, timeout=timeout)
        self.facts = greeting.facts
        return greeting.missing

    def _listener(self) -> str:
        """Who listens on the port: ``ours``, ``other``, or ``nobody``; another's server is taken as it is."""
        if self._launch is None:
            return "ours"
        found = ports.listeners(int(self.address.url.rpartition(":")[2]))
        if not found:
            return "nobody"
        return "ours" if ports.holds(ports.members(self.pid), found) else "other"

    # -- what it says

    def _silent(self, how: str) -> EngineError:
        what = f"{self.title} at {self.address.url} {how}"
        if not self.owned:
            return EngineError(
                what,
                code="ENG69",
                where=EXTERNAL,
                why=self._last,
                fix="start it, or correct its address; rollout.rollout_start_timeout is how long a run waits",
            )
        return EngineError(
            what,
            code="ENG69",
            where=str(self.log),
            why=f"{self._last}; its log ends\n{self.tail()}",
            fix="the log's end says why; a large model may need a larger rollout.rollout_start_timeout",
        )

    def _written(self) -> str:
        """The end of what this generation wrote into its log."""
        if self.log is None:
            return ""
        try:
            with self.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._from, end - TAIL_BYTES))
                return self._redacted(file.read().decode(errors="replace"))
        except OSError:
            return ""

    def _redacted(self, text: str) -> str:
        return text.replace(self.address.token, "***") if self.address.token else text

    def tail(self) -> str:
        """The last lines of its log but those of served requests, no token, each cut to a few hundred characters."""
        if self.log is None:
            return "its log is not ours"
        lines = [line.rstrip() for line in self._written().splitlines() if line.strip() and not ACCESS.search(line)]
        cut = [line if len(line) <= TAIL_WIDTH else f"{line[:TAIL_WIDTH]} ..." for line in lines[-TAIL_LINES:]]
        return "\n".join(cut) or "its log is empty"


def _environment(launch: Launch) -> dict[str, str]:
    env = {**os.environ, **launch.env}
    if "OMP_NUM_THREADS" not in launch.env:
        env["OMP_NUM_THREADS"] = str(launch.threads)
    return env


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
