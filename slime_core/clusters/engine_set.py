"""Several engines of the same weights as one `protocols.Engine`: a request goes to the one with the fewest tokens.

One of them can be reserved: it keeps its weights through updates, for whoever holds it alone, while the others go on.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from slime_core.engines.admission import score_options
from slime_core.errors import EngineError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.protocols import Ability, Engine, PauseMode
    from slime_core.types import Completion, GenerateRequest, Media, WeightCheck, WeightRoute, WeightUpdate

RESERVED = 1 << 60
"""Tokens that an engine counts as queued while it is reserved, so that no request is sent to it."""


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
            self._heap = [(load, engine) for engine, load in enumerate(self.now)]
            heapq.heapify(self._heap)


class EngineSet:
    """Implements `protocols.Engine` over engines that draw by a request's seed alone, so that any of them may answer.

    Example: EngineSet([engine_0, engine_1])
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = tuple(engines)
        self._loads = Loads(len(self._engines))
        self._where: dict[str, int] = {}
        self._reserved: set[int] = set()
        self._stale: set[int] = set()  # released without the newest weights, which the next update brings
        self._newest = -1  # version of the last update, loaded or under way
        self._paused: PauseMode | None = None

    @property
    def abilities(self) -> frozenset[Ability]:
        """What all of them can do."""
        return frozenset.intersection(*(engine.abilities for engine in self._engines))

    @property
    def version(self) -> int:
        """The oldest that one of them serves; reserved ones serve whoever reserved them."""
        return min(self._engines[number].version for number in self._serving())

    @property
    def epoch(self) -> int:
        """Of the process that made their weights."""
        return int(getattr(self._engines[0], "epoch", 0))

    def _serving(self) -> list[int]:
        apart = self._reserved | self._stale
        return [number for number in range(len(self._engines)) if number not in apart]

    @property
    def can_reserve(self) -> bool:
        """Whether :meth:`reserve` would find an engine."""
        return len(self._serving()) > 1 and self._paused is None

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[Engine]:
        """Reserve the least loaded engine: it gets no other requests, and takes no update.

        Requests that it has end on it. Afterwards it serves with the others, at once or from the next update on.

        Raises:
            EngineError: no engine would be left, or all are paused.
        """
        if not self.can_reserve:
            reason = "they are paused" if self._paused is not None else "no other would serve requests"
            raise EngineError(f"none of {len(self._engines)} engines can be reserved", why=reason)
        number = self._loads.least()
        self._reserved.add(number)
        self._loads.add(number, RESERVED)
        try:
            yield self._engines[number]
        finally:
            self._reserved.remove(number)
            self._stale.add(number)
            if self._engines[number].version == self._newest:
                await self._rejoin(number)

    async def _rejoin(self, number: int) -> None:
        if self._paused is not None:
            await self._engines[number].pause(self._paused)
        self._stale.remove(number)
        self._loads.add(number, -RESERVED)

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

    async def score(
        self, tokens: Sequence[int], start: int, media: Media | None = None, adapter: str = ""
    ) -> NDArray[Any]:
        """See `protocols.Engine`."""
        number = self._loads.least()
        self._loads.add(number, len(tokens))
        try:
            return await self._engines[number].score(tokens, start, **score_options(media, adapter))
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
        """See `protocols.Engine`; every one takes the update but the reserved ones."""
        self._newest, back = update.version, set(self._stale)
        await self._all("load", update, among=sorted({*self._serving(), *back}))
        for number in back:
            await self._rejoin(number)

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """See `protocols.Engine`: that of any, since all are alike."""
        return await self._engines[self._serving()[0]].route(check)

    async def fingerprints(self, adapters: Sequence[str] = ()) -> dict[str, str]:
        """See `protocols.Engine`.

        Raises:
            EngineError: ENG83 engines that hold different weights, with the tensors' names.
        """
        zero, *numbers = self._serving()
        first, *others = await self._all("fingerprints", *([adapters] if adapters else []))
        for number, other in zip(numbers, others, strict=True):
            if wrong := sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name)):
                raise EngineError(
                    f"engines {zero} and {number} hold different weights",
                    code="ENG83",
                    where=", ".join(wrong[:5]),
                    why=f"{len(wrong)} of {len(first)} tensors differ",
                )
        return dict(first)

    async def pause(self, mode: PauseMode) -> None:
        """See `protocols.Engine`."""
        self._paused = mode
        await self._all("pause", mode)

    async def resume(self) -> None:
        """See `protocols.Engine`."""
        self._paused = None
        await self._all("resume")

    async def release(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        await self._all("release", what)

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        await self._all("reacquire", what)

    async def _all(self, method: str, *args: Any, among: Sequence[int] = ()) -> list[Any]:
        """Every serving engine's answer, or those of ``among``; the first failure is told when all have answered."""
        calls = (getattr(self._engines[number], method)(*args) for number in among or self._serving())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers


def as_one(engines: Sequence[Engine]) -> Engine:
    """The engine of a run: the only one, or a set of them."""
    whole: Any = EngineSet(engines)
    return engines[0] if len(engines) == 1 else whole


def engine_reservation(engine: Any) -> Callable[[], AbstractAsyncContextManager[Engine]] | None:
    """See `protocols.RunComponents.reserve_engine`: for a set of engines, or servers as one, with one to spare."""
    return engine.reserve if getattr(engine, "can_reserve", False) else None
