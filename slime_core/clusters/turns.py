"""Who computes when engine and trainer share a device.

training:  pause requests -> engine gives KV and weights -> trainer takes its state -> step -> trainer drops
           gradients and optimizer, keeps parameters
syncing:   engine takes weights -> publish and load -> trainer drops parameters -> engine takes KV -> resume

``metrics`` of each kind holds what the last turn cost: seconds of every stage, and bytes that changed hands.
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
    from slime_core.protocols import Engine, Trainer, Turns
    from slime_core.types import WeightRoute, WeightUpdate

STATE = frozenset({"gradients", "optimizer", "parameters"})  # what a trainer can give back


class FreeTurns:
    """Engine and trainer have a device each: nobody waits."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The engine goes on."""
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """The engine's ``load`` says what happens to requests in flight."""
        yield


class QuietTurns(FreeTurns):
    """Memory suffices for both: the engine is only quiet from the first optimizer step to the load."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The engine computes nothing inside, nor after, until :meth:`syncing` ends."""
        await self._engine.pause("keep")
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """New weights are loaded inside; afterwards the engine goes on."""
        yield
        await self._engine.resume()


class SwappingTurns:
    """Engine and trainer each give their memory to the other.

    Requests in flight are retracted, not kept: what they keep would be the cache that the engine gives away. The
    engine's weights are lost when it gives them, so every turn ends in a whole update. ``released``: the engine has
    given its memory already, before the trainer was made. With ``engine_gives`` or ``trainer_gives`` False that
    side keeps all of its memory. ``free`` answers the free bytes of the device.

    ``metrics``: ``swap/STAGE_seconds`` and, with ``free``, ``swap/STAGE_bytes`` of the stages pause, engine_release,
    trainer_reacquire, trainer_drop, engine_weights, load, trainer_release, engine_kv, resume; and their sums
    ``swap/total_seconds`` (without load) and ``swap/total_bytes``.

    Example:
        await engine.pause("retract")
        await engine.release({"kv", "weights"})
        turns = SwappingTurns(engine, make_trainer(), released=True, free=lambda: torch.cuda.mem_get_info()[0])
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        *,
        released: bool = False,
        engine_gives: bool = True,
        trainer_gives: bool = True,
        free: Callable[[], int] | None = None,
    ) -> None:
        self._engine, self._trainer, self._free = engine, trainer, free
        self._given, self._quiet = released, False
        self._engine_gives, self._trainer_gives = engine_gives, trainer_gives
        self._turn: dict[str, float] = {}
        self.metrics: dict[str, float] = {}

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer holds the device's memory inside; afterwards it holds its parameters alone."""
        await self._pause()
        if self._engine_gives and not self._given:
            with self._stage("engine_release"):
                await self._engine.release({"kv", "weights"})
            self._given = True
        await self._take(STATE)
        yield
        await self._drop()

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Both hold the weights inside; afterwards the engine holds its KV cache and goes on.

        Before the first step the trainer has all of its state, and ends with none of it on the device. A later stage
        begins while the engine serves: it lends its KV cache, and keeps the weights that are written over.
        """
        if self._given:
            await self._drop()
            with self._stage("engine_weights"):
                await self._engine.reacquire({"weights"})
        elif not self._quiet:
            await self._pause()
            if self._engine_gives:
                with self._stage("engine_release"):
                    await self._engine.release({"kv"})
            await self._take({"parameters"})
        with self._stage("load"):
            yield
        if self._trainer_gives:
            with self._stage("trainer_release"):
                await self._trainer.release(set(STATE))
        if self._engine_gives:
            with self._stage("engine_kv"):
                await self._engine.reacquire({"kv"})
        self._given = self._quiet = False
        with self._stage("resume"):
            await self._engine.resume()
        self._tell()

    async def _pause(self) -> None:
        with self._stage("pause"):
            await self._engine.pause("retract" if self._engine_gives else "keep")
        self._quiet = True

    async def _take(self, what: Iterable[str]) -> None:
        if self._trainer_gives:
            with self._stage("trainer_reacquire"):
                await self._trainer.reacquire(set(what))

    async def _drop(self) -> None:
        if self._trainer_gives:
            with self._stage("trainer_drop"):
                await self._trainer.release({"gradients", "optimizer"})

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Count the block's seconds, and what it changed of the device's free memory."""
        free, start = self._free, time.monotonic()
        before = free() if free is not None else 0
        try:
            yield
        finally:
            self._add(f"swap/{name}_seconds", time.monotonic() - start)
            if free is not None and name != "load":
                self._add(f"swap/{name}_bytes", abs(free() - before))

    def _add(self, name: str, value: float) -> None:
        self._turn[name] = self._turn.get(name, 0.0) + value

    def _tell(self) -> None:
        """One turn is over: its figures are the metrics until the next one is."""
        times, self._turn = self._turn, {}
        times["swap/total_seconds"] = sum(v for n, v in times.items() if n.endswith("_seconds") and "/load_" not in n)
        if self._free is not None:
            times["swap/total_bytes"] = sum(value for name, value in times.items() if name.endswith("_bytes"))
        self.metrics = times


class Resync:
    """Turns that know when the trainer is idle; a server that was restarted between two updates asks ``source``.

    The trainer holds the version that is served from the end of one update to the next training step. So it publishes
    again in between, and a server that asks while it trains waits until the next update is through.

    Example:
        turns = Resync(FreeTurns(), trainer, engine)
        served.resync(turns.source)
    """

    def __init__(self, turns: Turns, trainer: Trainer, engine: Engine) -> None:
        self._turns, self._trainer, self._engine = turns, trainer, engine
        self._idle = asyncio.Lock()
        self._busy = False  # a turn holds the lock

    @property
    def metrics(self) -> dict[str, float]:
        """See `protocols.Turns`."""
        return self._turns.metrics

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer's weights are between two versions from here to the end of :meth:`syncing`."""
        await self._begin()
        async with self._turns.training():
            yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Afterwards the trainer's weights are those that are served."""
        await self._begin()
        async with self._turns.syncing():
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
            await self._trainer.reacquire({"parameters"})  # until its next turn they stay where they are needed
            return await self._trainer.publish(self._engine.version, route)


def gives_memory(config: Config, engine: Engine) -> bool:
    """Whether servers and trainer share GPUs, and servers give their memory to it."""
    cluster = config.cluster
    shared = cluster.device == "cuda" and cluster.colocate
    return shared and cluster.offload_rollout and "release" in engine.abilities


def server_turns(config: Config, engine: Engine, trainer: Trainer) -> Turns:
    """Turns of servers in processes of their own; those that give memory have given it before the trainer was made.

    Where they share processors or GPUs and nothing runs ahead, they are quiet while the trainer trains.
    """
    cluster = config.cluster
    gives = gives_memory(config, engine)
    trainer_gives = cluster.offload_train and cluster.device == "cuda" and cluster.colocate
    if gives or (trainer_gives and not cluster.offload_rollout):
        free: Callable[[], int] | None = None
        if not cluster_of(config).remote:  # there the GPUs are those of other processes, or machines
            from torch.cuda import mem_get_info

            free = lambda: int(mem_get_info()[0])  # noqa: E731
        return SwappingTurns(
            engine, trainer, released=gives, engine_gives=gives, trainer_gives=trainer_gives, free=free
        )
    ahead = any(stage.rollout.max_staleness for stage in stages(config))
    return QuietTurns(engine) if cluster.colocate and not ahead else FreeTurns()
