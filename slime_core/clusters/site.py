"""Where the SGLang servers of a run live: what `sglang` asks of a place, and this machine as one.

    Site.installation -> which SGLang they are started with
    Site.lodging      -> of each server: address that it listens on, home of its process, variables (its GPUs)
    Site.meeting      -> where the trainer listens for servers that take weights by nccl

``clusters.ray.servers`` has the site of a Ray cluster.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from slime_core.config.buffer_rules import is_loopback
from slime_core.engines.sglang.home import Here, Home
from slime_core.engines.sglang.installation import (
    Installation,
    environment_of,
    find_python,
    is_here,
    named_here,
    read_installation,
)

if TYPE_CHECKING:
    from slime_core.config.schema import Config

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lodging:
    """Where one process lives.

    Example: Lodging(host="10.0.0.5", home=home, env={"CUDA_VISIBLE_DEVICES": "2,3"})
    """

    host: str = LOOPBACK  # it listens there
    home: Home = field(default_factory=Here)
    env: Mapping[str, str] = field(default_factory=dict)  # beside what its command says


class Site(Protocol):
    """A place for all servers of a run."""

    async def installation(self) -> Installation:
        """The SGLang that servers are started with.

        Raises:
            ConfigError: CFG02, CFG04, CFG05 as `installation.find_python` and `read_installation`.
        """
        ...

    async def torch(self) -> str:
        """Version of torch in the trainer's environment."""
        ...

    def gpus(self) -> int | None:
        """How many there are for servers and ranks, to refuse more; None where that was settled, or on a CPU."""
        ...

    def lodging(self, number: int) -> Lodging:
        """Of a server, by its number."""
        ...

    def lodging_of_router(self, role: str) -> Lodging:
        """Of SGLang's router before the servers of a model."""
        ...

    def meeting(self, urls: Sequence[str]) -> str:
        """Address at which the trainer's rank 0 listens for servers of these addresses."""
        ...


class OneMachine:
    """All of it on this machine.

    Example: OneMachine(config).lodging(0) == Lodging()
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    async def installation(self) -> Installation:
        """See `Site`."""
        return await asyncio.to_thread(read_here, self._config.sglang)

    async def torch(self) -> str:
        """See `Site`."""
        return version("torch")

    def gpus(self) -> int | None:
        """See `Site`: those that this process sees."""
        if self._config.cluster.device != "cuda":
            return None
        import torch

        return torch.cuda.device_count()

    def lodging(self, number: int) -> Lodging:
        """See `Site`; a server's command has its GPUs."""
        return Lodging()

    def lodging_of_router(self, role: str) -> Lodging:
        """See `Site`."""
        return Lodging()

    def meeting(self, urls: Sequence[str]) -> str:
        """See `Site`: the loopback, or the address of ours that servers elsewhere are reached from."""
        away = elsewhere(urls)
        return own_address(*away) if away else LOOPBACK


def read_here(table: Mapping[str, object], named: str = "") -> Installation:
    """The SGLang of this machine that a ``[sglang]`` table names, else the one beside slime, else the one of the
    environment, else ``named``; raises as `Site.installation`."""
    if named and not (table.get("python") or is_here() or named_here()):
        table = {**table, "python": named}
    return read_installation(find_python(table), environment_of(table))


def elsewhere(urls: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of the first server that is not asked over the loopback; None where all are."""
    parts = [urlsplit(url) for url in urls]
    return next(((p.hostname, p.port or 80) for p in parts if p.hostname and not is_loopback(p.hostname)), None)


def own_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches ``host``; the loopback where no way leads there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
            probe.connect(address)  # sends nothing: the kernel only chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
