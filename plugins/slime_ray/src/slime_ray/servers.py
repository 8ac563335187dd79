"""Servers of an engine on a Ray cluster's machines: started, watched and stopped by hosts, called from here.

    Server --Host--> RayHost --calls--> channel.Host (actor) --> ``launch.host()`` --> launcher --> server
    Server ------------------ HTTP, with its token ----------------------------------^

A server listens on the address that its machine has in the cluster; on the loopback where all machines are this one.
Its log lies in the run directory, which all machines see. A lost host takes its servers with it: their
launchers hang on a pipe that it holds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayTaskError

from slime_core.clusters.hangs import within
from slime_core.clusters.host import (
    LOOPBACK,
    NCCL_MEMORY,
    Listener,
    ServerPlacement,
    StartedProcess,
    elsewhere,
)
from slime_core.errors import EngineError, SlimeError
from slime_ray.channel import host_loss

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_ray.joining import Hosts, Machine
    from slime_ray.placement import ProcessPlacement, RayPlan

ENDING = 70.0
"""Seconds, beside its grace, in which a host must have ended all of a process."""
STARTING = 60.0
"""Seconds in which a host must have started a process; one that takes longer is stopped, or its machine is."""


class RayHost:
    """Implements `host.Host` on a host's machine; ``name`` distinguishes its servers."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.place, self.pid, self.lost = machine, machine.name, 0, ""
        self._name = name

    async def start(self, launch: Any, token: str) -> StartedProcess:
        """See `Host`."""
        call: Awaitable[StartedProcess] = self._call("start", launch, token)
        try:
            process = await asyncio.wait_for(call, STARTING)
        except TimeoutError:
            raise TimeoutError(f"the host on {self.place} does not answer in {STARTING:g} s") from None
        except RayTaskError as failed:
            raise OSError(str(failed.cause)) from failed
        self.pid = process.pid
        return process

    async def ended(self) -> str:
        """See `Host`."""
        try:
            how: str = await self._call("ended")
        except ConnectionError:
            return self.lost
        return how

    async def stop(self, grace: float) -> None:
        """See `Host`; a host that does not answer is not waited for: its end is its servers' too."""
        if not self.lost:
            await within(grace + ENDING, self._call("stop", grace))
        self.pid = 0

    async def listener(self, port: int) -> Listener:
        """See `Host`; empty if the host is lost."""
        try:
            listener: Listener = await self._call("listener", port)
        except ConnectionError:
            return "nobody"
        return listener

    async def state(self) -> str:
        """See `Host`."""
        state: str = await self._call("state") if self.pid else ""
        return state

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await asyncio.ensure_future(self.machine.host.server.remote(self._name, method, *args))
        except RayActorError as error:
            self.lost = host_loss(self.place, error)
            raise ConnectionResetError(self.lost) from error


class RayPlacements:
    """Implements `host.ServerPlacements`: each server where the plan has it, a router beside its model's first."""

    def __init__(self, config: Config, placed: RayPlan, hosts: Hosts) -> None:
        self._config, self._placed, self._hosts = config, placed, hosts

    async def on_server(self, function: str, *args: Any) -> Any:
        """See `host.ServerPlacements`; a program's files have the same path on all machines."""
        return await self._call(self._placed.engines[0], function, *args)

    async def on_trainer(self, function: str, *args: Any) -> Any:
        """See `host.ServerPlacements`; the driver's machine may be another."""
        return await self._call((self._placed.ranks or self._placed.engines)[0], function, *args)

    async def _call(self, placement: ProcessPlacement, function: str, *args: Any) -> Any:
        machine = self._hosts.machines[placement.bundle]
        try:
            return await machine.host.call.remote(function, *args)
        except RayTaskError as failed:
            if isinstance(failed.cause, SlimeError):
                failed.cause.where = f"{machine.name}: {failed.cause.where}"
                raise failed.cause from None
            raise
        except RayActorError as error:
            message = f"the host that prepares servers {host_loss(machine.name, error)}"
            raise EngineError(message, code="ENG84", lost=True) from error

    def gpus(self) -> int | None:
        """See `host.ServerPlacements`: the placement was for as many as there are."""
        return None

    def server(self, number: int) -> ServerPlacement:
        """See `host.ServerPlacements`: its GPUs, and NCCL's settings, which must equal those of the ranks."""
        variables = {name: os.environ[name] for name in (NCCL_MEMORY,) if name in os.environ}
        return self._placement_of(
            number, f"server {number}", {**variables, **self._hosts.visible(self._placed.engines[number])}
        )

    def beside(self, role: str) -> ServerPlacement:
        """See `host.ServerPlacements`; before servers that others run it lives here."""
        return self._placement_of(0, f"router {role}", {}) if self._placed.engines else ServerPlacement()

    def _placement_of(self, number: int, name: str, env: dict[str, str]) -> ServerPlacement:
        machine = self._hosts.machines[self._placed.engines[number].bundle]
        return ServerPlacement(address=self._hosts.reached(machine), host=RayHost(machine, name), env=env)

    def trainer_address(self, urls: Sequence[str]) -> str:
        """See `host.ServerPlacements`."""
        if not self._placed.ranks:
            return LOOPBACK
        machine = self._hosts.machines[self._placed.ranks[0].bundle]
        return machine.address if elsewhere(urls) else self._hosts.reached(machine)
