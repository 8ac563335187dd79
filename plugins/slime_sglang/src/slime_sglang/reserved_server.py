"""Reserve a server: it keeps its weights through updates and serves only its holder's requests.

reserve -> the least loaded server gets no new requests; those it has finish there
release -> with the newest weights it serves again at once; else it waits for the next update
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime_core.engines.admission import check_adapter
from slime_core.errors import EngineError
from slime_core.protocols import Ability
from slime_core.types import GenerateRequest, SamplingParams
from slime_sglang.requests import Fault, Requests
from slime_sglang.router import Lane, Middleware, Router, chained

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from slime_core.types import Completion, Media

CHANGES: frozenset[Ability] = frozenset({"live_load", "release"})
"""Abilities that change a server, which the holder of a reservation does not have."""


class ReservedServer:
    """One server as an engine that generates and scores, of one version; see `protocols.Engine`.

    Example:
        async with engine.reserve() as server:
            done = await server.generate(request)  # whatever version the others have by now
    """

    def __init__(
        self,
        lane: Lane,
        *,
        tokenizer: Any,
        fault: Fault,
        attempts: int,
        abilities: frozenset[Ability],
        epoch: int,
        middleware: Sequence[Middleware] = (),
        adapters: Sequence[str] = (),
    ) -> None:
        self._adapters = adapters
        self.lane, self.version, self.epoch = lane, lane.version, epoch
        self.abilities = abilities - CHANGES
        self._router = Router()
        self._router.admit(lane)
        self._requests = Requests(
            self._router, tokenizer=tokenizer, fault=fault, high=lambda: self.version, attempts=attempts
        )
        self._chain = chained(middleware, self._requests.generate)
        self._scores = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `SglangEngine.generate`; a server that fails has no other in its place."""
        check_adapter(request.adapter, self._adapters, f"request {request.id}")
        return await self._chain(request)

    async def score(
        self, tokens: Sequence[int], start: int, media: Media | None = None, adapter: str = ""
    ) -> NDArray[Any]:
        """See `protocols.Engine`."""
        check_adapter(adapter, self._adapters, "score")
        self._scores += 1
        params = SamplingParams(max_new_tokens=1)
        scored = GenerateRequest(
            id=f"score-{self._scores}", tokens=list(tokens), params=params, seed=0, media=media, adapter=adapter
        )
        return await self._requests.score(tokens, start, scored)

    async def abort(self, ids: Collection[str]) -> list[Completion]:
        """See `protocols.Engine`."""
        return await self._requests.stop(set(ids))

    def lost(self, error: EngineError) -> None:
        """Fail the requests that it has, and every later one: the server will not answer."""
        self._router.lost(error)


class ReservedServers:
    """Reserved servers of a fleet, and released ones without the newest weights."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._reserved: dict[int, ReservedServer] = {}
        self._behind: dict[int, Lane] = {}
        self._promised: set[int] = set()  # of those behind, whom the update that is being made reaches

    @property
    def can_reserve(self) -> bool:
        """True if a server may be reserved: another serves, and this process chooses each request's server."""
        return self._router.shared is None and len(self._router.lanes) > 1

    def choose(self) -> Lane:
        """Choose the server to reserve; it gets no request from now on.

        Raises:
            EngineError: none may be reserved.
        """
        if not self.can_reserve:
            reason = "no other would serve requests"
            if self._router.shared is not None:
                reason = "SGLang's router spreads the requests, over all servers alike"
            raise EngineError(f"none of {len(self._router.lanes)} servers can be reserved", why=reason)
        lane = min(self._router.lanes, key=lambda lane: (lane.in_flight, -lane.number))
        self._router.withdraw(lane.number)
        return lane

    def add(self, server: ReservedServer) -> None:
        """Record a reservation."""
        self._reserved[server.lane.number] = server

    async def release(self, server: ReservedServer, newest: int) -> None:
        """End a reservation; a server that failed meanwhile comes back by itself."""
        lane = server.lane
        self._reserved.pop(lane.number, None)
        if lane.fenced is not None:
            return
        if lane.version == newest:
            await self._router.join(lane)
        else:
            self._behind[lane.number] = lane

    def promised(self) -> list[Lane]:
        """Servers that the next update has to reach beside those that serve; asked when its route is made."""
        self._promised = set(self._behind)
        return list(self._behind.values())

    def due(self, *, anyone: bool) -> list[Lane]:
        """Servers behind that an update reaches: those of its route, or all where it is for ``anyone``."""
        return [lane for number, lane in self._behind.items() if anyone or number in self._promised]

    async def caught_up(self, version: int) -> None:
        """Have servers serve again that have taken an update."""
        for number, lane in list(self._behind.items()):
            if lane.version == version and lane.fenced is None:
                del self._behind[number]
                await self._router.join(lane)

    def fence(self, number: int, error: EngineError) -> Lane | None:
        """A server failed; its lane where it is reserved or behind; its holder's requests fail."""
        server, lane = self._reserved.get(number), self._behind.pop(number, None)
        if server is not None:
            lane = server.lane
            server.lost(error)
        if lane is not None:
            lane.fenced = error
        return lane

    def lost(self, error: EngineError) -> None:
        """Nothing will answer any more."""
        for server in self._reserved.values():
            server.lost(error)
