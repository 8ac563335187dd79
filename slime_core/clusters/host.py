"""Machines on which an engine's servers run: a cluster implements `ProcessHost` and `ServerPlacements`.

    Launch, token --start--> StartedProcess --its end, or stop--> nothing left

A host runs one process at a time. Its log lies where the driver sees it too, so nobody has to be asked for its end.
How a process is started and ended on its machine is the engine's affair. On another machine a cluster forwards the
calls to a host there, which ``launch.host()`` makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from slime_core.config.sections.rollout import is_loopback

LOOPBACK = "127.0.0.1"

NCCL_MEMORY = "NCCL_CUMEM_ENABLE"
"""How NCCL shares memory between two processes. SGLang's servers turn it off unless it is set, and NCCL has it on: one
side then opens a handle of a kind that the other never made, and the first broadcast ends with `invalid argument`."""

Listener = Literal["ours", "other", "nobody"]
"""Who listens on a port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedProcess:
    """A process that was started.

    Example: StartedProcess(pid=4711, port=30000, log_begin=0)
    """

    pid: int  # of the launcher, which leads the session of all its processes
    port: int  # of HTTP
    log_begin: int  # bytes that the log had before


class ProcessHost(Protocol):
    """A machine for one process at a time."""

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

    async def start(self, launch: Any, token: str) -> StartedProcess:
        """Start a process; none may run. ``launch`` is the engine's own; ``launch.host()`` starts it on its machine.

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

    async def state(self) -> str:
        """The kernel's letter for the launcher; empty where none runs."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlacement:
    """Where one server lives.

    Example: ServerPlacement(address="10.0.0.5", host=host, env={"CUDA_VISIBLE_DEVICES": "2,3"})
    """

    address: str = LOOPBACK  # it listens there
    host: ProcessHost | None = None  # None: this machine
    env: Mapping[str, str] = field(default_factory=dict)  # beside what its command says


class ServerPlacements(Protocol):
    """Where all servers of a run live."""

    async def on_server(self, function: str, *args: Any) -> Any:
        """What ``package.module:function`` returns on the machine of the first server; its SlimeError is raised."""
        ...

    async def on_trainer(self, function: str, *args: Any) -> Any:
        """The same, on the machine of the trainer's rank 0."""
        ...

    def gpus(self) -> int | None:
        """How many there are for servers and ranks, to refuse more; None where that was settled, or on a CPU."""
        ...

    def server(self, number: int) -> ServerPlacement:
        """Of a server, by its number."""
        ...

    def beside(self, role: str) -> ServerPlacement:
        """Of a process that stands before the servers of a model, such as a router."""
        ...

    def trainer_address(self, urls: Sequence[str]) -> str:
        """Address at which the trainer's rank 0 listens for servers of these addresses."""
        ...


def function_of(name: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)  # type: ignore[no-any-return]


def elsewhere(urls: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of the first server that is not asked over the loopback; None where all are."""
    parts = [urlsplit(url) for url in urls]
    return next(((p.hostname, p.port or 80) for p in parts if p.hostname and not is_loopback(p.hostname)), None)
