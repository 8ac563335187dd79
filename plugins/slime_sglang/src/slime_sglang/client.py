"""One SGLang server over HTTP: token ids and log-probs, checked before sending and when they return.

    request -> bodies.check -> a permit of `concurrency` -> [POST /generate as a new rid] -> wire.completion
                                                            ^--- abort the old rid --- a fault after which it is safe

A token's version is checked against what the caller says may be; what is wrong with a server leaves as ServerFault,
what is wrong with the request as another EngineError. See `calls` for retries and `http` for what a try may meet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from slime_core.engines.admission import BASE_NAME, too_long
from slime_core.errors import EngineError
from slime_core.types import Completion
from slime_sglang import bodies, stop_strings, wire
from slime_sglang.adapter_updates import served_name
from slime_sglang.calls import HttpCalls, ServerProgress
from slime_sglang.chunks import ChunkedAnswer
from slime_sglang.concurrency import InFlightRequest
from slime_sglang.http import (
    Reply,
    ServerFault,
    checked,
    decoded,
    dumps,
    fault,
    loads,
    message,
)
from slime_sglang.pictures import FAMILIES as PICTURE_FAMILIES
from slime_sglang.retries import Retries

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import GenerateRequest, Media
    from slime_sglang.address import ServerAddress
    from slime_sglang.pictures import PictureCodec

__all__ = ["Client", "ServerFault", "ServerProgress"]

CONTROL_SECONDS = 60.0
"""For calls that compute nothing: abort, pause, resume, flush, infos."""
ABORTS_AT_ONCE = 64
REPLY_BYTES, TOKEN_BYTES = 1 << 20, 512
"""An answer may have so many bytes, and so many more a token (its id, its log-prob, its text)."""
EXPERT_BYTES = 6
"""A number of int32 in base64."""


class Client(HttpCalls):
    """Asks one server.

    ``tokenizer`` gives the model's (as `ModelFolder.tokenizer`): with it a stop string is found that spans the end of
    ``GenerateRequest.kept`` and the new tokens, and it is needed for such requests alone.

    Example:
        client = Client(server.address, vocab_size=151936, context_len=4096, features=installation.features,
                        concurrency=512, timeout=1800, retries=3, epoch=2)
        done = await client.generate(request, low=4, high=lambda: 4)
        await client.close()
    """

    def __init__(
        self,
        address: ServerAddress,
        *,
        vocab_size: int,
        context_len: int,
        features: frozenset[str],
        concurrency: int,
        timeout: float,
        retries: int,
        epoch: int,
        tokenizer: Callable[[], Any] | None = None,
        eos: Collection[int] = (),
        experts: tuple[int, int] | None = None,
        pictures: PictureCodec | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        super().__init__(address, concurrency=concurrency, timeout=timeout, retries=retries)
        self._vocab_size, self._context_len = vocab_size, context_len
        self.features = features  # of the installation
        self._epoch = epoch
        self._tokenizer_of, self._eos = tokenizer, eos
        self._experts = experts  # layers, and experts a token, where samples carry those that were chosen
        self._pictures = pictures  # of a model that sees them
        self._adapters = adapters  # that the server has beside the base, the one in training first
        self._tokenizer: Any = None

    def version_text(self, version: int) -> str:
        """What the server is told to stamp on tokens of ``version``: ``EPOCH.VERSION``."""
        return f"{self._epoch}.{version}"

    def _served_adapter(self, adapter: str, version: int) -> str:
        """The server's name of an adapter; empty for the base, and where it has none and serves whole weights."""
        if not self._adapters or adapter == BASE_NAME:
            return ""
        return served_name(adapter or self._adapters[0], self.version_text(version))

    async def generate(
        self, request: GenerateRequest, *, dp_rank: int | None = None, low: int, high: Callable[[], int]
    ) -> Completion:
        """Continue ``request.tokens``; versions of its tokens must lie in ``[low, high()]``, and an adapter is that of
        ``low``. A caller that is cancelled ends the request on the server. ``timeout`` counts from the moment when it
        is admitted.

        Raises:
            EngineError: the request is at fault (ENG01-ENG03, ENG72, ENG78 the server refuses it), or ENG73 the token,
                ENG93 the certificate, ENG84 the client was closed.
            ServerFault: the server is: ENG69 no connection, ENG71 another service, ENG74 busy, ENG75 it keeps
                failing, ENG76 out of time, ENG77 lost on the way, TOK44, ENG79-ENG83 and ENG88 impossible answers,
                ENG91 a huge one.
        """
        request, limit = self._check(request)
        if not limit:
            return self._nothing(request, "length")
        entry = InFlightRequest(request.id)

        async def one_try(end: float) -> Completion:
            body = self._body(entry, request, limit, dp_rank, low, stream=False)
            answer = await self._request(body, request, end=end, cap=self._cap(request, limit))
            self._check_answer(answer, entry)
            done = wire.completion(answer, self._expected(request, limit, low, high))
            return self._came(self._cut(done, request), entry, 0)

        with self._tracked(entry):
            entry.media = await self._media_fields(request.tokens, request.media, f"request {request.id}")
            if not await self._admitted(entry):
                return self._nothing(request, "abort")
            try:
                return await self._tried(one_try, entry) or self._nothing(request, "abort")
            finally:
                self._leave()

    async def stream(
        self, request: GenerateRequest, *, dp_rank: int | None = None, low: int, high: Callable[[], int]
    ) -> AsyncGenerator[Completion, None]:
        """As `generate`, in growing pieces, the last of them whole; every piece but the last has finish ``abort``.

        Closing the iterator (``contextlib.aclosing``) ends the request on the server. It is asked again only while
        nothing has come. A piece's versions are the server's stamp when the piece came; the last one's are exact.
        """
        request, limit = self._check(request)
        if not limit:
            yield self._nothing(request, "length")
            return
        entry = InFlightRequest(request.id)
        with self._tracked(entry):
            entry.media = await self._media_fields(request.tokens, request.media, f"request {request.id}")
            if not await self._admitted(entry):
                yield self._nothing(request, "abort")
                return
            try:
                async with aclosing(self._streamed(entry, request, limit, dp_rank, low, high)) as pieces:
                    async for piece in pieces:
                        yield piece
            finally:
                self._leave()

    async def score(
        self,
        tokens: Sequence[int],
        start: int,
        media: Media | None = None,
        *,
        adapter: str = "",
        version: int = -1,
    ) -> NDArray[Any]:
        """Log-prob of each of ``tokens[start:]`` (start >= 1) under the plain softmax, float32; those of the
        placeholders of ``media`` have no meaning. An adapter is that of ``version``.

        Raises:
            EngineError, ServerFault: as `generate`; ENG03 a start outside 1..len(tokens).
        """
        bodies.check_ids(tokens, self._vocab_size, "score")
        if not 1 <= start <= len(tokens):
            raise EngineError(f"start is {start} of {len(tokens)} tokens", code="ENG03", where="score")
        if len(tokens) > self._context_len:
            raise too_long(f"{len(tokens)} tokens do not fit the context of {self._context_len}", "score")
        if start == len(tokens):
            return np.empty(0, dtype=np.float32)
        entry = InFlightRequest("score", scores=True)

        async def one_try(end: float) -> NDArray[Any]:
            served = self._served_adapter(adapter, version)
            body = bodies.score_body(tokens, start, rid=self._rid(entry), features=self.features, adapter=served)
            answer = await self._request(dumps(body | entry.media), None, end=end, cap=_cap(len(tokens) - start))
            self._check_answer(answer, entry)
            unnamed = self._pictures.layout.ids if entry.media and self._pictures is not None else ()
            scores = wire.scores(answer, tokens, start, unnamed=(self._vocab_size - 1, *unnamed))
            self._note_tokens(0)
            self.progress.replies += 1
            entry.rid = ""
            return scores

        with self._tracked(entry):
            entry.media = await self._media_fields(tokens, media, "score")
            await self._admitted(entry)
            try:
                scores = await self._tried(one_try, entry)
                assert scores is not None  # nobody aborts a score
                return scores
            finally:
                self._leave()

    async def abort(self, ids: Sequence[str]) -> None:
        """Ask the server once to stop these requests; each waiting `generate` returns what it has, finish ``abort``.

        An abort that meets the server before its request does has no effect: where a `generate` goes on, ask again.

        Raises:
            EngineError, ServerFault: as `post`.
        """
        request_ids = set(ids)
        rids = [entry.rid for entry in self._end(request_ids)]
        for first in range(0, len(rids), ABORTS_AT_ONCE):
            await asyncio.gather(*(self._abort(rid, CONTROL_SECONDS) for rid in rids[first : first + ABORTS_AT_ONCE]))

    async def abort_all(self) -> None:
        """`abort` of every request that the server has, those of other clients and scores too."""
        self._end()
        await self.post("/abort_request", {"rid": "", "abort_all": True}, timeout=CONTROL_SECONDS, retry=True)

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """POST /pause_generation; `abort` counts as asked for by whoever waits."""
        if mode == "abort":
            self._end()
        await self.post("/pause_generation", {"mode": mode}, timeout=CONTROL_SECONDS, retry=True)

    async def resume(self) -> None:
        """POST /continue_generation."""
        await self.post("/continue_generation", {}, timeout=CONTROL_SECONDS, retry=True)

    async def flush(self) -> None:
        """POST /flush_cache. Raises EngineError ENG78 where requests run."""
        await self.post("/flush_cache", {}, timeout=CONTROL_SECONDS, retry=True)

    async def model_info(self) -> dict[str, Any]:
        """GET /model_info."""
        return await self.get("/model_info", timeout=CONTROL_SECONDS)

    async def server_info(self) -> dict[str, Any]:
        """GET /server_info."""
        return await self.get("/server_info", timeout=CONTROL_SECONDS)

    async def checksums(self) -> list[dict[str, str]]:
        """Checksum of every tensor by the engine's name, one dict a rank that the server tells of, in its order.

        Raises:
            EngineError, ServerFault: as `post`; ENG71 an answer of another shape.
        """
        answer = await self.post("/weights_checker", {"action": "checksum"}, timeout=self._timeout, retry=True)
        ranks = answer.get("ranks")
        if not isinstance(ranks, list) or not all(
            isinstance(rank, dict) and isinstance(rank.get("checksums"), dict) for rank in ranks
        ):
            raise fault(
                "no checksums of weights came",
                "ENG71",
                f"POST {self.address.url}/weights_checker",
                why=str(answer.get("message") or answer)[:200],
            )
        return [dict(rank["checksums"]) for rank in ranks]

    # -- a request that generates

    async def _request(self, body: bytes, request: GenerateRequest | None, *, end: float, cap: int) -> Any:
        headers = self._headers(request)
        reply = await self._http.ask("POST", "/generate", body, end=end, cap=cap, headers=headers)
        return decoded(self._answered(reply))

    def _headers(self, request: GenerateRequest | None) -> Mapping[str, str]:
        """More headers of a request; None stands for a score."""
        return {}

    def _answered(self, reply: Reply) -> Reply:
        """The reply where it is an answer; raises as `http.checked`."""
        return checked(reply)

    def _check(self, request: GenerateRequest) -> tuple[GenerateRequest, int]:
        """The request as it is sent, and how many new tokens it may have."""
        if request.media is not None:
            request = self._require_pictures(f"request {request.id}").ended(request)
        limit = bodies.check(request, vocab_size=self._vocab_size, context_len=self._context_len)
        if self._tokenizer_of is None and stop_strings.needs_text(request, tokenizer=self._texts):
            raise EngineError(
                "stop strings are to be looked for in text that the server does not see, and there is no tokenizer",
                code="ENG03",
                where=f"request {request.id}",
                why="they look back over kept tokens" if self._texts else "the server runs without a tokenizer",
            )
        return request, limit

    def _require_pictures(self, where: str) -> PictureCodec:
        if self._pictures is None:
            raise EngineError(
                "SGLang takes no pictures of this model from slime",
                code="ENG03",
                where=where,
                why=f"it takes token ids with pictures for {', '.join(PICTURE_FAMILIES)}",
                fix="--rollout-engine local",
            )
        return self._pictures

    async def _media_fields(self, tokens: Sequence[int], media: Media | None, where: str) -> dict[str, Any]:
        return {} if media is None else await self._require_pictures(where).fields(tokens, media, where)

    async def _streamed(
        self,
        entry: InFlightRequest,
        request: GenerateRequest,
        limit: int,
        dp_rank: int | None,
        low: int,
        high: Callable[[], int],
    ) -> AsyncGenerator[Completion, None]:
        retries = Retries(self._retries, time.monotonic() + self._timeout, entry.stop)
        where, count = f"request {request.id}", 0
        while True:
            body, pieces = self._body(entry, request, limit, dp_rank, low, stream=True), ChunkedAnswer()
            try:
                headers = self._headers(request)
                sent = self._http.events(
                    "/generate", body, end=retries.end, cap=self._cap(request, limit), headers=headers
                )
                async with aclosing(sent) as events:
                    async for data in events:
                        if data == b"[DONE]":
                            break
                        answer = pieces.add(self._event(data, entry), where)
                        final = answer["meta_info"].get("finish_reason") is not None
                        done = wire.completion(answer, self._expected(request, limit, low, high), final=final)
                        done = self._cut(done, request)
                        if final:
                            yield self._came(done, entry, count)
                            return
                        self._note_tokens(len(done.tokens) - count)
                        count = len(done.tokens)
                        yield done
                        if done.finish == "stop":  # and the server goes on
                            self._drop(entry)
                            return
                raise fault("the stream ended before its answer did", "ENG77", where, again=True, running=True)
            except ServerFault as error:
                error.again = error.again and not count
                await self._after(error, entry, retries)
            except EngineError as error:
                raise self._refused(error, entry) from None
            except (asyncio.CancelledError, GeneratorExit):
                self._drop(entry)
                raise
            if entry.stop.is_set():
                self._require_open()
                yield self._nothing(request, "abort")
                return

    def _body(
        self,
        entry: InFlightRequest,
        request: GenerateRequest,
        limit: int,
        dp_rank: int | None,
        version: int,
        *,
        stream: bool,
    ) -> bytes:
        rid, adapter = self._rid(entry), self._served_adapter(request.adapter, version)
        options: dict[str, Any] = {"features": self.features, "dp_rank": dp_rank, "adapter": adapter}
        experts = self._experts_of(request) is not None
        body = bodies.body(request, rid=rid, limit=limit, stream=stream, experts=experts, **options)
        return dumps(body | entry.media)

    def _experts_of(self, request: GenerateRequest) -> tuple[int, int] | None:
        return None if request.id.startswith("eval/") else self._experts

    def _cap(self, request: GenerateRequest, limit: int) -> int:
        layers, top_k = self._experts_of(request) or (0, 0)
        return _cap(limit) + EXPERT_BYTES * layers * top_k * (len(request.tokens) + limit)

    def _expected(
        self, request: GenerateRequest, limit: int, low: int, high: Callable[[], int]
    ) -> wire.ExpectedAnswer:
        return wire.ExpectedAnswer(
            request=request,
            limit=limit,
            vocab_size=self._vocab_size,
            epoch=self._epoch,
            low=low,
            high=high(),
            spans=wire.SPANS in self.features,
            experts=self._experts_of(request),
        )

    def _event(self, data: bytes, entry: InFlightRequest) -> Any:
        try:
            answer = loads(data)
        except ValueError as error:
            raise fault(
                "an event of the stream is not complete JSON",
                "ENG77",
                f"request {entry.id}",
                again=True,
                running=True,
                why=str(error),
            ) from None
        if isinstance(answer, dict) and "error" in answer:
            raise EngineError(f"the server refuses the request: {message(data)}", code="ENG78")
        self._check_answer(answer, entry)
        return answer

    def _came(self, done: Completion, entry: InFlightRequest, count: int) -> Completion:
        if done.finish == "abort" and not done.tokens and not entry.aborted:
            raise fault(
                "the server ended the request without a token, unasked", "ENG81", f"request {entry.id}", again=True
            )
        entry.rid = ""
        self._note_tokens(len(done.tokens) - count)
        self.progress.replies += 1
        return done

    def _nothing(self, request: GenerateRequest, finish: Literal["length", "abort"]) -> Completion:
        return wire.nothing(request, self._epoch, finish)

    # -- admission, texts, calls

    @property
    def _texts(self) -> bool:
        return bodies.NO_TOKENIZER not in self.features

    def _cut(self, done: Completion, request: GenerateRequest) -> Completion:
        decode = None if self._tokenizer_of is None else self._text
        return stop_strings.cut(done, request, decode, tokenizer=self._texts, eos=self._eos)

    def _text(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        if self._tokenizer is None:
            assert self._tokenizer_of is not None
            self._tokenizer = self._tokenizer_of()
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def _cap(tokens: int) -> int:
    return REPLY_BYTES + TOKEN_BYTES * tokens
