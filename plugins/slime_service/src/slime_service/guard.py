"""Checks of every request before its route: the token, sizes, a deadline for the body; and the form of errors.

Refused here: a request without the token (401, on any path), a body that is too large (413, none of it
kept), too slow (408), not JSON by its own account (415), and more requests at once than the service serves (429). A
refusal is {"error": {code, what, where, why, fix}}.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from slime_core.errors import SlimeError, StorageError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_SECONDS = 30.0
SHOWN = 5  # validation errors that an answer names
PARTS = ("code", "what", "where", "why", "fix")
log = logging.getLogger("slime.service")


class Refused(Exception):
    """An error response: its status, and the parts of the error."""

    def __init__(self, status: int, problem: dict[str, str], retry_after: int = 0) -> None:
        super().__init__(problem["what"])
        self.status, self.problem, self.retry_after = status, problem, retry_after

    @property
    def body(self) -> bytes:
        """JSON."""
        return json.dumps({"error": self.problem}).encode()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response; the connection is closed if the request's body may be unread."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        headers |= {"retry-after": str(self.retry_after)} if self.retry_after else {}
        return headers | ({"connection": "close"} if self.status in (401, 408, 413, 415) else {})


def refused(status: int, code: str, what: str, *, where: str = "", why: str = "", fix: str = "") -> Refused:
    """A refusal with its parts; 429 and 503 say when to come again."""
    problem = dict(zip(PARTS, (code, what, where, why, fix), strict=True))
    return Refused(status, problem, retry_after=1 if status in (429, 503) else 0)


def of_slime_error(error: SlimeError) -> Refused:
    """An error of the core: storage that fails is the service's trouble (503), what else there is the request's."""
    problem = {part: str(value) for part, value in error.as_dict().items() if part in PARTS}
    return Refused(503 if isinstance(error, StorageError) else 422, problem, retry_after=1)


def invalid(errors: Iterable[Any], fix: str) -> Refused:
    """422 with the first of pydantic's ``errors``."""
    lines = [f"{'.'.join(map(str, item['loc']))[:200]}: {str(item['msg'])[:200]}" for item in errors]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    where, reason = lines[0].split(":")[0] if lines else "", "; ".join(lines[:SHOWN]) + more
    return refused(422, "invalid", "the request is not what this route takes", where=where, why=reason, fix=fix)


class Guard:
    """An ASGI application around another; ``max_body`` in bytes, ``max_requests`` at once (0: any number).

    ``larger`` is what to do about a body that is too large.
    """

    def __init__(self, app: App, *, token: str, max_body: int, max_requests: int = 0, larger: str = "") -> None:
        self._app, self._max_body, self._max_requests, self._larger = app, max_body, max_requests, larger
        self.routes: list[Any] = list(getattr(app, "routes", []))  # of the application inside
        self._expected = b"Bearer " + token.encode()
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; nothing but HTTP gets through."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        self._open += 1
        try:
            self._check(scope)
            body = await self._body(scope, receive)
            await self._app(scope, _replay(body, receive), watched)
        except Refused as answer:
            if not started:
                await answer_with(answer, send)
        except Exception as error:
            log.error("%s %r failed: %s: %s", scope["method"], scope["path"], type(error).__name__, error)
            if not started:
                await answer_with(refused(500, "SLM00", "the service failed", fix="look at its log"), send)
        finally:
            self._open -= 1

    def _check(self, scope: Scope) -> None:
        headers = _headers(scope)
        authorization = headers.get(b"authorization", b"")
        if not hmac.compare_digest(authorization, self._expected):
            raise refused(
                401,
                "unauthorized",
                "the token is missing or wrong",
                where="header Authorization",
                fix="send Authorization: Bearer TOKEN; the service says at its start where the token lies",
            )
        if self._open > self._max_requests > 0:
            raise refused(
                429, "busy", "too many requests at once", why=f"{self._max_requests} are served", fix="come again"
            )
        if headers.get(b"content-encoding", b"identity") != b"identity":
            raise refused(415, "encoding", "the body is compressed", fix="send it as it is")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        headers = _headers(scope)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > self._max_body:
            if length.isdigit() and int(length[:20]) <= 2 * self._max_body:
                await self._discard(receive)
            raise self._too_large()
        parts: list[bytes] = []
        size, end = 0, time.monotonic() + BODY_SECONDS
        while True:
            try:
                async with asyncio.timeout(max(0.0, end - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                reason = f"it had {BODY_SECONDS:g} s"
                raise refused(408, "slow", "the body did not come", why=reason, fix="send it again") from None
            if message["type"] == "http.disconnect":
                raise refused(400, "cut", "the body ended early")
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise self._too_large()
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if size and kind != b"application/json":
            raise refused(415, "type", "the body is not JSON by its header", fix="send content-type: application/json")
        return b"".join(parts)

    async def _discard(self, receive: Receive) -> None:
        """Drop a body that is a little too large: who still sends it when the connection ends sees no answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BODY_SECONDS):
                while (await receive()).get("more_body", False):
                    pass

    def _too_large(self) -> Refused:
        return refused(
            413,
            "too_large",
            "the body is too large",
            why=f"a body may have {self._max_body} bytes",
            fix=self._larger,
        )


async def answer_with(answer: Refused, send: Send) -> None:
    """Send a refusal."""
    headers = {"content-type": "application/json", "content-length": str(len(answer.body)), **answer.headers}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": pairs})
    await send({"type": "http.response.body", "body": answer.body})


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return {name.lower(): value for name, value in scope["headers"]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, once; then whatever the connection says."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
