"""A loopback door of SGLang's shape: `POST /generate` in, the run's engine asked, SGLang's answer out.

The door lives on a thread of its own and hands requests to the loop that the engine belongs to. It listens on
127.0.0.1 only and refuses what a web page could send (an Origin, or a Host that is not the loopback).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from slime_core.errors import SlimeError

LOOPBACK = "127.0.0.1"
MAX_BODY = 64 << 20
MAX_HEAD = 64 << 10
PARTING_SECONDS = 1.0  # how long an answer may take to be read when the door closes

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class Refused(Exception):
    """A request that cannot be served, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Door:
    """An HTTP server on a free port; ``handle`` runs on ``loop``. With a ``token``, each request must bear it."""

    def __init__(self, handle: Handler, loop: asyncio.AbstractEventLoop, token: str = "") -> None:
        self._handle, self._engine_loop = handle, loop
        self._bearer = f"Bearer {token}".encode() if token else b""
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
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, headers = _parse(head)
                status, answer = await self._answer(method, path, headers, reader)
                self.served[status] += 1
                stay = headers.get("connection", "").lower() != "close" and status < 500 and status != 401
                body = json.dumps(answer).encode()
                writer.write(
                    f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\nconnection: {'keep-alive' if stay else 'close'}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
                if not stay:
                    return

    async def _answer(
        self, method: str, path: str, headers: Mapping[str, str], reader: asyncio.StreamReader
    ) -> tuple[int, Any]:
        try:
            if "origin" in headers or headers.get("host", LOOPBACK).split(":")[0] not in (LOOPBACK, "localhost"):
                raise Refused(403, "only programs of this machine may ask")
            given = headers.get("authorization", "").encode("latin-1")
            if self._bearer and not hmac.compare_digest(given, self._bearer):
                raise Refused(401, "the token is missing or wrong")
            length = _length(headers)
            body = await reader.readexactly(length)
            route = path.split("?")[0].rstrip("/")
            if route in ("/health", "/health_generate"):
                return 200, {"status": "ok"}
            if route != "/generate":
                raise Refused(404, f"{path} is not served here; POST /generate is")
            if method not in ("POST", "PUT"):
                raise Refused(405, "use POST")
            payload = json.loads(body)
            if self.stranded:
                raise Refused(410, "the run has ended")
            if not isinstance(payload, dict):
                raise Refused(400, "the body is no JSON object")
            asked = asyncio.run_coroutine_threadsafe(_awaited(self._handle, payload), self._engine_loop)
            return 200, await asyncio.wrap_future(asked)
        except Refused as refused:
            return refused.status, {"error": {"message": str(refused)}}
        except json.JSONDecodeError as error:
            return 400, {"error": {"message": f"the body is no JSON: {error}"}}
        except SlimeError as error:
            return 422, {"error": {"message": str(error), **error.as_dict()}}
        except Exception as error:  # nothing behind a loopback door is better at a second try
            return 422, {"error": {"message": f"{type(error).__name__}: {error}"}}


async def _awaited(handle: Handler, payload: dict[str, Any]) -> Any:
    return await handle(payload)


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    lines = head.decode("latin-1").split("\r\n")
    method, path, *_ = [*lines[0].split(" "), "", ""]
    pairs = (line.split(":", 1) for line in lines[1:] if ":" in line)
    return method, path, {name.strip().lower(): value.strip() for name, value in pairs}


def _length(headers: Mapping[str, str]) -> int:
    text = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not text.isdigit():
        raise Refused(411, "send a content-length")
    if int(text) > MAX_BODY:
        raise Refused(413, f"a body may have {MAX_BODY} bytes")
    return int(text)
