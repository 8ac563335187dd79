"""Who computes when engine and trainer share a device.

training:  pause requests -> engine gives KV and weights -> trainer takes its state -> step -> trainer drops
           gradients and optimizer, keeps parameters
syncing:   engine takes weights -> publish and load -> trainer drops parameters -> engine takes KV -> resume
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.protocols import Engine, Trainer


class FreeTurns:
    """Engine and trainer have a device each: nobody waits."""

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The engine goes on."""
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """The engine's ``load`` says what happens to requests in flight."""
        yield


class QuietTurns:
    """Memory suffices for both: the engine is only quiet from the first optimizer step to the load."""

    def __init__(self, engine: Engine) -> None:
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
    """Engine and trainer each give their memory to the other."""

    def __init__(self, engine: Engine, trainer: Trainer) -> None:
        self._engine, self._trainer = engine, trainer
        self._given = False

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """The trainer holds the device's memory inside."""
        await self._engine.pause("keep")
        await self._engine.release({"kv", "weights"})
        await self._trainer.reacquire({"parameters", "gradients", "optimizer"})
        self._given = True
        yield
        await self._trainer.release({"gradients", "optimizer"})

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Both hold the weights inside; afterwards the engine holds its KV cache and goes on."""
        if self._given:
            await self._engine.reacquire({"weights"})
        yield
        if self._given:
            await self._trainer.release({"parameters"})
            await self._engine.reacquire({"kv"})
        self._given = False
        await self._engine.resume()
