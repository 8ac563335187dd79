"""A loopback door before a run's engine: HTTP requests in, the handler of their route asked, its answer out.

    caller -> head -> admitted? -> body, parsed -> [the engine's loop: handler] -> JSON, or server-sent events
              `----------------- the door's own thread ------------------'          (written by the door's thread)

The door listens on 127.0.0.1 only and refuses what a web page could send (an Origin, or a Host that is not the
loopback). A caller who hangs up while a handler works cancels it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slime_core.errors import SlimeError

LOOPBACK = "127.0.0.1"
MAX_BODY = 64 << 20
MAX_HEAD = 64 << 10
HEAD_SECONDS = 30.0
PARTING_SECONDS = 1.0  # how long an answer may take to be read when the door closes


class Refused(Exception):
    """A request that cannot be served, with its HTTP status; ``more`` joins the message in the answer's ``error``."""

    def __init__(self, status: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status, self.more = status, more


@dataclass(slots=True, frozen=True, kw_only=True)
class Asked:
    """A request that was let in."""

    token: str  # its bearer token; empty where it has none
    payload: dict[str, Any]  # the body's JSON object; empty for GET


class Events(list[Any]):
    """An answer that goes out as server-sent events, a JSON value each."""


Handler = Callable[[Asked], Awaitable[Any]]
Admit = Callable[[str], None]
"""Told a request's bearer token before the body is read, on the door's thread; raises :class:`Refused`."""


def only(token: str) -> Admit:
    """Let in who bears ``token``; everybody where it is empty."""

    def admit(given: str) -> None:
        if token and not hmac.compare_digest(given.encode("latin-1"), token.encode()):
            raise Refused(401, "the token is missing or wrong")

    return admit


class Door:
    """An HTTP server on a free port. ``routes`` maps ``"POST /path"`` to handlers, which run on ``loop``.

    Example:
        door = Door({"POST /generate": handle}, asyncio.get_running_loop(), only("secret"))
        ...
        door.close()
    """

    def __init__(
        self,
        routes: Mapping[str, Handler],
        loop: asyncio.AbstractEventLoop,
        admit: Admit,
        *,
        head_seconds: float = HEAD_SECONDS,
    ) -> None:
        self._head_seconds = head_seconds
        self._routes, self._engine_loop, self._admit = dict(routes), loop, admit
        self._socket = socket.create_server((LOOPBACK, 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._stopped: asyncio.Task[bool]  # the wait for it
        self.served: Counter[int] = Counter()  # answers by HTTP status
        self._thread = threading.Thread(target=self._run, name="slime-door", daemon=True)
        self._thread.start()

    @property
    def stranded(self) -> bool:
        """Whether the engine's loop has ended, so that nothing can be answered any more."""
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
        server = await asyncio.start_server(self._meet, sock=self._socket, limit=MAX_HEAD)
        await self._stopped
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(left)  # asyncio's own, of callers just let in, begin the last meetings
        server.close()  # last: asyncio forgets the socket of a caller whom it lets in to a closed server

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A caller, until the connection is gone: the loop may not end before."""
        talk = self._loop.create_task(self._talk(reader, writer))
        await asyncio.wait({talk, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        talk.cancel()
        writer.close()
        gone = self._loop.create_task(writer.wait_closed())
        await asyncio.wait({gone, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({gone}, timeout=PARTING_SECONDS)
        writer.transport.abort()  # of one who does not read
        with suppress(OSError):
            await gone
        await asyncio.wait({talk})

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        early = b""  # of the next request, seen while the last was served
        ends = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with suppress(*ends, asyncio.CancelledError):
            while True:
                async with asyncio.timeout(self._head_seconds):
                    head = _Head.parse(early + await reader.readuntil(b"\r\n\r\n"))
                watch = None
                try:
                    handler = self._handler(head)
                    if head.expects:
                        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    body = await reader.readexactly(head.length)
                    watch = self._loop.create_task(_next_byte(reader, asyncio.current_task()))
                    answer = await self._answer(handler, head, body)
                    stay = head.stays and answer.status < 500
                except Refused as refused:
                    answer = _refusal(refused)
                    stay = head.stays and await _dropped(head, reader) and refused.status != 401
                finally:
                    if watch is not None:
                        watch.cancel()
                self.served[answer.status] += 1
                writer.write(answer.encoded(stay))
                await writer.drain()
                if not stay:
                    return
                early = b""
                if watch is not None:
                    await asyncio.wait({watch})
                    early = b"" if watch.cancelled() else watch.result()

    def _handler(self, head: _Head) -> Handler:
        """Who serves a request; asked before its body is read."""
        if "origin" in head.headers or head.headers.get("host", LOOPBACK).split(":")[0] not in (LOOPBACK, "localhost"):
            raise Refused(403, "only programs of this machine may ask")
        self._admit(head.token)
        head.check_length()
        if head.route in ("/health", "/health_generate"):
            return _healthy
        paths = {name.partition(" ")[2] for name in self._routes}
        if head.route not in paths:
            raise Refused(404, f"{head.route} is not served here; {', '.join(sorted(self._routes))} are")
        if (name := f"{head.method} {head.route}") not in self._routes:
            known = [name.partition(" ")[0] for name in self._routes if name.partition(" ")[2] == head.route]
            raise Refused(405, f"use {' or '.join(known)}")
        return self._routes[name]

    async def _answer(self, handler: Handler, head: _Head, body: bytes) -> _Answer:
        try:
            payload = json.loads(body) if body or head.method != "GET" else {}
        except (ValueError, RecursionError) as error:  # a number of more than 4300 digits is a ValueError too
            return _refusal(Refused(400, f"the body is no JSON: {error}"))
        try:
            if self.stranded:
                raise Refused(410, "the run has ended")
            if not isinstance(payload, dict):
                raise Refused(400, "the body is no JSON object")
            asked = Asked(token=head.token, payload=payload)
            found = asyncio.run_coroutine_threadsafe(_awaited(handler, asked), self._engine_loop)
            return _Answer(200, await asyncio.wrap_future(found))
        except Refused as refused:
            return _refusal(refused)
        except SlimeError as error:
            return _refusal(Refused(422, str(error), **error.as_dict()))
        except Exception as error:  # nothing behind a loopback door is better at a second try
            return _refusal(Refused(422, f"{type(error).__name__}: {error}"))


@dataclass(slots=True, frozen=True)
class _Head:
    method: str
    route: str  # the path without query
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, head: bytes) -> _Head:
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
    def stays(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"

    def check_length(self) -> None:
        """Raises Refused for a body of unknown or unreasonable length."""
        if self.length < 0:
            raise Refused(411, "send a content-length")
        if self.length > MAX_BODY:
            raise Refused(413, f"a body may have {MAX_BODY} bytes")


@dataclass(slots=True, frozen=True)
class _Answer:
    status: int
    value: Any

    def encoded(self, stay: bool) -> bytes:
        """The whole answer as HTTP. Clients are told that a refusal is final."""
        events = isinstance(self.value, Events)
        body = _events(self.value) if events else json.dumps(self.value).encode()
        return (
            f"HTTP/1.1 {self.status} {'OK' if self.status == 200 else 'Error'}\r\n"
            f"content-type: {'text/event-stream' if events else 'application/json'}\r\n"
            f"{'' if self.status == 200 else 'x-should-retry: false' + chr(13) + chr(10)}"
            f"content-length: {len(body)}\r\nconnection: {'keep-alive' if stay else 'close'}\r\n\r\n"
        ).encode() + body


def _refusal(refused: Refused) -> _Answer:
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    error = {"message": str(refused), "type": kind, "param": None, "code": None, **refused.more}
    return _Answer(refused.status, {"error": error})


def _events(values: Sequence[Any]) -> bytes:
    lines = [f"data: {json.dumps(value)}\n\n" for value in values]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


async def _dropped(head: _Head, reader: asyncio.StreamReader) -> bool:
    """Read the body of a refused request, so that the refusal reaches its caller; whether it was read."""
    left = head.length
    if head.expects or not 0 <= left <= MAX_BODY:
        return False
    while left and (part := await reader.read(min(left, MAX_HEAD))):
        left -= len(part)
    return not left


async def _next_byte(reader: asyncio.StreamReader, talk: asyncio.Task[None] | None) -> bytes:
    """The first byte of the next request; where the caller hangs up instead, the talk ends."""
    byte = b""
    with suppress(ConnectionError):
        byte = await reader.read(1)
    if not byte and talk is not None:
        talk.cancel()
    return byte


async def _awaited(handler: Handler, asked: Asked) -> Any:
    return await handler(asked)


async def _healthy(asked: Asked) -> dict[str, str]:
    return {"status": "ok"}
