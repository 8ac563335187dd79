"""Several engines of the same weights as one `protocols.Engine`: a request goes to the one with the fewest tokens."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.protocols import Ability, Engine, PauseMode
    from slime_core.transfer import Check as WeightCheck, WeightRoute
    from slime_core.types import Completion, GenerateRequest, WeightUpdate


class Loads:
    """Tokens that were asked for and have not come, an engine; the least is found in logarithmic time."""

    def __init__(self, count: int) -> None:
        self.now = [0] * count
        self._heap = [(0, number) for number in range(count)]  # entries that are no longer true are met and dropped

    def least(self) -> int:
        """The engine with the fewest, of equals the first."""
        while self.now[self._heap[0][1]] != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def add(self, number: int, cost: int) -> None:
        """Change one engine's."""
        self.now[number] += cost
        heapq.heappush(self._heap, (self.now[number], number))
        if len(self._heap) > 8 * len(self.now):
            self._heap = [(load, each) for each, load in enumerate(self.now)]
            heapq.heapify(self._heap)


class EngineSet:
    """Implements `protocols.Engine` over engines that draw by a request's seed alone, so that any of them may answer.

    Example: EngineSet([engine_0, engine_1])
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._loads = Loads(len(self._engines))
        self._where: dict[str, int] = {}

    @property
    def abilities(self) -> frozenset[Ability]:
        """What all of them can do."""
        return frozenset.intersection(*(engine.abilities for engine in self._engines))

    @property
    def version(self) -> int:
        """The oldest that one of them serves."""
        return min(engine.version for engine in self._engines)

    @property
    def epoch(self) -> int:
        """Of the process that made their weights."""
        return int(getattr(self._engines[0], "epoch", 0))

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`."""
        number, cost = self._loads.least(), len(request.tokens) + request.params.max_new_tokens
        self._loads.add(number, cost)
        self._where[request.id] = number
        try:
            return await self._engines[number].generate(request)
        finally:
            self._loads.add(number, -cost)
            del self._where[request.id]

    async def score(self, tokens: Sequence[int], start: int) -> NDArray[Any]:
        """See `protocols.Engine`."""
        number = self._loads.least()
        self._loads.add(number, len(tokens))
        try:
            return await self._engines[number].score(tokens, start)
        finally:
            self._loads.add(number, -len(tokens))

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """See `protocols.Engine`."""
        by_engine: dict[int, list[str]] = {}
        for name in ids:
            by_engine.setdefault(self._where.get(name, 0), []).append(name)
        ended = await asyncio.gather(*(self._engines[number].abort(names) for number, names in by_engine.items()))
        return [done for part in ended for done in part]

    async def load(self, update: WeightUpdate) -> None:
        """See `protocols.Engine`; every one takes the update."""
        await self._all("load", update)

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """See `protocols.Engine`: the first one's, since all are alike."""
        return await self._engines[0].route(check)

    async def fingerprints(self) -> dict[str, str]:
        """See `protocols.Engine`.

        Raises:
            EngineError: ENG83 engines that hold different weights, with the tensors' names.
        """
        first, *others = await self._all("fingerprints")
        for number, other in enumerate(others, 1):
            if wrong := sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name)):
                raise EngineError(
                    f"engines 0 and {number} hold different weights",
                    code="ENG83",
                    where=", ".join(wrong[:5]),
                    why=f"{len(wrong)} of {len(first)} tensors differ",
                )
        return dict(first)

    async def pause(self, mode: PauseMode) -> None:
        """See `protocols.Engine`."""
        await self._all("pause", mode)

    async def resume(self) -> None:
        """See `protocols.Engine`."""
        await self._all("resume")

    async def release(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        await self._all("release", what)

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        await self._all("reacquire", what)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Every engine's answer; the first failure is told when all have answered."""
        calls = (getattr(engine, method)(*args) for engine in self._engines)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers
