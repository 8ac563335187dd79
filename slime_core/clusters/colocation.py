"""Share devices between engine and trainer: apart, in turns, or with memory swapped.

training:  pause requests -> engine offloads KV and weights -> trainer onloads its state -> step -> trainer offloads
           gradients and optimizer, keeps parameters
syncing:   engine onloads weights -> publish and load -> trainer offloads parameters -> engine onloads KV -> resume

``metrics`` of each kind holds the cost of the last swap: seconds of every stage, and bytes moved.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from slime_core.config.load import stages
from slime_core.plugins.backends import cluster_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import DeviceSharing, Engine, Trainer
    from slime_core.types import WeightRoute, WeightUpdate

STATE = frozenset({"gradients", "optimizer", "parameters"})  # what a trainer can offload


class DedicatedDevices:
    """Engine and trainer have devices of their own: neither waits."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The engine keeps generating."""
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """The engine's ``load`` decides what happens to requests in flight."""
        yield


class TimeSharing(DedicatedDevices):
    """Engine and trainer both fit in memory: the engine is paused from the first optimizer step to the load."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The engine is paused inside, and after, until :meth:`syncing` ends."""
        await self._engine.pause("keep")
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """New weights are loaded inside; afterwards the engine resumes."""
        yield
        await self._engine.resume()


class MemorySwapping:
    """Engine and trainer each offload their memory for the other.

    Requests in flight are retracted, because they would keep the cache that is released. The engine's weights are
    lost when it releases them, so every swap ends in a whole update. ``released``: the engine has released its memory
    already, before the trainer began. With ``swap_engine`` or ``swap_trainer`` False that side keeps all of its
    memory. ``free`` returns the free bytes of the device.

    ``metrics``: ``swap/STAGE_seconds`` and, with ``free``, ``swap/STAGE_bytes`` of the stages pause, engine_release,
    trainer_reacquire, trainer_drop, engine_weights, load, trainer_release, engine_kv, resume; and their sums
    ``swap/total_seconds`` (without load) and ``swap/total_bytes``.

    Example:
        await engine.pause("retract")
        await engine.release({"kv", "weights"})
        devices = MemorySwapping(engine, make_trainer(), released=True, free=lambda: torch.cuda.mem_get_info()[0])
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        *,
        released: bool = False,
        swap_engine: bool = True,
        swap_trainer: bool = True,
        free: Callable[[], int] | None = None,
    ) -> None:
        self._engine, self._trainer, self._free = engine, trainer, free
        self._engine_offloaded, self._paused = released, False
        self._swap_engine, self._swap_trainer = swap_engine, swap_trainer
        self._costs: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer has the device's memory inside; afterwards only its parameters stay there."""
        await self._pause()
        if self._swap_engine and not self._engine_offloaded:
            with self._stage("engine_release"):
                await self._engine.release({"kv", "weights"})
            self._engine_offloaded = True
        await self._onload_trainer(STATE)
        yield
        await self._offload_optimizer()

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Both hold the weights inside; afterwards the engine has its KV cache and resumes.

        Before the first step the trainer has all of its state on the device, and none of it after. A later stage
        begins while the engine serves: its KV cache is released, its weights stay and are overwritten.
        """
        if self._engine_offloaded:
            await self._offload_optimizer()
            with self._stage("engine_weights"):
                await self._engine.reacquire({"weights"})
        elif not self._paused:
            await self._pause()
            if self._swap_engine:
                with self._stage("engine_release"):
                    await self._engine.release({"kv"})
            await self._onload_trainer({"parameters"})
        with self._stage("load"):
            yield
        if self._swap_trainer:
            with self._stage("trainer_release"):
                await self._trainer.release(set(STATE))
        if self._swap_engine:
            with self._stage("engine_kv"):
                await self._engine.reacquire({"kv"})
        self._engine_offloaded = self._paused = False
        with self._stage("resume"):
            await self._engine.resume()
        self._publish_metrics()

    async def _pause(self) -> None:
        with self._stage("pause"):
            await self._engine.pause("retract" if self._swap_engine else "keep")
        self._paused = True

    async def _onload_trainer(self, what: Iterable[str]) -> None:
        if self._swap_trainer:
            with self._stage("trainer_reacquire"):
                await self._trainer.reacquire(set(what))

    async def _offload_optimizer(self) -> None:
        if self._swap_trainer:
            with self._stage("trainer_drop"):
                await self._trainer.release({"gradients", "optimizer"})

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Add the block's seconds and its change of the device's free memory to the metrics."""
        free, start = self._free, time.monotonic()
        before = free() if free is not None else 0
        try:
            yield
        finally:
            self._add(f"swap/{name}_seconds", time.monotonic() - start)
            if free is not None and name != "load":
                self._add(f"swap/{name}_bytes", abs(free() - before))

    def _add(self, name: str, value: float) -> None:
        self._costs[name] = self._costs.get(name, 0.0) + value

    def _publish_metrics(self) -> None:
        """End a swap: its figures are the metrics until the next one ends."""
        times, self._costs = self._costs, {}
        times["swap/total_seconds"] = sum(v for n, v in times.items() if n.endswith("_seconds") and "/load_" not in n)
        if self._free is not None:
            times["swap/total_bytes"] = sum(value for name, value in times.items() if name.endswith("_bytes"))
        self.metrics = times


class Resync:
    """Device sharing that re-sends the served weights to a server that restarted between two updates: ``source``.

    The trainer holds the served version from the end of one update to the next training step, and publishes it again
    in between. A server that asks while the trainer trains waits until the next update is done.

    Example:
        devices = Resync(DedicatedDevices(), trainer, engine)
        served.resync(devices.source)
    """

    def __init__(self, devices: DeviceSharing, trainer: Trainer, engine: Engine) -> None:
        self._devices, self._trainer, self._engine = devices, trainer, engine
        self._idle = asyncio.Lock()
        self._busy = False  # between `training` and the end of `syncing`: the lock is held

    @property
    def metrics(self) -> dict[str, float]:
        """See `protocols.DeviceSharing`."""
        return self._devices.metrics

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer's weights are between two versions from here to the end of :meth:`syncing`."""
        await self._begin()
        async with self._devices.training():
            yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Afterwards the trainer's weights are those that are served."""
        await self._begin()
        async with self._devices.syncing():
            yield
        self._busy = False
        self._idle.release()

    async def _begin(self) -> None:
        if not self._busy:
            await self._idle.acquire()
            self._busy = True

    async def source(self, route: WeightRoute) -> WeightUpdate:
        """The version that the engine serves, by ``route``; waits until the trainer holds it."""
        async with self._idle:
            await self._trainer.reacquire({"parameters"})  # they stay there until the next training step
            return await self._trainer.publish(self._engine.version, route)


def offloads_engine(config: Config, engine: Engine) -> bool:
    """True if servers and trainer share GPUs and servers release their memory for training."""
    cluster = config.cluster
    shared = cluster.device == "cuda" and cluster.colocate
    return shared and cluster.offload_rollout and "release" in engine.abilities


def device_sharing(config: Config, engine: Engine, trainer: Trainer) -> DeviceSharing:
    """Return the device sharing of servers in processes of their own, which released memory before the trainer began.

    Where they share processors or GPUs and nothing runs ahead, servers are paused while the trainer trains.
    """
    cluster = config.cluster
    swap_engine = offloads_engine(config, engine)
    swap_trainer = cluster.offload_train and cluster.device == "cuda" and cluster.colocate
    if swap_engine or (swap_trainer and not cluster.offload_rollout):
        free: Callable[[], int] | None = None
        if not cluster_of(config).remote:  # there GPUs belong to other processes or machines
            from torch.cuda import mem_get_info

            free = lambda: int(mem_get_info()[0])  # noqa: E731
        return MemorySwapping(
            engine, trainer, released=swap_engine, swap_engine=swap_engine, swap_trainer=swap_trainer, free=free
        )
    ahead = any(stage.rollout.max_staleness for stage in stages(config))
    return TimeSharing(engine) if cluster.colocate and not ahead else DedicatedDevices()
