"""Processes of a run on this machine, each under a launcher, which leaves nothing of it behind.

Launch, token --start--> held ports, a launcher (own session, log, temporary folder) --> StartedProcess
                                 `-- its end, or stop --> its session killed, ports and folder given back
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.clusters.channel import end_of
from slime_core.clusters.hangs import state_of
from slime_core.clusters.host import LOOPBACK, Listener, ServerPlacement, StartedProcess, elsewhere, function_of
from slime_sglang import held_ports

if TYPE_CHECKING:
    from slime_core.config.schema import Config

CLEANING = 10.0
"""Seconds in which the launcher must have killed and removed what there is, before it is killed itself."""
UNDYING = 60.0
"""Seconds after SIGKILL in which a process must be gone; one that waits for a broken device may never be."""

SHARED_MEMORY = "shared-memory"
"""File in a server's temporary folder; the launcher writes there what the server has in /dev/shm, a path a line."""

TAIL_BYTES = 64 << 10  # of a log that are read


def one_port(launch: Launch) -> tuple[list[held_ports.Hold], list[str]]:
    """A port for HTTP, held; no further words."""
    return [held_ports.hold(launch.address)], []


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a process is started: ``python -I -S launcher.py``, whose stdin gets one JSON line and then stays open.

    The line has ``program``, ``arguments`` (with ``--host``, ``--port`` and what ``hold`` adds), ``token`` and
    ``folder`` for temporary files. The launcher ends its program when stdin closes.

    Example:
        Launch(launcher="slime_sglang.launcher", python=python, arguments=("--model-path", path), log=log)
    """

    launcher: str  # module whose file is run; found where the process is started
    python: str  # interpreter of the program's environment
    arguments: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)  # added to that of who starts it
    address: str = LOOPBACK  # that it listens on
    threads: int = 1  # OMP_NUM_THREADS where ``env`` has none
    program: str = "server"  # for the launcher
    hold: Callable[[Launch], tuple[list[held_ports.Hold], list[str]]] = one_port  # that of HTTP first; and words
    crash: str = ""  # pattern of the log's line on a child that crashed: its name, process id and exit code

    def host(self) -> LocalHost:
        """What starts it, on its machine."""
        return LocalHost()


class LocalHost:
    """This machine.

    Example:
        host = LocalHost()
        process = await host.start(launch, token)
        ...
        await host.stop(15.0)
    """

    place = lost = ""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: asyncio.Task[str] | None = None
        self._holds: list[held_ports.Hold] = []
        self._folder = Path()  # for temporary files of the present process

    @property
    def pid(self) -> int:
        """See `Host`."""
        return self._process.pid if self._process is not None else 0

    async def start(self, launch: Launch, token: str) -> StartedProcess:
        """See `Host`."""
        try:
            self._holds, further = launch.hold(launch)
            self._folder = Path(tempfile.mkdtemp(prefix="slime-server-"))
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            with launch.log.open("ab") as out:
                begin = out.tell()
                process = subprocess.Popen(
                    [launch.python, "-I", "-S", _file_of(launch.launcher)],  # the standard library is all it needs
                    stdin=subprocess.PIPE,  # open as long as we live: the launcher ends with us
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=_environment(launch),
                    start_new_session=True,
                )
        except OSError:
            self._let_go()
            _remove(self._folder)
            raise
        self._process = process
        self._end = asyncio.create_task(self._bury(process, launch, begin), name=f"slime-server-{process.pid}")
        port = self._holds[0].port
        arguments = [*launch.arguments, "--host", launch.address, "--port", str(port), *further]
        request = {
            "program": launch.program,
            "arguments": arguments,
            "token": token,
            "folder": str(self._folder),
        }
        assert process.stdin is not None
        with suppress(OSError):  # where it is gone, `ended` says so
            process.stdin.write(f"{json.dumps(request)}\n".encode())
            process.stdin.flush()
        return StartedProcess(pid=process.pid, port=port, log_begin=begin)

    def _let_go(self) -> None:
        for hold in self._holds:
            hold.close()
        self._holds = []

    async def _bury(self, process: subprocess.Popen[bytes], launch: Launch, begin: int) -> str:
        """Wait for the launcher's end, kill what is left of its session, and say how it ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        watched = os.pidfd_open(process.pid)
        loop.add_reader(watched, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)
        remaining = await _kill_session(process.pid)  # before it is reaped: its number is nobody else's yet
        code = process.wait()
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        self._let_go()
        await asyncio.to_thread(_remove, self._folder)
        return _how(code, log_since(launch.log, begin), launch.crash) + (
            f"; these processes do not die: {remaining}" if remaining else ""
        )

    async def ended(self) -> str:
        """See `Host`."""
        if self._end is None:
            return "was never started"
        return await asyncio.shield(self._end)

    async def stop(self, grace: float) -> None:
        """See `Host`. What a killed process had in shared memory and temporary files is removed all the same.

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
        """See `Host`."""
        listeners = held_ports.listeners(port)
        if not listeners:
            return "nobody"
        return "ours" if held_ports.holds(held_ports.members(self.pid), listeners) else "other"

    async def state(self) -> str:
        """See `Host`."""
        return state_of(self.pid) if self.pid else ""


def log_since(log: Path, begin: int) -> str:
    """The end of what was written into a log from byte ``begin`` on; empty where it cannot be read."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begin, end - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _file_of(module: str) -> str:
    """The file of a module, which is not imported.

    Raises:
        FileNotFoundError: it is not installed on this machine.
    """
    spec = None
    with suppress(ModuleNotFoundError):  # of the package around it
        spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the module {module} is not installed here")
    return spec.origin


def _environment(launch: Launch) -> dict[str, str]:
    env = {**os.environ, **launch.env}
    if "OMP_NUM_THREADS" not in launch.env:
        env["OMP_NUM_THREADS"] = str(launch.threads)
    return env


def _how(code: int, written: str, crash: str) -> str:
    child = re.search(crash, written) if crash else None
    if child is None:
        return end_of(code)
    name, pid, ended = child.groups()
    return f"{end_of(code)} after its process {name} ({pid}) {end_of(int(ended))}"


def _kill(session: int) -> list[int]:
    """Kill what is alive of a session; those that were."""
    alive = held_ports.members(session)
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


def _remove(folder: Path) -> None:
    """Remove a dead server's temporary folder and its files in shared memory that no living process uses.

    The launcher does that; this is for one that was killed too. It lists the server's files in ``SHARED_MEMORY``.
    """
    if not folder.exists():
        return  # the launcher has done it
    with suppress(OSError):
        listed = (folder / SHARED_MEMORY).read_text().splitlines()
        paths = {line for line in listed if os.path.dirname(line) == "/dev/shm"}
        used = _used() if paths else set()
        for path in paths:
            with suppress(OSError):
                if str(os.stat(path).st_ino) not in used:
                    os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def _used() -> set[str]:
    """Inodes of what processes have mapped of shared memory: a semaphore's file has another name by then."""
    paths = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            paths |= {line.split(maxsplit=5)[4] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return paths


class LocalPlacements:
    """All of them on this machine.

    Example: LocalPlacements(config).server(0).address == "127.0.0.1"
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    async def on_server(self, function: str, *args: Any) -> Any:
        """See `ServerPlacements`."""
        return await asyncio.to_thread(function_of(function), *args)

    async def on_trainer(self, function: str, *args: Any) -> Any:
        """See `ServerPlacements`."""
        return await asyncio.to_thread(function_of(function), *args)

    def gpus(self) -> int | None:
        """See `ServerPlacements`: those that this process sees."""
        if self._config.cluster.device != "cuda":
            return None
        import torch

        return torch.cuda.device_count()

    def server(self, number: int) -> ServerPlacement:
        """See `ServerPlacements`; a server's command has its GPUs."""
        return ServerPlacement()

    def beside(self, role: str) -> ServerPlacement:
        """See `ServerPlacements`."""
        return ServerPlacement()

    def trainer_address(self, urls: Sequence[str]) -> str:
        """See `ServerPlacements`: the loopback, or the address of ours that servers elsewhere are reached from."""
        away = elsewhere(urls)
        return own_address(*away) if away else LOOPBACK


def own_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches ``host``; the loopback where no way leads there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(address)  # sends nothing: the kernel only chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
