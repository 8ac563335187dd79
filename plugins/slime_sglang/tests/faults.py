"""A proxy that spoils answers on command, and the ways in which it does: what SGLang's client is tested against.

    client -> FaultProxy (one fault a request, in the order given) -> FakeServer, or the real server

The proxy knows HTTP only as far as it must to spoil it, so the same faults run before either. A fault is a coroutine
over one exchange, or a function that makes one.
"""

import asyncio
import json
import socket
import struct
from collections import deque
from contextlib import asynccontextmanager, suppress


class Exchange:
    """One request at the proxy, for a fault to spoil."""

    def __init__(self, proxy, head, body, writer):
        self.proxy, self.head, self.body, self.writer = proxy, head, body, writer

    @asynccontextmanager
    async def upstream(self):
        """A reader of the server's answer; the server is told to close the connection and to take no encoding."""
        hidden = (b"connection:", b"accept-encoding:")
        lines = [line for line in self.head[:-4].split(b"\r\n") if not line.lower().startswith(hidden)]
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy.upstream)
        try:
            writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + self.body)
            yield reader
        finally:
            writer.close()

    async def ask(self):
        """The upstream's whole answer: (status line and headers, body)."""
        async with self.upstream() as reader:
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return head, unchunked(body) if b"transfer-encoding: chunked" in head.lower() else body

    async def say(self, body, kind="application/json", *, status="200 OK", headers=(), length=None):
        """Answer with a body, and close."""
        stated = f"Content-Length: {len(body) if length is None else length}"
        lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", stated, "Connection: close", *headers]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def start(self):
        """Begin a chunked answer."""
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self.writer.drain()

    async def chunk(self, data):
        """A chunk of it."""
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()


def unchunked(raw):
    """The body of a chunked answer."""
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        count = int(size, 16)
        body, raw = body + raw[:count], raw[count + 2 :]
    return body


class FaultProxy:
    """Relays to a port of this machine; ``add(fault, ...)`` spoils the next requests to ``path``, one fault each.

    Example:
        async with FaultProxy(server.port) as proxy:
            proxy.add(faults.html, None, faults.status(503))  # the second goes through
    """

    def __init__(self, upstream):
        self.upstream = upstream
        self.port = 0
        self.kept = deque()  # answers for `late`
        self.ended = asyncio.Queue()  # (status, body) of requests that `begun` left alone
        self.paths = []  # of every request, in order
        self._faults, self._always = {}, {}
        self._tasks = set()
        self._server = None

    async def __aenter__(self):
        await self.up()
        return self

    async def __aexit__(self, *_):
        await self.down()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    async def up(self):
        """Listen, on the same port as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def down(self):
        """Refuse connections and cut those that are open."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def add(self, *faults, path="/generate"):
        """The next requests to ``path`` meet these; None goes through."""
        self._faults.setdefault(path, deque()).extend(faults)

    def always(self, fault, path="/generate"):
        """Every request to ``path`` meets this."""
        self._always[path] = fault

    def count(self, path):
        """Requests to a path so far."""
        return self.paths.count(path)

    def keep(self, task):
        """Cancel a task when the proxy ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, reader, writer):
        self.keep(asyncio.current_task())
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        path = head.split()[1].decode()
        self.paths.append(path)
        faults = self._faults.get(path)
        fault = faults.popleft() if faults else self._always.get(path)
        exchange = Exchange(self, head, body, writer)
        work = asyncio.ensure_future((fault or relay)(exchange))
        gone = asyncio.ensure_future(reader.read())  # the client went away
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for each in (work, gone):
                each.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)


async def relay(exchange):
    """No fault: the server's answer as it comes."""
    async with exchange.upstream() as reader:
        while data := await reader.read(1 << 16):
            exchange.writer.write(data)
            await exchange.writer.drain()


def says(body, kind="application/json", **head):
    """Answer with this body."""

    async def fault(exchange):
        await exchange.say(body, kind, **head)

    return fault


def status(code, *, headers=(), body=None):
    """Answer with a status, as SGLang words its errors."""
    said = json.dumps({"error": {"message": f"made up: {code}"}}).encode() if body is None else body
    return says(said, status=f"{code} Made Up", headers=headers)


html = says(b"<!DOCTYPE html><html><title>Printer</title></html>" + b"." * 3000, "text/html")


async def reset(exchange):
    """Cut the connection with RST, before any answer."""
    sock = exchange.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.writer.transport.abort()


async def hang(_):
    """Never answer."""
    await asyncio.Event().wait()


async def slow(exchange):
    """The right answer, a byte at a time, and never at its end."""
    _, body = await exchange.ask()
    await exchange.start()
    for i in range(len(body)):
        await exchange.chunk(body[i : i + 1])
        await asyncio.sleep(0.02)


def cut(share=1.0, more=0, *, headers=(), closed=False):
    """A share of the answer; the stated length is that of the whole and ``more``, or where ``closed`` of the share."""

    async def fault(exchange):
        _, body = await exchange.ask()
        part = body[: int(share * len(body))]
        await exchange.say(part, length=len(part) if closed else len(body) + more, headers=headers)

    return fault


async def huge(exchange):
    """A stated gigabyte, of which some comes."""
    with suppress(ConnectionError):
        await exchange.say(b"[" + b"0," * 5000, length=1 << 30)
        await hang(exchange)


async def late(exchange):
    """Let the server answer, keep the answer, and cut the connection: `kept` hands it to another request."""
    exchange.proxy.kept.append((await exchange.ask())[1])
    await reset(exchange)


async def kept(exchange):
    """Answer with what `late` kept."""
    await exchange.say(exchange.proxy.kept.popleft())


def begun(computing):
    """Let the server begin (until ``await computing()``) and cut the connection to the client alone; what the server
    says in the end goes to `ended`."""

    async def fault(exchange):
        async def wait():
            head, body = await exchange.ask()
            await exchange.proxy.ended.put((head.split()[1].decode(), body))

        exchange.proxy.keep(asyncio.create_task(wait()))
        await computing()
        await reset(exchange)

    return fault


def rewrite(change):
    """The answer after ``change(answer)``, which changes it in place."""

    async def fault(exchange):
        head, body = await exchange.ask()
        assert head.split()[1] == b"200", (head, body)
        answer = json.loads(body)
        change(answer)
        await exchange.say(json.dumps(answer).encode())

    return fault


def in_meta(**changes):
    """Rewrite entries of ``meta_info``; a callable gets the old one, None as value removes it."""

    def change(answer):
        for name, value in changes.items():
            old = answer["meta_info"].pop(name, None)
            if value is not None:
                answer["meta_info"][name] = value(old) if callable(value) else value

    return rewrite(change)


def _emptied(answer):
    answer["output_ids"] = []
    reason = {"type": "abort", "message": "Aborted"}
    answer["meta_info"] |= {"finish_reason": reason, "output_token_logprobs": [], "completion_tokens": 0}


emptied = rewrite(_emptied)
"""As if the server had ended the request by itself, before its first token."""
