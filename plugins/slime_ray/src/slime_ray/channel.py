"""A child on another machine: its host, a Ray actor, starts it there and carries the frames.

    driver -- RayChannel --calls--> Host (actor, computes nothing) -- ProcessChannel --> rank or engine process

Large frames go through Ray's object store: put once, read by every host that forwards them. A lost host, with
its machine or alone, takes its children with it; each of their channels says so.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from slime_core.clusters.channel import Child, Frame, ProcessChannel, decode
from slime_core.clusters.hangs import Look, state_of
from slime_core.clusters.host import ProcessHost as ServerHost, function_of

LARGE = 64 << 10
"""Bytes of a frame from which on it goes through the object store."""

Parts = tuple[bytes, Sequence[Any]]
"""Head and blobs of a frame; the blobs as arrays, which Ray hands over without a copy."""


class Host:
    """The actor: children on its machine by number, and nothing that could keep it from answering."""

    def __init__(self) -> None:
        self._children: list[Relayed] = []
        self._hosts: dict[str, ServerHost] = {}

    async def where(self) -> tuple[str, str, list[str], int]:
        """Name and address of this machine, the GPUs that Ray gave this actor, and its process id."""
        import socket

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return socket.gethostname(), str(ray.util.get_node_ip_address()), [str(gpu) for gpu in gpus], os.getpid()

    async def look(self) -> Look:
        """State of this process; an answer shows that it is not blocked."""
        return Look(pid=os.getpid(), state=state_of(os.getpid()), note="it answers")

    async def call(self, function: str, *args: Any) -> Any:
        """What ``package.module:function`` returns on this machine."""
        return await asyncio.to_thread(function_of(function), *args)

    async def server(self, name: str, method: str, *args: Any) -> Any:
        """A call of this machine's host of the server of that name; its first start makes that."""
        if name not in self._hosts:
            self._hosts[name] = args[0].host()
        return await getattr(self._hosts[name], method)(*args)

    async def start(self, module: str, log: str, env: dict[str, str], folder: str) -> tuple[int, int]:
        """Start a child; its number here, and its process id."""
        env = {**env, **_path(env)}
        child = Child(module=module, log=Path(log), env=env, folder=folder if Path(folder).is_dir() else "")
        relayed = Relayed(await ProcessChannel.start(child))
        self._children.append(relayed)
        return len(self._children) - 1, relayed.channel.pid

    async def write(self, number: int, parts: Parts) -> bool:
        """Send a frame; False if the child has ended."""
        try:
            head, blobs = parts
            await self._children[number].channel.write(Frame(head, [memoryview(blob) for blob in blobs]))
        except ConnectionError:
            return False
        return True

    async def read(self, number: int) -> list[Parts]:
        """The child's frames since the last call, at least one; empty once it has ended."""
        return await self._children[number].frames()

    async def ask(self, number: int, method: str, *args: Any) -> Any:
        """``ended``, ``kill``, ``tail``, ``look`` or ``close`` of a child's `Channel`."""
        return await getattr(self._children[number].channel, method)(*args)


class Relayed:
    """One child of a host, and its frames on their way to the driver."""

    def __init__(self, channel: ProcessChannel) -> None:
        self.channel = channel
        self._come = asyncio.Queue[Parts | None]()
        self._pump = asyncio.create_task(self._read())

    async def frames(self) -> list[Parts]:
        """See `Host.read`."""
        frames = [await self._come.get()]
        while not self._come.empty() and frames[-1] is not None:
            frames.append(self._come.get_nowait())
        if frames[-1] is None:  # for the next call too
            self._come.put_nowait(None)
        return [parts for parts in frames if parts is not None]

    async def _read(self) -> None:
        try:
            while True:
                self._come.put_nowait(_parts(await self.channel.read_frame()))
        except ConnectionError:
            self._come.put_nowait(None)


class RayChannel:
    """Implements `Channel` over a host.

    Example:
        channel = await RayChannel.start(host, "node-3", child)
    """

    def __init__(self, host: Any, machine: str, number: int, pid: int, log: Path) -> None:
        self.pid, self.log, self.node = pid, f"{machine}:{log}", machine
        self._host, self._machine, self._number = host, machine, number
        self._lost = ""
        self._come: deque[Parts] = deque()
        self._writing = asyncio.Lock()

    @classmethod
    async def start(cls, host: Any, machine: str, child: Child) -> RayChannel:
        """Start a child where ``host`` is.

        Raises:
            ConnectionError: the host is lost.
            OSError: it cannot be started there.
        """
        try:
            call = host.start.remote(child.module, str(child.log), dict(child.env), child.folder)
            number, pid = await call
        except RayActorError as error:
            raise ConnectionResetError(host_loss(machine, error)) from error
        except ray.exceptions.RayTaskError as failed:
            raise OSError(f"{machine}: {failed.cause}") from failed
        return cls(host, machine, number, pid, child.log)

    async def write(self, frame: Frame) -> None:
        """See `Channel`; Ray keeps no order between calls that wait for objects, so they go one by one."""
        async with self._writing:
            parts: Any = frame.stored or _parts(frame)
            if frame.stored is None and len(frame.head) + sum(len(blob) for blob in frame.blobs) >= LARGE:
                parts = frame.stored = ray.put(parts)
            sent = asyncio.ensure_future(self._ask(self._host.write.remote(self._number, parts)))
            sent.add_done_callback(_looked_at)  # a cancelled caller never fetches the result
            if not await asyncio.shield(sent):
                raise ConnectionResetError("the process is gone")

    async def read(self) -> Any:
        """See `Channel`."""
        if not self._come:
            self._come.extend(await self._ask(self._host.read.remote(self._number)))
        if not self._come:
            raise ConnectionResetError("the process is gone")
        return decode(Frame(*self._come.popleft()))

    async def ended(self, seconds: float) -> str:
        """See `Channel`."""
        try:
            end: str = await self._ask(self._host.ask.remote(self._number, "ended", seconds))
        except ConnectionError:
            return self._lost
        return end

    async def kill(self) -> None:
        """See `Channel`; a lost host has taken its children with it."""
        await self._try("kill")

    async def tail(self) -> str:
        """See `Channel`; empty if the host is lost."""
        return await self._try("tail") or ""

    async def look(self) -> Look:
        """See `Channel`."""
        state: Look = await self._ask(self._host.ask.remote(self._number, "look"))
        return state

    async def close(self) -> None:
        """See `Channel`."""
        await self._try("close")

    async def _ask(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except RayActorError as error:
            self._lost = host_loss(self._machine, error)
            raise ConnectionResetError(self._lost) from error

    async def _try(self, method: str) -> Any:
        try:
            return await self._ask(self._host.ask.remote(self._number, method))
        except ConnectionError:
            return None


def _looked_at(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()


def _path(env: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH of a child: modules that travelled to this host come before those that the driver has."""
    both = f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{env.get('PYTHONPATH', '')}".split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, both)))} if any(both) else {}


def _parts(frame: Frame) -> Parts:
    return frame.head, [np.frombuffer(blob, dtype=np.uint8) for blob in frame.blobs]


def host_loss(machine: str, error: RayActorError) -> str:
    """The end of a sentence about a child whose host is lost, with Ray's reason."""
    reason = " ".join(str(error).split())
    return f"was lost with its host on {machine}: {reason[:400]}"
