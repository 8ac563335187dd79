"""Calls of one SGLang server: retries, when a repeat is safe, the concurrency limit, and requests in flight by rid.

A try's rid begins with a number of fixed width, so that none is a prefix of another: SGLang aborts by prefix. It is
asked again only when the try before is over for certain: nothing was sent, the server refused to begin, or its rid was
aborted. An answer under another rid than the one that waits is never taken.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.errors import EngineError
from slime_sglang import wire
from slime_sglang.concurrency import ConcurrencyLimit, InFlightRequest
from slime_sglang.http import (
    Reply,
    ServerFault,
    Transport,
    checked,
    decoded,
    dumps,
    fault,
    stranger,
)
from slime_sglang.retries import Retries

if TYPE_CHECKING:
    from slime_sglang.address import ServerAddress

T = TypeVar("T")
ABORT_SECONDS = 5.0
"""For the abort of a try that failed, before it is asked again."""
REJECTED = frozenset({"ENG71", "ENG79", "ENG80", "ENG81", "ENG82", "ENG83", "ENG88", "ENG91", "TOK44"})
"""Codes of answers that broke a rule."""


@dataclass(slots=True)
class ServerProgress:
    """What has come from a server since the client began; counts never fall, ``in_flight`` and ``waiting`` do."""

    tokens: int = 0  # of generate and stream
    replies: int = 0  # good ones, of generate, stream and score
    in_flight: int = 0  # requests that the server has: generate, stream, score
    waiting: int = 0  # requests without a seat
    waited: float = 0.0  # seconds that requests spent without a seat
    last_token: float = 0.0  # time.monotonic() of the last token; of the client's making before the first
    retries: int = 0
    rejected: int = 0  # answers that broke a rule
    late: int = 0  # answers of a try that had been given up
    strangers: int = 0  # answers to no request of ours


class HttpCalls:
    """What `Client` is built on: it knows no tokens."""

    def __init__(self, address: ServerAddress, *, concurrency: int, timeout: float, retries: int) -> None:
        self.address = address
        self.progress = ServerProgress(last_token=time.monotonic())
        self._timeout, self._retries = timeout, retries
        self._http = Transport(address.url, token=address.token, ca=address.ca)
        self._limit = ConcurrencyLimit(concurrency)
        self._in_flight: set[InFlightRequest] = set()
        self._name, self._count = secrets.token_hex(4), 0
        self._errands: set[asyncio.Task[None]] = set()
        self._closed = False

    async def get(self, path: str, *, timeout: float, retry: bool = True) -> dict[str, Any]:
        """GET a JSON object. Raises as `post`."""
        return await self._called("GET", path, None, timeout, retry)

    async def post(self, path: str, body: dict[str, Any], *, timeout: float, retry: bool = False) -> dict[str, Any]:
        """POST a JSON object and read one; what is no JSON object is under ``text``. With ``retry`` False it is asked
        again only where nothing was begun.

        Raises:
            EngineError: ENG73, ENG93, or ENG78 with the server's message where it answers 4xx.
            ServerFault: ENG69, ENG71, ENG74-ENG77, ENG91, as `generate`.
        """
        return await self._called("POST", path, dumps(body), timeout, retry)

    async def close(self) -> None:
        """End what is in flight with ENG84 and close the connections."""
        self._closed = True
        for entry in self._in_flight:
            entry.end()
        await self._http.close()
        for errand in self._errands:
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)

    # -- requests that generate

    async def _tried(self, one_try: Callable[[float], Awaitable[T]], entry: InFlightRequest) -> T | None:
        """Try, and again where that is safe; None where its caller wanted it ended between two retries."""
        retries = Retries(self._retries, time.monotonic() + self._timeout, entry.stop)
        while True:
            try:
                return await one_try(retries.end)
            except ServerFault as error:
                await self._after(error, entry, retries)
            except EngineError as error:
                raise self._refused(error, entry) from None
            except asyncio.CancelledError:
                self._drop(entry)
                raise
            if entry.stop.is_set():
                self._require_open()
                return None

    async def _after(self, error: ServerFault, entry: InFlightRequest, retries: Retries) -> None:
        """Wait for the next try once this one is over for certain, or raise."""
        self.progress.rejected += error.code in REJECTED
        self._require_open()
        if not error.again:
            if error.running:
                self._drop(entry)
            entry.rid = ""
            raise error
        rid, entry.rid = entry.rid, ""
        if error.running and not await self._over(rid):
            raise error
        await retries.again(error)
        self.progress.retries += 1

    async def _over(self, rid: str) -> bool:
        """Abort a try; whether it is over: the server says so, or nobody listens there any more."""
        try:
            await self._abort(rid, ABORT_SECONDS)
        except EngineError as error:
            return error.code == "ENG69"
        return True

    def _drop(self, entry: InFlightRequest) -> None:
        """Have the server end what nobody waits for any more."""
        rid, entry.rid = entry.rid, ""
        if not rid or self._closed:
            return

        async def errand() -> None:
            await self._over(rid)

        task = asyncio.get_running_loop().create_task(errand(), name="slime-sglang-abort")
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _refused(self, error: EngineError, entry: InFlightRequest) -> EngineError:
        entry.rid = ""
        return wire.refusal(error.what, f"request {entry.id}") if error.code == "ENG78" else error

    def _rid(self, entry: InFlightRequest) -> str:
        self._count += 1
        entry.rid = f"{self._name}-{self._count:010d}-{entry.id}"
        return entry.rid

    def _check_answer(self, answer: Any, entry: InFlightRequest) -> None:
        """Raises ServerFault ENG88 where the answer is of another try, or of nobody's request."""
        rid = wire.meta(answer, f"request {entry.id}").get("id")
        if rid == entry.rid:
            return
        late = isinstance(rid, str) and rid.startswith(f"{self._name}-")
        self.progress.late += late
        self.progress.strangers += not late
        raise fault(
            f"the answer is to {'an earlier attempt' if late else 'an unknown request'}: rid {rid!r}"[:300],
            "ENG88",
            f"request {entry.id}",
            again=True,
            running=True,
        )

    def _note_tokens(self, tokens: int) -> None:
        self.progress.tokens += max(tokens, 0)
        self.progress.last_token = time.monotonic()

    @contextmanager
    def _tracked(self, entry: InFlightRequest) -> Iterator[None]:
        self._require_open()
        self._in_flight.add(entry)
        try:
            yield
        finally:
            self._in_flight.discard(entry)

    async def _admitted(self, entry: InFlightRequest) -> bool:
        begin = time.monotonic()
        self.progress.waiting += 1
        try:
            admitted = await self._limit.acquire(entry)
        finally:
            self.progress.waiting -= 1
            self.progress.waited += time.monotonic() - begin
        if admitted:
            self.progress.in_flight += 1
        else:
            self._require_open()
        return admitted

    def _leave(self) -> None:
        self.progress.in_flight -= 1
        self._limit.release()

    def _end(self, ids: Container[str] | None = None) -> list[InFlightRequest]:
        """Mark generating requests (None: all) as asked to end; those of them that the server has."""
        chosen = [entry for entry in self._in_flight if not entry.scores and (ids is None or entry.id in ids)]
        for entry in chosen:
            entry.aborted = True
            entry.end()
        return [entry for entry in chosen if entry.rid]

    async def _abort(self, rid: str, timeout: float) -> None:
        await self.post("/abort_request", {"rid": rid, "abort_all": False}, timeout=timeout, retry=True)

    async def _called(self, method: str, path: str, body: bytes | None, timeout: float, retry: bool) -> dict[str, Any]:
        self._require_open()
        retries = Retries(self._retries, time.monotonic() + timeout)
        while True:
            try:
                reply = await self._http.ask(method, path, body, end=retries.end, reuse=retry)
                return _object(checked(reply))
            except ServerFault as error:
                self._require_open()
                if error.running and not retry:
                    raise
                await retries.again(error)
                self.progress.retries += 1

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the client of this server was closed", code="ENG84", where=self.address.url)


def _object(reply: Reply) -> dict[str, Any]:
    """A JSON object, or what came instead under ``text``; nothing where the answer is empty."""
    body = reply.body.strip()
    if not body:
        return {}
    if body[:1] in (b"{", b"["):
        document = decoded(reply)
        return document if isinstance(document, dict) else {"text": body.decode(errors="replace")}
    if body[:1] == b"<":
        raise stranger(reply.where, body)
    return {"text": body.decode(errors="replace")}
