"""An HTTP server in front of a run's engine, for programs of this machine.

    client -> head -> authorized? -> body, parsed -> [the engine's loop: handler] -> JSON, or server-sent events
              `---------------- the server's own thread -------------'            (written by the server's thread)

It listens on 127.0.0.1 only and refuses what a web page could send: an Origin, or a Host that is not the loopback.
A client that hangs up cancels its handler.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slime_core.errors import SlimeError

LOOPBACK = "127.0.0.1"
MAX_BODY = 64 << 20
MAX_HEAD = 64 << 10
HEAD_SECONDS = 30.0
CLOSE_SECONDS = 1.0  # for a client to read its response when the server closes


class HttpError(Exception):
    """A request that cannot be served, with its HTTP status; ``fields`` are added to the response's ``error``."""

    def __init__(self, status: int, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.status, self.fields = status, fields


@dataclass(slots=True, frozen=True, kw_only=True)
class Request:
    """An authorized request."""

    token: str  # its bearer token; empty where it has none
    payload: dict[str, Any]  # the body's JSON object; empty for GET


class Events(list[Any]):
    """A response sent as server-sent events, one JSON value each."""


Handler = Callable[[Request], Awaitable[Any]]
Authorize = Callable[[str], None]
"""Called with a request's bearer token before its body is read, on the server's thread; raises :class:`HttpError`."""


def require_token(token: str) -> Authorize:
    """Accept requests with ``token``; all requests where it is empty."""

    def authorize(bearer: str) -> None:
        if token and not hmac.compare_digest(bearer.encode("latin-1"), token.encode()):
            raise HttpError(401, "the token is missing or wrong")

    return authorize


class LoopbackServer:
    """An HTTP server on a free port. ``routes`` maps ``"POST /path"`` to handlers, which run on ``loop``.

    Example:
        server = LoopbackServer({"POST /generate": handle}, asyncio.get_running_loop(), require_token("secret"))
        ...
        server.close()
    """

    def __init__(
        self,
        routes: Mapping[str, Handler],
        loop: asyncio.AbstractEventLoop,
        authorize: Authorize,
        *,
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        self._head_seconds = head_seconds
        self._routes, self._engine_loop, self._authorize = dict(routes), loop, authorize
        self._socket = socket.create_server((LOOPBACK, 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._stopped: asyncio.Task[bool]  # waits for it
        self._thread = threading.Thread(target=self._run, name="slime-loopback", daemon=True)
        self._thread.start()

    @property
    def orphaned(self) -> bool:
        """Whether the engine's loop has ended, so that no handler can run any more."""
        return self._engine_loop.is_closed()

    def close(self) -> None:
        """Stop serving and free the port."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(5)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stopped = self._loop.create_task(self._stop.wait())
        server = await asyncio.start_server(self._connect, sock=self._socket, limit=MAX_HEAD)
        await self._stopped
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks)  # asyncio's own tasks, of connections just accepted, start the last ones
        server.close()  # last: asyncio forgets the socket of a connection that it accepts on a closed server

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it is closed; the loop does not end before."""
        requests = self._loop.create_task(self._requests(reader, writer))
        await asyncio.wait({requests, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        requests.cancel()
        writer.close()
        closed = self._loop.create_task(writer.wait_closed())
        await asyncio.wait({closed, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({closed}, timeout=CLOSE_SECONDS)
        writer.transport.abort()  # of a client that does not read
        with suppress(OSError):
            await closed
        await asyncio.wait({requests})

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        early = b""  # of the next request, read while the last one was served
        ends = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with suppress(*ends, asyncio.CancelledError):
            while True:
                async with asyncio.timeout(self._head_seconds):
                    head = _RequestHead.parse(early + await reader.readuntil(b"\r\n\r\n"))
                watch = None
                try:
                    handler = self._handler(head)
                    if head.expects:
                        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    body = await reader.readexactly(head.length)
                    watch = self._loop.create_task(_next_byte(reader, asyncio.current_task()))
                    response = await self._respond(handler, head, body)
                    keep_alive = head.keep_alive and response.status < 500
                except HttpError as error:
                    response = _error_response(error)
                    keep_alive = head.keep_alive and await _discard_body(head, reader) and error.status != 401
                finally:
                    if watch is not None:
                        watch.cancel()
                writer.write(response.encode(keep_alive))
                await writer.drain()
                if not keep_alive:
                    return
                early = b""
                if watch is not None:
                    await asyncio.wait({watch})
                    early = b"" if watch.cancelled() else watch.result()

    def _handler(self, head: _RequestHead) -> Handler:
        """The handler of a request whose body has not been read.

        Raises:
            HttpError: 403, 401, 411, 413, 404 or 405.
        """
        if "origin" in head.headers or head.headers.get("host", LOOPBACK).split(":")[0] not in (LOOPBACK, "localhost"):
            raise HttpError(403, "only programs of this machine are served")
        self._authorize(head.token)
        head.check_length()
        if head.route in ("/health", "/health_generate"):
            return _healthy
        paths = {name.partition(" ")[2] for name in self._routes}
        if head.route not in paths:
            raise HttpError(404, f"{head.route} is not served here; {', '.join(sorted(self._routes))} are")
        if (name := f"{head.method} {head.route}") not in self._routes:
            methods = [name.partition(" ")[0] for name in self._routes if name.partition(" ")[2] == head.route]
            raise HttpError(405, f"use {' or '.join(methods)}")
        return self._routes[name]

    async def _respond(self, handler: Handler, head: _RequestHead, body: bytes) -> _Response:
        try:
            payload = json.loads(body) if body or head.method != "GET" else {}
        except (ValueError, RecursionError) as error:  # a number of more than 4300 digits is a ValueError too
            return _error_response(HttpError(400, f"the body is no JSON: {error}"))
        try:
            if self.orphaned:
                raise HttpError(410, "the run has ended")
            if not isinstance(payload, dict):
                raise HttpError(400, "the body is no JSON object")
            request = Request(token=head.token, payload=payload)
            future = asyncio.run_coroutine_threadsafe(_awaited(handler, request), self._engine_loop)
            return _Response(200, await asyncio.wrap_future(future))
        except HttpError as error:
            return _error_response(error)
        except SlimeError as error:
            return _error_response(HttpError(422, str(error), **error.as_dict()))
        except Exception as error:  # a handler would fail at a second attempt too
            return _error_response(HttpError(422, f"{type(error).__name__}: {error}"))


@dataclass(slots=True, frozen=True)
class _RequestHead:
    method: str
    route: str  # the path without query
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, head: bytes) -> _RequestHead:
        lines = head.decode("latin-1").split("\r\n")
        method, path, *_ = [*lines[0].split(" "), "", ""]
        pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
        headers = {name.strip().lower(): value.strip() for name, value in pairs}
        return cls(method, path.split("?")[0].rstrip("/"), headers)

    @property
    def token(self) -> str:
        kind, _, token = self.headers.get("authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""

    @property
    def length(self) -> int:
        text = self.headers.get("content-length", "0")
        return int(text) if text.isdecimal() and text.isascii() and "transfer-encoding" not in self.headers else -1

    @property
    def expects(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"

    @property
    def keep_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"

    def check_length(self) -> None:
        """Raise HttpError for a body without a length, or with one over the limit."""
        if self.length < 0:
            raise HttpError(411, "send a content-length")
        if self.length > MAX_BODY:
            raise HttpError(413, f"a body may have {MAX_BODY} bytes")


@dataclass(slots=True, frozen=True)
class _Response:
    status: int
    value: Any

    def encode(self, keep_alive: bool) -> bytes:
        """The response as HTTP; an error tells clients not to retry."""
        events = isinstance(self.value, Events)
        body = _events(self.value) if events else json.dumps(self.value).encode()
        return (
            f"HTTP/1.1 {self.status} {'OK' if self.status == 200 else 'Error'}\r\n"
            f"content-type: {'text/event-stream' if events else 'application/json'}\r\n"
            f"{'' if self.status == 200 else 'x-should-retry: false' + chr(13) + chr(10)}"
            f"content-length: {len(body)}\r\nconnection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
        ).encode() + body


def _error_response(error: HttpError) -> _Response:
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    fields = {"message": str(error), "type": kind, "param": None, "code": None, **error.fields}
    return _Response(error.status, {"error": fields})


def _events(values: Sequence[Any]) -> bytes:
    lines = [f"data: {json.dumps(value)}\n\n" for value in values]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


async def _discard_body(head: _RequestHead, reader: asyncio.StreamReader) -> bool:
    """Read the body of a request in error, so that the response reaches its client; whether all of it was read."""
    remaining = head.length
    if head.expects or not 0 <= remaining <= MAX_BODY:
        return False
    while remaining and (part := await reader.read(min(remaining, MAX_HEAD))):
        remaining -= len(part)
    return not remaining


async def _next_byte(reader: asyncio.StreamReader, requests: asyncio.Task[None] | None) -> bytes:
    """The first byte of the next request; where the client hangs up instead, the connection's task is cancelled."""
    byte = b""
    with suppress(ConnectionError):
        byte = await reader.read(1)
    if not byte and requests is not None:
        requests.cancel()
    return byte


async def _awaited(handler: Handler, request: Request) -> Any:
    return await handler(request)


async def _healthy(request: Request) -> dict[str, str]:
    return {"status": "ok"}
