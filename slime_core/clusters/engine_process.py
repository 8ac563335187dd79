"""The embedded engine in a process of its own, as a `protocols.Engine`: it generates while this process trains.

    generate, abort, ... --`proxy.Proxy`--> EngineService
    load --block of memory (`weights.shared_memory`)--> "

    python -m slime_core.clusters.engine_process CALLS [BLOCKS] PARENT

A process on this machine shares the block: its descriptor comes on the socket BLOCKS. One that was started elsewhere
gets it in a frame. Requests that are in flight are lost with a process that dies. It needs no plugin.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from slime_core.clusters.channel import Child, Frame, ProcessChannel, Start
from slime_core.clusters.embedded import embedded_engine, open_folder
from slime_core.clusters.hangs import Member
from slime_core.clusters.machine import engines_apart
from slime_core.clusters.proxy import Proxy, Service, forwarded, request, run
from slime_core.errors import EngineError
from slime_core.protocols import Ability, Engine, PauseMode
from slime_core.threads import TorchThread
from slime_core.types import AdapterUpdate, WeightUpdate
from slime_core.weights.shared_memory import Listing, MappedBlock, SharedBlock, checksums, tensors_in

if TYPE_CHECKING:
    from slime_core.config.schema import Config

PROCESS = "slime_core.clusters.engine_process"
LOST = "ENG84"


class FrameSender:
    """Weights in a frame for engines elsewhere: made once an update, however many engines take it."""

    def __init__(self, thread: TorchThread) -> None:
        self._thread, self._block = thread, SharedBlock()
        self._lock = asyncio.Lock()
        self._latest: tuple[WeightUpdate, Frame, Listing] | None = None

    async def frame(self, update: WeightUpdate) -> tuple[Frame, Listing]:
        """The frame of an update's tensors, and its listing."""
        async with self._lock:
            if self._latest is None or self._latest[0] is not update:
                self._latest = None
                listing = await self._thread.run(self._block.fill, _tensors(update))
                memory = np.frombuffer(self._block.memory, dtype=np.uint8)
                self._latest = update, request(0, "block", memory), listing
            return self._latest[1:]

    def close(self) -> None:
        """Give the memory back."""
        self._latest = None
        self._block.close()


class EngineProcess:
    """Implements `protocols.Engine` over one process; enter it with ``async with``.

    ``thread`` is the trainer's: weights are copied there, after the step that made them. With ``start`` the process is
    wherever that starts it, and ``sender`` makes the frames of its weights.

    Example:
        async with EngineProcess(config, run_dir=path, epoch=1, thread=thread) as engine:
            await engine.load(await trainer.publish(0))
            done = await engine.generate(request)
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        epoch: int,
        thread: TorchThread,
        number: int = 0,
        start: Start | None = None,
        sender: FrameSender | None = None,
    ) -> None:
        self.version, self.epoch = -1, epoch
        self.abilities: frozenset[Ability] = frozenset()
        self._config, self._thread, self.number = config, thread, number
        self._start, self._sender = start, sender
        self._run_dir, self.log = run_dir, run_dir / "log" / f"engine-{number}.log"
        self._block = SharedBlock()
        self._sent = 0  # number of the block that the process has
        self._loading = asyncio.Lock()
        self._paused = False  # requests wait because they were told to
        self._proxy: Proxy | None = None
        self._blocks: socket.socket | None = None  # to a process on this machine

    @property
    def pid(self) -> int:
        """Of the process; 0 before it is started."""
        return self._proxy.channel.pid if self._proxy is not None else 0

    async def __aenter__(self) -> Self:
        env = {"OMP_NUM_THREADS": str(self._config.cluster.cpu_threads)}
        if self._start is not None:
            channel = await self._start(self.number, Child(module=PROCESS, log=self.log, env=env))
        else:
            self._blocks, child_end = socket.socketpair()
            with child_end:
                child = Child(module=PROCESS, log=self.log, env={**env, **_visible(self._config, self.number)})
                channel = await ProcessChannel.start(child, child_end.fileno())
        self._proxy = Proxy(channel, f"the engine's process {channel.pid}", EngineError, LOST, self._note)
        try:
            alone = self._start is None and _has_own_gpu(self._config)
            await self.call("start", self._config, self.epoch, alone, self._run_dir, self.number)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._proxy is not None:
            await self._proxy.close()
        if self._blocks is not None:
            self._blocks.close()
        self._block.close()

    def _note(self, state: tuple[int, frozenset[Ability]]) -> None:
        self.version, self.abilities = state

    def members(self) -> list[Member]:
        """See `hangs.Watched`."""
        if (proxy := self._proxy) is None:
            return []
        calls = proxy.waiting
        doing = f"{calls} call{'s' * (calls != 1)}" if calls and not self._paused else ""
        return [Member(name=f"engine {self.number}", channel=proxy.channel, doing=doing, since=proxy.last_reply)]

    async def call(self, method: str, *args: Any) -> Any:
        """The process's answer."""
        if self._proxy is None:
            raise EngineError("the engine's process was not started", code=LOST)
        return await self._proxy.call(method, *args)

    generate, score, abort = forwarded(Engine.generate), forwarded(Engine.score), forwarded(Engine.abort)
    route, fingerprints = forwarded(Engine.route), forwarded(Engine.fingerprints)
    release, reacquire = forwarded(Engine.release), forwarded(Engine.reacquire)

    async def pause(self, mode: PauseMode) -> None:
        """See `protocols.Engine`."""
        await self.call("pause", mode)
        self._paused = True

    async def resume(self) -> None:
        """See `protocols.Engine`; requests that waited have the time of new ones."""
        self._paused = False
        if self._proxy is not None:
            self._proxy.last_reply = time.monotonic()
        await self.call("resume")

    async def load(self, update: WeightUpdate) -> None:
        """See `protocols.Engine`; running requests go on, each token says its version.

        Where the trainer sent no checksums, the float32 tensors' go into ``update.fingerprints`` if that is also the
        dtype of compute: what the engine then serves must have them.

        Raises:
            EngineError: ENG83 tensors that did not arrive whole, ENG84 a dead process, ENG86 weights that do not fit.
        """
        async with self._loading:
            if self._sender is not None and self._proxy is not None:
                frame, listing = await self._sender.frame(update)
                await self._proxy.send(frame)
            else:
                listing = await self._thread.run(self._block.fill, _tensors(update))
                if self._blocks is not None and self._sent != self._block.number:
                    with suppress(OSError):  # where the process is gone, the call below says so
                        socket.send_fds(self._blocks, [b"w"], [self._block.fd])
                    self._sent = self._block.number
            configs = {name: dict(adapter.config) for name, adapter in update.adapters.items()}
            await self.call("load", update.version, update.epoch, listing, configs)
        if self._config.train.dtype == "float32" and not update.tensors.keys() & update.fingerprints.keys():
            sums = checksums(listing, "float32")
            update.fingerprints |= {name: one for name, one in sums.items() if name in update.tensors}


class EngineService(Service):
    """The engine in its process, as ``target``; on the socket of the descriptor ``blocks`` weight blocks come."""

    fault = partial(EngineError, code=LOST)

    def __init__(self, blocks: int = -1) -> None:
        super().__init__()
        self._blocks = socket.socket(fileno=blocks) if blocks >= 0 else None
        self._block: MappedBlock | None = None
        self._sent: Any = None  # bytes of the last block that came in a frame

    @property
    def state(self) -> tuple[int, frozenset[Ability]]:
        """See `Service`: version and abilities."""
        return (self.target.version, self.target.abilities) if self.target is not None else (-1, frozenset())

    async def start(self, config: Config, epoch: int, alone: bool, run_dir: Path, number: int) -> None:
        """Make engine ``number``; ``alone`` says that no other process wants its GPU's memory."""
        thread = TorchThread(config.cluster.cpu_threads)
        self.stack.callback(thread.close)
        folder = open_folder(config)
        self.target = await self.stack.enter_async_context(
            embedded_engine(config, folder, thread, epoch=epoch, alone=alone, run_dir=run_dir, name=f"engine-{number}")
        )

    def block(self, memory: Any) -> None:
        """Keep a block for the load that follows."""
        self._sent = memory

    async def load(self, version: int, epoch: int, listing: Listing, configs: dict[str, dict[str, Any]]) -> None:
        """Load what lies in the block; ``configs`` are of adapters, by name."""
        tensors = await asyncio.to_thread(self._arrived, listing)
        update = WeightUpdate(version=version, epoch=epoch, transport="tensors")
        update.tensors = {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] not in configs}
        update.adapters = {
            adapter: AdapterUpdate(
                config=config,
                tensors={
                    name: tensor
                    for key, tensor in tensors.items()
                    for of, _, name in [key.partition("/")]
                    if of == adapter
                },
            )
            for adapter, config in configs.items()
        }
        await self.target.load(update)

    def _arrived(self, listing: Listing) -> Any:
        if self._blocks is None:
            sent, self._sent = self._sent, None
            return tensors_in(sent, listing)
        if self._block is None or self._block.number != listing["block"]:
            self._block = None
            _, (fd,), _, _ = socket.recv_fds(self._blocks, 1, 1)
            self._block = MappedBlock(fd, listing)
        return self._block.tensors(listing)


def _tensors(update: WeightUpdate) -> dict[str, Any]:
    """All that crosses; of adapters by ``ADAPTER/NAME``."""
    adapters = update.adapters.items()
    return {
        **update.tensors,
        **{f"{name}/{key}": one for name, adapter in adapters for key, one in adapter.tensors.items()},
    }


def _spare_gpus(config: Config) -> int:
    """GPUs of this machine that the trainer does not use."""
    import torch

    ranks = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    return max(0, torch.cuda.device_count() - ranks)


def _has_own_gpu(config: Config) -> bool:
    return config.cluster.device == "cuda" and _spare_gpus(config) >= max(1, engines_apart(config))


def _visible(config: Config, number: int) -> dict[str, str]:
    """On a machine with more GPUs than the trainer uses, an engine sees one of those alone."""
    if config.cluster.device != "cuda":
        return {}
    if not (more := _spare_gpus(config)):
        return {}
    place = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node + number % more
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": visible[place] if visible else str(place)}


if __name__ == "__main__":
    run(EngineService)
