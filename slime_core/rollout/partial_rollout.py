"""An Engine before the run's own that can stop samples between two tokens and let them go on, under any weights.

    sample's request -> here -> piece, piece, ... -> engine        one Completion comes back, whatever was in between

A *tick* is one token of each sample that runs. In a bounded round (``begin(limit)``, ``more``) a watched sample stops
at the limit; ``close`` stops all at once, wherever they are. A stopped sample keeps its tokens, log-probs and the
version of each; it goes on with the tokens that are there (``GenerateRequest.kept``). Draws are functions of (seed,
position), so stopping changes no token. Whoever called ``generate`` (the core, or a plugin between two of its turns)
simply waits, and its deadline with it. Requests that no watched sample makes pass through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from slime_core.errors import EngineError
from slime_core.plugins.boundary import DEADLINE
from slime_core.protocols import Engine, RequestTurn
from slime_core.types import Completion, GenerateRequest

FULL = "ENG72"  # a prompt that fills the context


class SuspendableEngine:
    """See the module. ``changed`` is called whenever a watched sample stops or ends a request.

    Example:
        engine = SuspendableEngine(own, tokenizer, changed=event.set)
        engine.watch(["grpo/17-0"])
        engine.begin(limit=16)           # sixteen tokens, then it is in engine.held
        engine.more(16)
        await engine.close()             # partial tokens are kept
        engine.begin(limit=None)         # goes on
    """

    def __init__(self, engine: Engine, tokenizer: Any, changed: Callable[[], None]) -> None:
        self._engine, self._tokenizer, self._changed = engine, tokenizer, changed
        self._limit: int | None = 0
        self.start = 0  # tick at which the present round began
        self._used: dict[str, int] = {}  # ticks of each watched sample since `begin`
        self._running: set[str] = set()  # watched samples with a piece on the engine
        self._released = asyncio.Event()
        self._turns: dict[str, list[RequestTurn]] = {}  # of each watched sample, in order; the last may be under way
        self._past: dict[str, list[RequestTurn]] = {}  # turns that an earlier process saw, not yet asked for again
        self.busy: set[str] = set()  # watched samples that may still make tokens in this round
        self.held: set[str] = set()  # watched samples that wait for more room

    def watch(self, ids: Iterable[str]) -> None:
        """Measure these samples from the beginning of the round on."""
        for name in ids:
            self._used[name] = self.start
            self.busy.add(name)

    def watches(self, ids: Iterable[str]) -> bool:
        """Whether any of these is measured."""
        return any(name in self._used for name in ids)

    def forget(self, ids: Iterable[str]) -> int:
        """Stop measuring; the answer is the tick at which the last of these samples ended."""
        ends = []
        for name in ids:
            ends.append(self._used.pop(name, 0))
            self._turns.pop(name, None)
            self._past.pop(name, None)
            self.busy.discard(name)
            self.held.discard(name)
        return max(ends, default=0)

    def begin(self, limit: int | None) -> None:
        """A new step: every watched sample has made 0 ticks and may make ``limit`` (None: as many as it wants)."""
        self._used = dict.fromkeys(self._used, 0)
        self.start, self._limit = 0, limit
        self._release()

    def more(self, ticks: int) -> None:
        """A new round of the step."""
        self.start = self._limit or 0
        self._limit = self.start + ticks
        self._release()

    def turns(self, ids: Iterable[str]) -> dict[str, list[RequestTurn]]:
        """What these samples have generated, turn by turn."""
        return {name: turns for name in ids if (turns := self._turns.get(name))}

    def remember(self, past: Mapping[str, Sequence[RequestTurn]]) -> None:
        """Answer these samples' next requests with turns that were made before, as far as they go."""
        self._past |= {name: list(turns) for name, turns in past.items()}

    async def pass_time(self, name: str, ticks: int) -> None:
        """Take part in the rounds as a sample that makes ``ticks`` tokens; they are known already."""
        self.busy.add(name)
        try:
            while ticks > 0:
                room = await self._room(name)
                step = ticks if room is None else min(ticks, room)
                self._used[name] += step
                ticks -= step
        finally:
            self.busy.discard(name)
            self.held.discard(name)
            self._changed()

    async def close(self) -> None:
        """Stop every watched sample where it is, until the next :meth:`begin`."""
        self.start = self._limit = 0
        self._used = dict.fromkeys(self._used, 0)
        await self._engine.abort(sorted(self._running))

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`; may take as long as samples are stopped."""
        name = request.id
        if name not in self._used:
            return await self._engine.generate(request)
        self.busy.add(name)
        turn = self._begun(request)
        self._turns.setdefault(name, []).append(turn)
        try:
            while not turn.finish:
                await self._piece(turn)
        finally:
            self.busy.discard(name)
            self.held.discard(name)
            self._changed()
        return turn.whole(self._tokenizer)

    def _begun(self, request: GenerateRequest) -> RequestTurn:
        """The turn of a request, with what is known of it; a request that was not made before has nothing."""
        past = self._past.get(request.id)
        if not past:
            return RequestTurn(request=request)
        before = past.pop(0)
        if (before.request.tokens, before.request.seed) != (request.tokens, request.seed):
            past.clear()  # whoever asks took another way this time
            return RequestTurn(request=request)
        return RequestTurn(request=request, pieces=list(before.pieces), finish=before.finish)

    async def _piece(self, turn: RequestTurn) -> None:
        name = turn.request.id
        room = await self._room(name)
        request = turn.rest(room)
        self._running.add(name)
        try:
            piece = await self._engine.generate(request)
        except EngineError as error:
            if not turn.pieces or error.code != FULL:
                raise
            turn.finish = "length"
            return
        finally:
            self._running.discard(name)
        if name in self._used:
            self._used[name] += len(piece.tokens)
        turn.add(piece, request.params.max_new_tokens)
        if turn.finish == "abort" and self._closed(name):
            turn.finish = ""

    def _closed(self, name: str) -> bool:
        return self._limit is not None and self._used.get(name, 0) >= self._limit

    async def _room(self, name: str) -> int | None:
        """Tokens that the sample may make now, at least one; waits for them."""
        if self._closed(name):
            with _stopped_clock():
                while self._closed(name):
                    self.busy.discard(name)
                    self.held.add(name)
                    self._changed()
                    await self._released.wait()
        return None if self._limit is None else self._limit - self._used.get(name, 0)

    def _release(self) -> None:
        self.busy |= self.held
        self.held.clear()
        self._released.set()
        self._released = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        """The rest of an Engine, as it is."""
        return getattr(self._engine, name)


@contextmanager
def _stopped_clock() -> Iterator[None]:
    """The deadline of the hook that is running does not count inside."""
    scope = DEADLINE.get(None)
    due = scope.when() if scope is not None else None
    if scope is None or due is None:
        yield
        return
    loop = asyncio.get_running_loop()
    remaining = due - loop.time()
    scope.reschedule(None)
    try:
        yield
    finally:
        with suppress(RuntimeError):  # the hook has ended meanwhile
            scope.reschedule(loop.time() + remaining)
