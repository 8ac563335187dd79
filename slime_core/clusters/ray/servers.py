"""SGLang servers on the machines of a Ray cluster: started, watched and ended there by hosts, asked from here.

    Server --Home--> RayHome --calls--> Host (actor) --> Here --> launcher.py --> server
    Server ------------------ HTTP, with its token ----------------------------------^

A server listens on the address that its machine has in the cluster; on the loopback where all machines are this one.
Its log lies in the run directory, which all machines see. A host that is gone takes its servers with it: their
launchers hang on a pipe that it holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayTaskError

from slime_core.clusters import nccl
from slime_core.clusters.channel import within
from slime_core.clusters.hangs import Member
from slime_core.clusters.looking import Look
from slime_core.clusters.ray.channel import gone
from slime_core.clusters.site import LOOPBACK, Lodging, elsewhere
from slime_core.engines.sglang.home import CLEANING, UNDYING, Begun, Launch, Listener
from slime_core.engines.sglang.installation import Installation, named_here
from slime_core.errors import EngineError, SlimeError

if TYPE_CHECKING:
    from slime_core.clusters.ray.joining import Hosts, Machine
    from slime_core.clusters.ray.placement import Plan
    from slime_core.config.schema import Config
    from slime_core.engines.sglang.server import Server

STARTING = 60.0
"""Seconds in which a host must have started a process; one that takes longer is stopped, or its machine is."""


class RayHome:
    """Implements `home.Home` on a host's machine; ``name`` tells its servers apart."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.place, self.pid, self.lost = machine, machine.name, 0, ""
        self._name = name

    async def start(self, launch: Launch, token: str) -> Begun:
        """See `Home`."""
        call: Awaitable[Begun] = self._call("start", launch, token)
        try:
            begun = await asyncio.wait_for(call, STARTING)
        except TimeoutError:
            raise TimeoutError(f"the host on {self.place} does not answer in {STARTING:g} s") from None
        except RayTaskError as failed:
            raise OSError(str(failed.cause)) from failed
        self.pid = begun.pid
        return begun

    async def ended(self) -> str:
        """See `Home`."""
        try:
            how: str = await self._call("ended")
        except ConnectionError:
            return self.lost
        return how

    async def stop(self, grace: float) -> None:
        """See `Home`; a host that does not answer is not waited for: its end is its servers' too."""
        if not self.lost:
            await within(grace + CLEANING + UNDYING, self._call("stop", grace))
        self.pid = 0

    async def listener(self, port: int) -> Listener:
        """See `Home`; nobody, where the host is gone."""
        try:
            found: Listener = await self._call("listener", port)
        except ConnectionError:
            return "nobody"
        return found

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await asyncio.ensure_future(self.machine.host.home.remote(self._name, method, *args))
        except RayActorError as error:
            self.lost = gone(self.place, error)
            raise ConnectionResetError(self.lost) from error


class RaySite:
    """Implements `site.Site`: a server in its seat, SGLang's router beside the first server of its model."""

    def __init__(self, config: Config, placed: Plan, found: Hosts) -> None:
        self._config, self._placed, self._found = config, placed, found

    async def installation(self) -> Installation:
        """See `site.Site`: that of the first server's machine; all machines have it under the same path."""
        machine = self._found.machines[self._placed.engines[0].bundle]
        try:
            found: Installation = await machine.host.installation.remote(dict(self._config.sglang), named_here())
        except RayTaskError as failed:
            if isinstance(failed.cause, SlimeError):
                failed.cause.where = f"{machine.name}: {failed.cause.where}"
                raise failed.cause from None
            raise
        except RayActorError as error:
            what = f"the host that looks for SGLang {gone(machine.name, error)}"
            raise EngineError(what, code="ENG84", lost=True) from error
        return found

    async def torch(self) -> str:
        """See `site.Site`: of the machine of rank 0; the driver's may be another."""
        seats = self._placed.ranks or self._placed.engines
        found: str = await self._found.machines[seats[0].bundle].host.torch.remote()
        return found

    def gpus(self) -> int | None:
        """See `site.Site`: the placement was for as many as there are."""
        return None

    def lodging(self, number: int) -> Lodging:
        """See `site.Site`: the GPUs of its seat, and what NCCL has to be told alike there and in the ranks."""
        told = {name: os.environ[name] for name in (nccl.MEMORY,) if name in os.environ}
        return self._lodging(number, f"server {number}", {**told, **self._found.visible(self._placed.engines[number])})

    def lodging_of_router(self, role: str) -> Lodging:
        """See `site.Site`; before servers that others run it lives here."""
        return self._lodging(0, f"router {role}", {}) if self._placed.engines else Lodging()

    def _lodging(self, number: int, name: str, env: dict[str, str]) -> Lodging:
        machine = self._found.machines[self._placed.engines[number].bundle]
        return Lodging(host=self._found.reached(machine), home=RayHome(machine, name), env=env)

    def meeting(self, urls: Sequence[str]) -> str:
        """See `site.Site`."""
        if not self._placed.ranks:
            return LOOPBACK
        machine = self._found.machines[self._placed.ranks[0].bundle]
        return machine.address if elsewhere(urls) else self._found.reached(machine)


@dataclass(slots=True, frozen=True)
class Hosted:
    """Implements `hangs.Asked` over the process of a server on a host's machine."""

    machine: Machine
    pid: int

    @property
    def node(self) -> str:
        """See `hangs.Asked`."""
        return self.machine.name

    async def look(self) -> Look:
        """Its state, as `hangs.ServerLook` has it."""
        state = await self.machine.host.state.remote(self.pid)
        why = "its watch judges it by its tokens" if state else "it is not running"
        return Look(pid=self.pid, state=state, why=why)

    async def kill(self) -> None:
        """The cluster's end does that in order."""


class RayServers:
    """Servers on a cluster's machines as lines of the page of a hang."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers

    def members(self) -> list[Member]:
        """See `hangs.Watched`."""
        homes = [(server.title, server.home) for server in self._servers]
        return [
            Member(name=title, channel=Hosted(home.machine, home.pid))
            for title, home in homes
            if isinstance(home, RayHome)
        ]
