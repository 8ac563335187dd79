"""An HTTP server before a run's engine, for programs on this machine: uvicorn, on its own thread or the engine's loop.

    client -> head -> authorized? -> body, parsed -> [the engine's loop: handler] -> JSON, or server-sent events

It listens on 127.0.0.1 only and refuses what a web page could send: an Origin, or a Host that is not the loopback.
A client that hangs up cancels its handler.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import resource
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from slime_compat.handlers import LOOPBACK, Authorize, Events, Handler, HttpError, NamedEvents, Request
from slime_core.errors import SlimeError

MAX_BODY = 64 << 20
MAX_HEAD = 64 << 10
MOST_OPEN = 4096
"""Idle connections; of more, those that are idle for longest are closed. At most half of this process's files."""
IDLE_SECONDS = 600  # longer than clients keep theirs: a request that meets a connection's end is lost
REFUSED = f"No HTTP/1.1, or a head of more than {MAX_HEAD} bytes."
Client = tuple[str, int] | None
"""The address of a connection's other end."""
CLOSE_SECONDS = 1.0  # for a client to read its response when the server closes


def require_token(token: str) -> Authorize:
    """Accept requests with ``token``; all requests where it is empty."""

    def authorize(bearer: str) -> None:
        if token and not hmac.compare_digest(bearer.encode("latin-1"), token.encode()):
            raise HttpError(401, "the token is missing or wrong")

    return authorize


class _Connection(HttpToolsProtocol):
    """A connection that gives way to others while none of its requests is handled, and speaks HTTP/1.1 throughout."""

    _head_bytes = 0  # of a head that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close those that are idle for longest where there are too many."""
        super().connection_made(transport)
        idle: dict[Client, asyncio.Transport] = self.app_state["idle"]
        idle[self.client] = transport
        while len(idle) > min(MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            idle.pop(next(iter(idle))).close()

    def data_received(self, data: bytes) -> None:
        """Refuse a head that does not end."""
        self._head_bytes += len(data) if self.cycle is None or not self.cycle.more_body else 0
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._feed(data)
        except HttpParserError:
            self.send_400_response(REFUSED)
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(REFUSED)

    def _feed(self, data: bytes) -> bytes:
        """Parse ``data`` up to a head that offers another protocol, and return what is left, from that head on.

        The head no longer has the offer, which a server may pass over (RFC 9110, section 7.8).
        """
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:
            line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
            self.parser = HttpRequestParser(self)
            return b"\r\n".join([line, *fields, b"", data[offer.args[0] :]])
        return b""

    def on_headers_complete(self) -> None:
        """Begin the request, unless its head is too long or is read again; count the next head from 0."""
        if self._head_bytes > MAX_HEAD and sum(len(name) + len(text) + 4 for name, text in self.headers) > MAX_HEAD:
            raise HttpParserError("the head is too long")
        self._head_bytes = 0
        if not self.parser.should_upgrade():
            super().on_headers_complete()
        elif self.parser.get_method() == b"CONNECT":
            raise HttpParserError("this server is not a proxy")

    def on_message_complete(self) -> None:
        """End the request's body."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the handler of its request."""
        self.app_state["idle"].pop(self.client, None)
        if handler := self.app_state["handlers"].get(self.client):
            handler.cancel()
        super().connection_lost(exc)


class LoopbackServer(uvicorn.Server):
    """An HTTP server on a free port. ``routes`` maps ``"POST /path"`` to handlers, which run on ``loop``.

    Its own thread can be started and closed from anywhere. Without one (``threaded=False``, from within ``loop``) many
    small requests are served several times faster: two busy threads wait for the interpreter's lock at every read.

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
        threaded: bool = True,
        max_body: int = MAX_BODY,
    ) -> None:
        self._routes, self._engine_loop, self._authorize = dict(routes), loop, authorize
        self._max_body = max_body
        self._socket = socket.create_server((LOOPBACK, 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop() if threaded else loop
        self._stop = asyncio.Event()
        self._idle: dict[Client, asyncio.Transport] = {}  # connections without a request that is handled
        self._handlers: dict[Client, asyncio.Task[Any]] = {}
        super().__init__(
            uvicorn.Config(
                self._respond,
                interface="asgi3",
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=IDLE_SECONDS,
            )
        )
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="slime-loopback", daemon=True)
            self._thread.start()
        else:
            self._serving = loop.create_task(self._serve(sockets=[self._socket]))

    @property
    def orphaned(self) -> bool:
        """Whether the engine's loop has ended, so that no handler can run any more."""
        return self._engine_loop.is_closed()

    def close(self) -> None:
        """Stop the thread that serves and free the port."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(5)

    async def aclose(self) -> None:
        """Stop serving on the engine's loop and free the port."""
        self._stop.set()
        await self._serving

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self.serve(sockets=[self._socket]))
        finally:
            self._loop.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; connections share two tables."""
        self.lifespan.state.update(idle=self._idle, handlers=self._handlers)
        await super().startup(sockets)

    async def main_loop(self) -> None:
        """Serve until :meth:`close`; connections accepted last are tracked afterwards."""
        await self._stop.wait()
        self._loop.remove_reader(self._socket)
        for _ in range(3):
            await asyncio.sleep(0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End every connection, those of clients that do not read after CLOSE_SECONDS."""
        connections = self.server_state.connections
        for server in self.servers:
            server.close()
        for handler in self._handlers.values():
            handler.cancel()
        for connection in list(connections):
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while connections:
                    await asyncio.sleep(0.005)
        for connection in list(connections):
            connection.transport.abort()
        while connections or self.server_state.tasks:
            await asyncio.sleep(0.005)

    async def _respond(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[..., Any]) -> None:
        """See ASGI."""
        try:
            status, value = 200, await self._value(scope, receive)
        except (_HungUp, asyncio.CancelledError):
            if not self._stop.is_set():
                return
            status, value = 503, HttpError(503, "the run has ended").body()
        except HttpError as error:
            status, value = error.status, error.body()
        except SlimeError as error:
            status, value = 422, HttpError(422, str(error), **error.as_dict()).body()
        except Exception as error:  # a handler would fail at a second attempt too
            status, value = 422, HttpError(422, f"{type(error).__name__}: {error}").body()
        events = isinstance(value, Events)
        body = _events(value) if events else json.dumps(value).encode()
        headers = {"content-type": "text/event-stream" if events else "application/json"}
        headers["content-length"] = str(len(body))
        if status != 200:
            headers["x-should-retry"] = "false"
        if status == 401 or status >= 500:
            headers["connection"] = "close"
        pairs = [(name.encode(), text.encode()) for name, text in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    async def _value(self, scope: Any, receive: Callable[[], Awaitable[Any]]) -> Any:
        """What the handler of a request returns.

        Raises:
            HttpError: 400 the body is no JSON object, 401, 403, 404, 405, 410 the run has ended, 411, 413; or what the
                handler raises.
        """
        headers = {name.decode("latin-1"): text.decode("latin-1").strip() for name, text in scope["headers"]}
        if "origin" in headers or headers.get("host", "").split(":")[0] not in (LOOPBACK, "localhost"):
            raise HttpError(403, "only programs of this machine are served")
        kind, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        self._authorize(bearer)
        handler = self._handler(scope["method"], scope["path"].rstrip("/"))
        if "transfer-encoding" in headers:
            raise HttpError(411, "send a content-length")
        if int(headers.get("content-length", "0")) > self._max_body:
            raise HttpError(413, f"a body may have {self._max_body} bytes")
        body = await _body_of(receive)
        try:
            payload = json.loads(body) if body or scope["method"] != "GET" else {}
        except (ValueError, RecursionError) as error:  # a number of more than 4300 digits is a ValueError too
            raise HttpError(400, f"the body is not JSON: {error}") from error
        if not isinstance(payload, dict):
            raise HttpError(400, "the body is not a JSON object")
        if self.orphaned:
            raise HttpError(410, "the run has ended")
        return await self._handled(handler, Request(token=bearer, payload=payload, headers=headers), scope["client"])

    def _handler(self, method: str, path: str) -> Handler:
        if path in ("/health", "/health_generate"):
            return _healthy
        methods = [name.partition(" ")[0] for name in self._routes if name.partition(" ")[2] == path]
        if not methods:
            raise HttpError(404, f"{path} is not served here; {', '.join(sorted(self._routes))} are")
        if method not in methods:
            raise HttpError(405, f"use {' or '.join(methods)}")
        return self._routes[f"{method} {path}"]

    async def _handled(self, handler: Handler, request: Request, client: Client) -> Any:
        """What ``handler`` returns, on the engine's loop; cancelled where the client hangs up or the server ends."""
        transport = self._idle.pop(client, None)
        task = asyncio.current_task()
        if transport is None or task is None:
            raise _HungUp  # it was closed meanwhile
        self._handlers[client] = task
        try:
            if self._thread is None:
                return await handler(request)
            work = asyncio.run_coroutine_threadsafe(_awaited(handler(request)), self._engine_loop)
            return await asyncio.wrap_future(work)
        finally:
            del self._handlers[client]
            if not transport.is_closing():
                self._idle[client] = transport


class _HungUp(Exception):
    """Nobody waits for the response."""


async def _body_of(receive: Callable[[], Awaitable[Any]]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _HungUp
        body += message["body"]
        if not message["more_body"]:
            return bytes(body)


def _events(values: Events) -> bytes:
    if isinstance(values, NamedEvents):
        return "".join(f"event: {value['type']}\ndata: {json.dumps(value)}\n\n" for value in values).encode()
    lines = [f"data: {json.dumps(value)}\n\n" for value in values]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


async def _healthy(request: Request) -> dict[str, str]:
    return {"status": "ok"}
