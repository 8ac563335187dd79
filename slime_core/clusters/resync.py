"""Weights once more, for a server that was restarted between two updates.

The trainer holds the version that is served from the end of one update to the next training step. So it publishes
again in between, and a server that asks while it trains waits until the next update is through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.protocols import Engine, Trainer, Turns
    from slime_core.transfer import WeightRoute
    from slime_core.types import WeightUpdate


class Resync:
    """Turns that know when the trainer is idle; ``source`` is what a restarted server asks.

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
