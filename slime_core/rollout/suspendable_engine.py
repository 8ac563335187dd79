"""An Engine around the run's own that suspends requests between two tokens and continues them, under any weights.

    request of a sample -> SuspendableEngine -> piece, piece, ... -> engine        one Completion comes back

A *tick* is one token of each running sample. In a bounded round (``begin(limit)``, ``more``) a watched sample stops
at the limit; ``close`` stops all at once, wherever they are. A suspended request keeps its tokens, log-probs and the
version of each, and is continued from them (``GenerateRequest.kept``). Draws are functions of (seed, position), so
stopping changes no token. Whoever called ``generate`` (the core, or a plugin between two of its turns) waits, and its
deadline with it. Requests of samples that are not watched pass through.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from slime_core.errors import EngineError
from slime_core.plugins.boundary import DEADLINE
from slime_core.protocols import Engine, RequestTurn
from slime_core.types import Completion, GenerateRequest


class SuspendableEngine:
    """See the module. ``changed`` is called whenever a watched sample stops or ends a request.

    Example:
        engine = SuspendableEngine(inner, tokenizer, changed=event.set)
        engine.watch(["grpo/17-0"])
        engine.begin(limit=16)           # sixteen tokens, then it is in engine.suspended
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
        self._round_opened = asyncio.Event()
        self._turns: dict[str, list[RequestTurn]] = {}  # of each watched sample, in order; the last may be under way
        self._restored: dict[str, list[RequestTurn]] = {}  # turns of an earlier process, not yet asked for again
        self.busy: set[str] = set()  # watched samples that may still make tokens in this round
        self.suspended: set[str] = set()  # watched samples that wait for more room

    def watch(self, ids: Iterable[str]) -> None:
        """Measure these samples from the beginning of the round on."""
        for name in ids:
            self._used[name] = self.start
            self.busy.add(name)

    def forget(self, ids: Collection[str]) -> int | None:
        """Stop measuring; returns the tick at which the last of these samples ended, None where none was watched."""
        for table in (self._turns, self._restored):
            for name in ids:
                table.pop(name, None)
        self.busy.difference_update(ids)
        self.suspended.difference_update(ids)
        return max((self._used.pop(name) for name in ids if name in self._used), default=None)

    def begin(self, limit: int | None) -> None:
        """A new step: every watched sample has made 0 ticks and may make ``limit`` (None: as many as it wants)."""
        self._used = dict.fromkeys(self._used, 0)
        self.start, self._limit = 0, limit
        self._open_round()

    def more(self, ticks: int) -> None:
        """A new round of the step."""
        self.start = self._limit or 0
        self._limit = self.start + ticks
        self._open_round()

    def turns(self, ids: Iterable[str]) -> dict[str, list[RequestTurn]]:
        """What these samples have generated, turn by turn."""
        return {name: turns for name in ids if (turns := self._turns.get(name))}

    def restore(self, turns: Mapping[str, Sequence[RequestTurn]]) -> None:
        """Serve these samples' next requests from turns of an earlier process, as far as they go."""
        self._restored |= {name: list(of_sample) for name, of_sample in turns.items()}

    async def pass_time(self, name: str, ticks: int) -> None:
        """Take part in the rounds as a sample that makes ``ticks`` tokens, which are stored already."""
        with self._taking_part(name):
            while ticks > 0 and name in self._used:
                room = await self._room(name)
                step = ticks if room is None else min(ticks, room)
                self._used[name] += step
                ticks -= step

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
        turn = self._turn_of(request)
        self._turns.setdefault(name, []).append(turn)
        with self._taking_part(name):
            while not turn.finish:
                await self._generate_piece(turn)
        return turn.completion(self._tokenizer)

    @contextmanager
    def _taking_part(self, name: str) -> Iterator[None]:
        self.busy.add(name)
        try:
            yield
        finally:
            self.busy.discard(name)
            self.suspended.discard(name)
            self._changed()

    def _turn_of(self, request: GenerateRequest) -> RequestTurn:
        """The turn of a request: a new one, or the restored one of the same request."""
        restored = self._restored.get(request.id)
        if not restored:
            return RequestTurn(request=request)
        turn = restored.pop(0)
        if not turn.answers(request):
            restored.clear()  # the caller took another way this time
            return RequestTurn(request=request)
        return RequestTurn(request=request, pieces=list(turn.pieces), finish=turn.finish)

    async def _generate_piece(self, turn: RequestTurn) -> None:
        name = turn.request.id
        room = await self._room(name)
        request = turn.continuation(room)
        self._running.add(name)
        try:
            piece = await self._engine.generate(request)
        except EngineError as error:
            if not turn.pieces or not error.ends_dialogue:
                raise
            turn.finish = "length"
            return
        finally:
            self._running.discard(name)
        if name in self._used:
            self._used[name] += len(piece.tokens)
        turn.add(piece, request.params.max_new_tokens)
        if turn.finish == "abort" and self._at_limit(name):
            turn.finish = ""

    def _at_limit(self, name: str) -> bool:
        return self._limit is not None and self._used.get(name, 0) >= self._limit

    async def _room(self, name: str) -> int | None:
        """Tokens that the sample may make now, at least one; waits for them."""
        if self._at_limit(name):
            deadline = DEADLINE.get(None)
            with deadline.stopped() if deadline is not None else nullcontext():
                while self._at_limit(name):
                    self.busy.discard(name)
                    self.suspended.add(name)
                    self._changed()
                    await self._round_opened.wait()
        return None if self._limit is None else self._limit - self._used.get(name, 0)

    def _open_round(self) -> None:
        self.busy |= self.suspended
        self.suspended.clear()
        self._round_opened.set()
        self._round_opened = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        """The rest of an Engine, as it is."""
        return getattr(self._engine, name)
