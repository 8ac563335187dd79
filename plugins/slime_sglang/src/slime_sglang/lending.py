"""A server lent out: it keeps its weights through updates, and takes requests of whoever borrowed it alone.

lend -> the least loaded server is chosen no more; what it runs ends there
back -> with the newest weights it is chosen again at once; else the next update brings them, and it waits for that
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError
from slime_core.protocols import Ability
from slime_core.types import GenerateRequest, SamplingParams
from slime_sglang.requests import Fault, Requests
from slime_sglang.router import Lane, Middleware, Router, chained

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from slime_core.types import Completion

CHANGES: frozenset[Ability] = frozenset({"live_load", "release"})
"""Abilities of whoever may change a server, which a borrower may not."""


class LentServer:
    """One server as an engine that generates and scores, of one version; see `protocols.Engine`.

    Example:
        async with engine.reserve() as lent:
            done = await lent.generate(request)  # whatever version the others have by now
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
    ) -> None:
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
        return await self._chain(request)

    async def score(self, tokens: Sequence[int], start: int) -> NDArray[Any]:
        """See `protocols.Engine`."""
        self._scores += 1
        params = SamplingParams(max_new_tokens=1)
        stands_for = GenerateRequest(id=f"score-{self._scores}", tokens=list(tokens), params=params, seed=0)
        return await self._requests.score(tokens, start, stands_for)

    async def abort(self, ids: Collection[str]) -> list[Completion]:
        """See `protocols.Engine`."""
        return await self._requests.stop(set(ids))

    def lost(self, error: EngineError) -> None:
        """The server will not answer: fail what it has, and whoever asks from now on."""
        self._router.lost(error)


class Lending:
    """What a fleet has lent, and what came back without the newest weights."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lent: dict[int, LentServer] = {}
        self._behind: dict[int, Lane] = {}
        self._promised: set[int] = set()  # of those behind, whom the update that is being made reaches

    @property
    def lends(self) -> bool:
        """Whether a server may be lent: another serves, and it is this process that chooses each request's server."""
        return self._router.shared is None and len(self._router.lanes) > 1

    def choose(self) -> Lane:
        """The server to lend, which takes no request from now on.

        Raises:
            EngineError: none may be lent.
        """
        if not self.lends:
            reason = "no other would serve requests"
            if self._router.shared is not None:
                reason = "SGLang's router spreads the requests, over all servers alike"
            raise EngineError(f"none of {len(self._router.lanes)} servers can be lent", why=reason)
        lane = min(self._router.lanes, key=lambda lane: (lane.in_flight, -lane.number))
        self._router.withdraw(lane.number)
        return lane

    def add(self, loan: LentServer) -> None:
        """It is lent from now on."""
        self._lent[loan.lane.number] = loan

    async def back(self, loan: LentServer, newest: int) -> None:
        """A borrower is done; a server that failed meanwhile comes back by itself."""
        lane = loan.lane
        self._lent.pop(lane.number, None)
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

    def due(self, *, folder: bool) -> list[Lane]:
        """Servers behind that an update reaches: those of its route, or all where a ``folder`` brings it."""
        return [lane for number, lane in self._behind.items() if folder or number in self._promised]

    async def caught_up(self, version: int) -> None:
        """Have servers serve again that have taken an update."""
        for number, lane in list(self._behind.items()):
            if lane.version == version and lane.fenced is None:
                del self._behind[number]
                await self._router.join(lane)

    def fence(self, number: int, error: EngineError) -> Lane | None:
        """A server failed; its lane where it is lent or behind, and what its borrower waits for fails."""
        loan, lane = self._lent.get(number), self._behind.pop(number, None)
        if loan is not None:
            lane = loan.lane
            loan.lost(error)
        if lane is not None:
            lane.fenced = error
        return lane

    def lost(self, error: EngineError) -> None:
        """Nothing will answer any more."""
        for loan in self._lent.values():
            loan.lost(error)
