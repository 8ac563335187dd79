"""A watch over real processes, and the engine that it calls back."""

import asyncio
from dataclasses import dataclass, field

from slime_core.errors import EngineError
from slime_sglang.pulse import WatchLimits

LONG = 120.0  # seconds in which a busy machine starts a stand-in


QUICK = WatchLimits(interval=0.05, timeout=3600.0, start_timeout=LONG, max_restarts=3)


@dataclass
class Engine:
    """What the watch asks of an engine: told progress, it notes what it is told."""

    in_flight: int = 0
    came: int = 0
    fenced: list = field(default_factory=list)
    filled: list = field(default_factory=list)
    end: EngineError | None = None
    refuse: dict = field(default_factory=dict)  # number -> how many bring_ups fail
    gates: dict = field(default_factory=dict)  # number -> event that its bring_up waits for
    servers: dict = field(default_factory=dict)

    def progress(self, number):
        return [(self.in_flight, self.came)]

    def fence(self, number, error):
        self.fenced.append((number, error))

    async def bring_up(self, number):
        self.filled.append((number, self.servers[number].address))
        if number in self.gates:
            await self.gates[number].wait()
        if self.refuse.get(number, 0) > 0:
            self.refuse[number] -= 1
            raise EngineError("a tensor differs", code="ENG83")

    def lost(self, error):
        assert self.end is None
        self.end = error


async def until(true):
    while not true():
        await asyncio.sleep(0.01)
