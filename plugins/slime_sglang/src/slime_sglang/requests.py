"""Requests under way: each goes to a server, perhaps to several one after another, and comes back as one Completion.

    generate -> Router.pick -> Client.generate -> piece --stop or length--> all pieces as one Completion
                     ^----------------------------- "  --its server failed, or it was called back--'

What a request has generated stays when its server fails, is fenced, or takes weights: the rest is asked for anew with
the tokens that are there, so every token keeps the version that made it. A failed server is told once to whoever
watches it, and is not chosen again for the same request while another is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.errors import EngineError
from slime_core.protocols import RequestTurn
from slime_sglang.client import ServerFault
from slime_sglang.router import Lane, LaneKey, Place, Router

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import Completion, GenerateRequest

BUSY = "ENG74"  # the server has too much to do: no fault of its own
LATE = "ENG76"  # the request's time is over, on whichever server
AGAIN = 0.05, 1.0  # seconds until an abort is asked for again: it may have met the server before its request did

Fault = Callable[[Lane, EngineError], Awaitable[None]]
"""Told of a server that failed a request; when this returns the server is fenced, or has shown that it lives."""


@dataclass(slots=True, eq=False)
class RequestJob:
    """One request under way."""

    turn: RequestTurn
    stopped: bool = False  # its caller wants what it has
    place: Place | None = None  # while a server has it
    waiting: asyncio.Task[Place] | None = None  # while none has it
    called_back: bool = False  # its present piece was ended by us
    unassigned: asyncio.Event = field(default_factory=asyncio.Event)  # no server has it
    failed: list[LaneKey] = field(default_factory=list)
    done: Completion | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> str:
        """The request's."""
        return self.turn.request.id


class Requests:
    """See the module. ``high`` is the newest version that any server may have.

    A request is given up when ``attempts`` servers have failed it, one after another.

    Example:
        requests = Requests(router, tokenizer=tokenizer, fault=watch_told, high=lambda: engine.newest, attempts=4)
        done = await requests.generate(request)
    """

    def __init__(
        self, router: Router, *, tokenizer: Any, fault: Fault, high: Callable[[], int], attempts: int = 4
    ) -> None:
        self._router, self._tokenizer, self._fault, self._high = router, tokenizer, fault, high
        self._attempts = attempts
        self._jobs: set[RequestJob] = set()
        self._scores: set[asyncio.Future[Any]] = set()
        self.requeued = 0  # times that a request went to another server because its own failed

    @property
    def served(self) -> int:
        """Requests that a server has."""
        return sum(job.place is not None for job in self._jobs)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`.

        Raises:
            EngineError: the request is at fault, or as many servers failed it as it may try, or none is left.
        """
        job = RequestJob(RequestTurn(request=request))
        self._jobs.add(job)
        try:
            while not job.turn.finish:
                await self._piece(job)
            job.done = job.turn.completion(self._tokenizer)
            return job.done
        finally:
            self._jobs.discard(job)
            job.ended.set()

    async def score(self, tokens: Sequence[int], start: int, request: GenerateRequest) -> NDArray[Any]:
        """Log-probs of ``tokens[start:]`` from any server; ``request`` stands for it at the router."""
        failed: list[LaneKey] = []
        while True:
            place = await self._router.pick(request, failed)
            ask = place.lane.client.score(
                tokens, start, request.media, adapter=request.adapter, version=place.lane.version
            )
            work = asyncio.ensure_future(ask)
            self._scores.add(work)
            try:
                scores = await work
                _came(place, 1)
                return scores
            except EngineError as error:
                fenced, caught = place.lane.fenced, error
                if fenced is None and not isinstance(error, ServerFault):
                    raise
            finally:
                self._scores.discard(work)
                self._router.leave(place)
            await self._failed(place.lane, ServerFault(**(fenced or caught).as_dict()), failed, request.id)

    async def stop(self, ids: Collection[str] | None = None) -> list[Completion]:
        """End these requests (None: all) with what they have; the completions of those that were ended by it."""
        jobs = [job for job in self._jobs if ids is None or job.id in ids]
        for job in jobs:
            job.stopped = True
            if job.waiting is not None:
                job.waiting.cancel()
        await self._call_back(jobs)
        await asyncio.gather(*(job.ended.wait() for job in jobs))
        return [job.done for job in jobs if job.done is not None and job.done.finish == "abort"]

    async def recall(self) -> None:
        """Take every request back from the servers, with what it has; each goes on when the router gives places.

        The router must be held. Scores that are under way are waited for.
        """
        await self._call_back(self._jobs)
        if self._scores:
            await asyncio.wait(self._scores)

    async def _call_back(self, jobs: Iterable[RequestJob]) -> None:
        """Ask servers to end these requests until none of them is on a server."""
        delay, longest = AGAIN
        places = {job: job.place for job in jobs}  # of now: whoever moves on is not followed
        while running := [job for job, place in places.items() if place is not None and job.place is place]:
            by_lane: dict[Lane, list[str]] = {}
            for job in running:
                assert job.place is not None
                job.called_back = True
                by_lane.setdefault(job.place.lane, []).append(job.id)
            await asyncio.gather(*(self._abort(lane, ids) for lane, ids in by_lane.items()))
            waits = [asyncio.ensure_future(job.unassigned.wait()) for job in running]
            _, late = await asyncio.wait(waits, timeout=delay)
            for task in late:
                task.cancel()
            delay = min(2 * delay, longest)

    async def _abort(self, lane: Lane, ids: Sequence[str]) -> None:
        try:
            await lane.client.abort(ids)
        except ServerFault as error:
            await self._fault(lane, error)

    async def _piece(self, job: RequestJob) -> None:
        """One server's part of a request."""
        request = job.turn.continuation()
        if job.stopped:
            job.turn.finish = "abort"
        elif request.params.max_new_tokens < 1 and job.turn.pieces:
            job.turn.finish = "length"
        if job.turn.finish:
            return
        place = await self._placed(job, request)
        if place is None:
            return
        lane = place.lane
        job.place, job.called_back = place, False
        job.unassigned.clear()
        error: EngineError | None = None
        try:
            piece = await lane.client.generate(request, dp_rank=place.rank, low=lane.version, high=self._high)
            _came(place, 1 + len(piece.tokens))
        except EngineError as caught:
            error = caught
        finally:
            job.place = None
            job.unassigned.set()
            self._router.leave(place)
        if error is None:
            self._note(job, piece, request, lane)
        elif isinstance(error, ServerFault):
            await self._failed(lane, error, job.failed, f"request {job.id}")
        elif lane.fenced is not None:  # its client was closed under the request
            await self._failed(lane, ServerFault(**lane.fenced.as_dict()), job.failed, f"request {job.id}")
        elif job.turn.pieces and error.ends_dialogue:
            job.turn.finish = "length"
        else:
            raise error

    async def _placed(self, job: RequestJob, request: GenerateRequest) -> Place | None:
        """A place, or None where the request was stopped while it waited for one."""
        if (place := self._router.take(request, job.failed)) is not None:
            return place
        job.waiting = asyncio.ensure_future(self._router.pick(request, job.failed))
        try:
            return await job.waiting
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not job.stopped or (current is not None and current.cancelling()):
                raise
            return None
        finally:
            job.waiting = None

    def _note(self, job: RequestJob, piece: Completion, request: GenerateRequest, lane: Lane) -> None:
        """Keep a piece; one that ended without its caller's wish is no end of the request."""
        turn = job.turn
        turn.add(piece, request.params.max_new_tokens)
        if turn.finish != "abort" or job.stopped:
            return
        turn.finish = "length" if len(turn.tokens) >= turn.request.params.max_new_tokens else ""
        if not job.called_back and not turn.finish:
            error = ServerFault(
                f"the server ended request {job.id} after {len(piece.tokens)} tokens, unasked",
                code="ENG81",
                where=lane.client.address.url,
                why="its finish reason is abort, but slime did not abort it",
            )
            self._bounded(error, job.failed, f"request {job.id}", lane)

    async def _failed(self, lane: Lane, error: ServerFault, failed: list[LaneKey], what: str) -> None:
        """Say that a server failed; the request goes on elsewhere unless it has tried as often as it may.

        Raises:
            EngineError: it has, or its time is over.
        """
        if lane.fenced is None:
            if error.code == LATE:
                raise error
            if error.code != BUSY:
                await self._fault(lane, error)
        self._bounded(error, failed, what, lane)

    def _bounded(self, error: ServerFault, failed: list[LaneKey], what: str, lane: Lane) -> None:
        failed.append(lane.key)
        if len(failed) >= self._attempts:
            raise EngineError(
                f"{what} failed on {len(failed)} servers, one after another",
                code="ENG75",
                where=error.where,
                why=f"the last one: {error.what}" + (f" ({error.why})" if error.why else ""),
                fix="see the servers' logs; raise rollout.rollout_max_retries if such failures are to be expected",
            ) from error
        self.requeued += 1


def _came(place: Place, count: int) -> None:
    """So many tokens and replies came from a server's rank."""
    if place.rank is not None:
        place.lane.came[place.rank] += count
