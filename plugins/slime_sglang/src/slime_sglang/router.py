"""Which server a request goes to where SGLang's router does not choose: the least loaded.

    request -> middleware ... -> Router.pick (waits for room) -> Place: a server's client and a data-parallel rank

A session, or a sample of several turns, stays on its server unless that one is much fuller. Fenced servers are never
picked; while all are full, paused or fenced, requests wait in order.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from slime_core.errors import EngineError
    from slime_sglang.client import Client

REMEMBERED = 1 << 16  # sessions whose last server is known
SESSION_SLACK = 8  # requests that the server of a session may have more than twice what the least loaded has

Next = Callable[[GenerateRequest], Awaitable[Completion]]
Middleware = Callable[[GenerateRequest, Next], Awaitable[Completion]]
"""Stands around every request: calls ``next`` (once, never, or again) and answers a Completion of that request."""

LaneKey = tuple[int, int]
"""A server's number and generation: a server that was restarted is another one."""


@dataclass(slots=True, eq=False)
class Lane:
    """One generation of a server, as the router sees it.

    Example: Lane(client=client, number=0, room=512, ranks=2)
    """

    client: Client
    number: int
    room: int  # requests in flight, at most
    generation: int = 1
    ranks: int = 1  # data-parallel
    version: int = -1  # of the weights that it serves
    base: bool = False  # it has the trainer's base of the adapters
    in_flight: int = 0
    by_rank: list[int] = field(default_factory=list)
    came: list[int] = field(default_factory=list)  # by rank: rises with every token and reply
    fenced: EngineError | None = None  # why it is chosen no more
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)  # what the server says of itself
    released: set[str] = field(default_factory=set)  # memory that it has given back

    def __post_init__(self) -> None:
        self.by_rank, self.came = [0] * self.ranks, [0] * self.ranks

    def fact(self, name: str, default: Any = None) -> Any:
        """One of its settings."""
        return self.facts.get(name, default)

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks of a copy of the model."""
        return int(self.fact("tp_size", 1) or 1)

    @property
    def world(self) -> int:
        """Processes that hold weights."""
        inside = bool(self.fact("enable_dp_attention"))
        return self.tp * int(self.fact("pp_size", 1) or 1) * (1 if inside else self.ranks)

    @property
    def key(self) -> LaneKey:
        """See `LaneKey`."""
        return self.number, self.generation

    @property
    def full(self) -> bool:
        """Whether one more request would be one too many."""
        return self.in_flight >= self.room

    def rank(self, wish: int | None) -> int:
        """The least loaded data-parallel rank; ``wish`` where it is as good up to one request."""
        least = min(self.by_rank)
        return wish if wish is not None and self.by_rank[wish] <= least + 1 else self.by_rank.index(least)


@dataclass(slots=True, frozen=True)
class Place:
    """Where one request is served. ``rank`` is None where the server has one data-parallel rank."""

    lane: Lane
    rank: int | None


@dataclass(slots=True, eq=False)
class _Waiter:
    request: GenerateRequest
    avoid: Collection[LaneKey]
    place: asyncio.Future[Place]


class Router:
    """Spreads requests over lanes.

    Example:
        router = Router()
        router.admit(Lane(client=client, number=0, room=512))
        place = await router.pick(request)
        try:
            done = await place.lane.client.generate(request, dp_rank=place.rank, low=1, high=lambda: 1)
        finally:
            router.leave(place)
    """

    def __init__(self) -> None:
        self._lanes: dict[int, Lane] = {}
        self._is_paused = False
        self._lost: EngineError | None = None
        self._waiters: deque[_Waiter] = deque()
        self._last: OrderedDict[str, tuple[LaneKey, int | None]] = OrderedDict()  # session -> server and rank

    @property
    def lanes(self) -> Sequence[Lane]:
        """Those that requests may go to, by number."""
        return [self._lanes[number] for number in sorted(self._lanes)]

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return len(self._waiters)

    def admit(self, lane: Lane) -> None:
        """Choose this lane from now on, instead of an older generation of the same server."""
        self._lanes[lane.number] = lane
        self._serve_waiters()

    async def join(self, lane: Lane) -> None:
        """:meth:`admit`, once whoever else chooses servers knows this one."""
        self.admit(lane)

    def withdraw(self, number: int) -> None:
        """Choose this server no more, until it is admitted again; what it runs ends there."""
        del self._lanes[number]

    def fence(self, number: int, error: EngineError, *, dying: bool = True) -> Lane | None:
        """Choose this server no more, until it is admitted again; the answer is its lane where it had one.

        ``dying`` says that its processes end, so that requests there fail without being asked to.
        """
        lane = self._lanes.pop(number, None)
        if lane is not None:
            lane.fenced = error
        return lane

    def culprit(self, lane: Lane, error: EngineError) -> Lane | None:
        """The server whose fault an error is that came by ``lane``; None where that is nobody's, or not known."""
        return lane

    @property
    def shared(self) -> int | None:
        """Requests in flight on all servers, where it is not known which one has which; else None."""
        return None

    async def close(self) -> None:
        """Close what is no server's."""

    def hold(self) -> None:
        """Give no places until :meth:`go`."""
        self._is_paused = True

    def go(self) -> None:
        """Give places again."""
        self._is_paused = False
        self._serve_waiters()

    def lost(self, error: EngineError) -> None:
        """No server will come back: fail whoever waits, and whoever asks from now on."""
        self._lost = error
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.place.done():
                waiter.place.set_exception(error)

    def take(self, request: GenerateRequest, avoid: Collection[LaneKey] = ()) -> Place | None:
        """As :meth:`pick`, where nobody has to wait; None where somebody must."""
        if self._lost is not None:
            raise self._lost
        return None if self._waiters else self._place(request, avoid)

    async def pick(self, request: GenerateRequest, avoid: Collection[LaneKey] = ()) -> Place:
        """A place for this request, not on ``avoid`` while another server is open; give it back with :meth:`leave`.

        Raises:
            EngineError: what :meth:`lost` was told.
        """
        place = self.take(request, avoid)
        while place is None or not self._open(place):
            if place is not None:  # the router was held, or the lane fenced, between the choice and this moment
                self.leave(place)
            place = await self._wait(_Waiter(request, avoid, asyncio.get_running_loop().create_future()))
        return place

    async def _wait(self, waiter: _Waiter) -> Place:
        self._waiters.append(waiter)
        self._serve_waiters()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self.leave(waiter.place.result())
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def _open(self, place: Place) -> bool:
        return not self._is_paused and self._lanes.get(place.lane.number) is place.lane

    def leave(self, place: Place) -> None:
        """The request of this place has ended, one way or another."""
        lane = place.lane
        lane.in_flight -= 1
        if place.rank is not None:
            lane.by_rank[place.rank] -= 1
        self._serve_waiters()

    def _serve_waiters(self) -> None:
        """Give places to those who wait, in their order, while there are any."""
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.place.done():  # its caller was cancelled
                self._waiters.popleft()
                continue
            place = self._place(waiter.request, waiter.avoid)
            if place is None:
                return
            self._waiters.popleft()
            waiter.place.set_result(place)

    def _place(self, request: GenerateRequest, avoid: Collection[LaneKey]) -> Place | None:
        if self._is_paused:
            return None
        lanes = [lane for lane in self._lanes.values() if lane.key not in avoid] or list(self._lanes.values())
        lanes = [lane for lane in lanes if not lane.full]
        if not lanes:
            return None
        session = request.session_id or request.id
        lane = min(lanes, key=lambda lane: (lane.in_flight, lane.number))
        last, wish = self._last.pop(session, (None, None))
        before = next((one for one in lanes if one.key == last), None)
        if before is not None and before.in_flight <= 2 * lane.in_flight + SESSION_SLACK:
            lane = before
        rank = lane.rank(wish if lane is before else None) if lane.ranks > 1 else None
        lane.in_flight += 1
        if rank is not None:
            lane.by_rank[rank] += 1
        self._last[session] = lane.key, rank
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return Place(lane, rank)


def chained(middleware: Sequence[Middleware], last: Next) -> Next:
    """``last`` behind all of ``middleware``, the first of them outermost.

    Example:
        async def traced(request, next):
            start = time.monotonic()
            done = await next(request)
            print(request.id, len(done.tokens), time.monotonic() - start)
            return done

        generate = chained([traced], engine_generate)
    """
    chain = last
    for layer in reversed(middleware):
        chain = _around(layer, chain)
    return chain


def _around(layer: Middleware, inner: Next) -> Next:
    async def outer(request: GenerateRequest) -> Completion:
        return await layer(request, inner)

    return outer
