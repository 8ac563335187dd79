"""What SGLang's client is tested against: a server that speaks its wire, and a proxy that misbehaves on command.

    client -> FaultProxy (one fault a request, in the order given) -> Canned, or the real server

The proxy knows HTTP only as far as it must to spoil it, so the same faults run before either.
"""

import asyncio
import json
import socket
import struct
from collections import deque
from contextlib import suppress

from aiohttp import web

VOCAB = 1000
TOKEN = "a-token-for-tests"


def draw(seed, position):
    """The token at an absolute position: a function of seed and position, as SGLang's deterministic mode draws."""
    return (seed * 2654435761 + position * 40503) % (VOCAB - 10) + 5


def rows(seed, start, count):
    """``output_token_logprobs`` of ``count`` tokens from ``start`` on."""
    return [[-0.001 * (position % 700) - 0.01, draw(seed, position), None] for position in range(start, start + count)]


class Canned:
    """A server in this process whose answers are right. Enter it; ``url`` is its address.

    With ``hold`` a request waits until it is aborted, with ``made`` tokens, or until ``go`` is set. ``spans`` False is
    SGLang 0.5.12; ``chunk`` is the tokens of a streamed piece, ``incremental`` whether a piece repeats those before.
    """

    def __init__(self, *, version="3.7", spans=True, incremental=False, chunk=3, token=TOKEN):
        self.version, self.spans, self.incremental, self.chunk, self.token = version, spans, incremental, chunk, token
        self.hold, self.made, self.go = False, 2, asyncio.Event()
        self.bodies, self.aborts, self.calls = [], [], []
        self.came = asyncio.Condition()
        self.running = {}  # rid -> event of its abort
        self.most = 0  # at once
        self.canned = None  # bytes of an answer, for measurements
        self.ids = VOCAB  # of the model; None: it does not tell
        self.encode = lambda text: [ord(letter) for letter in text]  # its tokenizer; None: it runs without one

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{path}", self._other)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        self.go.set()
        for event in self.running.values():
            event.set()
        await self._runner.cleanup()

    async def until(self, ready):
        """Wait until ``ready()`` holds; it is looked at when a request comes, ends or is aborted."""
        async with self.came:
            await self.came.wait_for(ready)

    async def _tell(self):
        async with self.came:
            self.came.notify_all()

    def _refused(self, request):
        return self.token and request.headers.get("Authorization") != f"Bearer {self.token}"

    async def _other(self, request):
        if self._refused(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        path, raw = request.path, await request.read()
        body = json.loads(raw) if raw else {}
        self.calls.append((path, body))
        if path == "/abort_request":
            self.aborts.append(body)
            for rid, event in self.running.items():
                if body.get("abort_all") or rid.startswith(body["rid"]):
                    event.set()
            await self._tell()
            return web.Response()
        if path == "/tokenize":
            if self.encode is None:
                return web.json_response({"message": "'NoneType' object has no attribute 'encode'"}, status=500)
            return web.json_response({"tokens": [self.encode(text) for text in body["prompt"]]})
        if path == "/flush_cache":
            return web.Response(text="Cache flushed.\n")
        if path == "/weights_checker":
            ranks = [{"checksums": {"model.norm.weight": "00ff00ff00ff00ff"}, "parallelism_info": [{"tp_rank": 0}]}]
            return web.json_response({"success": True, "message": "Success.", "ranks": ranks})
        if path in ("/pause_generation", "/continue_generation"):
            return web.json_response({"status": "ok"})
        if path in ("/model_info", "/server_info"):
            return web.json_response({"weight_version": self.version, "version": "0.5.23"})
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _generate(self, request):
        if self.canned is not None:
            return await self._fast(request)
        if self._refused(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json()
        if body["sampling_params"].get("logit_bias"):  # an id that no model has: how a client learns their range
            said = f"logit_bias must has keys in [0, {self.ids - 1}], got 2147483647." if self.ids else "no such key"
            return web.json_response({"error": {"message": said}}, status=400)
        self.bodies.append(body)
        rid = body["rid"]
        if any(rid.startswith(other) or other.startswith(rid) for other in self.running):
            return web.json_response({"error": {"message": f"Duplicate request ID {rid}"}}, status=400)
        aborted = self.running[rid] = asyncio.Event()
        self.most = max(self.most, len(self.running))
        await self._tell()
        try:
            if body.get("stream"):
                return await self._streamed(request, body, aborted)
            if self.hold:
                waits = [asyncio.ensure_future(event.wait()) for event in (aborted, self.go)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in waits:
                    task.cancel()
            made = self.made if aborted.is_set() else body["sampling_params"]["max_new_tokens"]
            return web.json_response(self.answer(body, made, "abort" if aborted.is_set() else "length"))
        finally:
            self.running.pop(rid, None)
            await self._tell()

    async def _fast(self, request):
        rid = json.loads(await request.read())["rid"].encode()
        return web.Response(body=self.canned.replace(b"RID", rid, 1), content_type="application/json")

    async def _streamed(self, request, body, aborted):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        limit, sent = body["sampling_params"]["max_new_tokens"], 0
        for made in [*range(self.chunk, limit, self.chunk), limit]:
            if self.hold and made > self.made:
                await aborted.wait()
            if aborted.is_set():
                await self._event(response, self.answer(body, self.made, "abort"), -1)
                break
            await self._event(response, self.answer(body, made, "length" if made == limit else None), sent)
            sent = made
        with suppress(ConnectionError):
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _event(self, response, answer, sent):
        """``sent`` is how many tokens went before; -1: an abort, with all log-probs and the last id, as SGLang does."""
        if sent < 0:
            answer["output_ids"] = answer["output_ids"][-1:]
        elif self.incremental:
            answer["output_ids"], answer["text"] = answer["output_ids"][sent:], answer["text"][sent:]
            answer["meta_info"]["output_token_logprobs"] = answer["meta_info"]["output_token_logprobs"][sent:]
        with suppress(ConnectionError):
            await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")

    def answer(self, body, made, finish):
        """What SGLang says to a request after ``made`` tokens; finish None where it goes on."""
        ids, seed = body["input_ids"], body["sampling_params"].get("sampling_seed", 0)
        start = body.get("logprob_start_len", -1)
        reasons = {
            None: None,
            "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
            "length": {"type": "length", "length": made},
            "stop": {"type": "stop", "matched": 1},
        }
        new = rows(seed, len(ids), made)
        meta = {
            "id": body["rid"],
            "finish_reason": reasons[finish],
            "prompt_tokens": len(ids),
            "weight_version": self.version,
            "completion_tokens": made,
            "cached_tokens": 0,
            "output_token_logprobs": new,
        }
        if self.spans and finish is not None:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": made}]
        if start >= 0:
            meta["input_token_logprobs"] = [
                [None if i == start else -0.5 * i, ids[i], None] for i in range(start, len(ids))
            ]
        return {
            "text": "".join(chr(97 + row[1] % 26) for row in new),
            "output_ids": [row[1] for row in new],
            "meta_info": meta,
        }


class Exchange:
    """One request at the proxy, for a fault to spoil."""

    def __init__(self, proxy, head, body, writer):
        self.proxy, self.head, self.body, self.writer = proxy, head, body, writer

    async def ask(self):
        """The upstream's whole answer: (status line and headers, body)."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy.upstream)
        try:
            writer.write(_closing(self.head) + self.body)
            raw = await reader.read()
        finally:
            writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            body = _unchunked(body)
        return head, body

    async def say(self, body, *, status="200 OK", headers=(), length=None, kind="application/json"):
        """Answer with a body, and close."""
        stated = len(body) if length is None else length
        lines = [
            f"HTTP/1.1 {status}",
            f"Content-Type: {kind}",
            f"Content-Length: {stated}",
            "Connection: close",
            *headers,
        ]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def start(self, *headers):
        """Begin a chunked answer."""
        lines = ["HTTP/1.1 200 OK", "Content-Type: application/json", "Transfer-Encoding: chunked", *headers]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        await self.writer.drain()

    async def chunk(self, data):
        """A chunk of it."""
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()


class FaultProxy:
    """Relays to a port of this machine; ``add(fault, ...)`` spoils the next requests to ``path``, one fault each.

    Example:
        async with FaultProxy(server.port) as proxy:
            proxy.add(html, None, status(503))    # the second goes through
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

    async def _accept(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
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
        work = asyncio.ensure_future(fault(exchange) if fault else self._relay(exchange))
        gone = asyncio.ensure_future(reader.read())  # the client went away
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            for each in (work, gone):
                each.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _relay(self, exchange):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            writer.write(_closing(exchange.head) + exchange.body)
            while data := await reader.read(1 << 16):
                exchange.writer.write(data)
                await exchange.writer.drain()
        finally:
            writer.close()


def _closing(head):
    lines = [
        line for line in head[:-4].split(b"\r\n") if not line.lower().startswith((b"connection:", b"accept-encoding:"))
    ]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])


def _unchunked(raw):
    out = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        count = int(size, 16)
        out, raw = out + raw[:count], raw[count + 2 :]
        if not count:
            break
    return out


# -- faults


def status(code, *, headers=(), body=None):
    """Answer with a status, as SGLang words its errors."""
    said = json.dumps({"error": {"message": f"made up: {code}"}}).encode() if body is None else body

    async def fault(exchange):
        await exchange.say(said, status=f"{code} Made Up", headers=headers)

    return fault


def says(body, kind="application/json"):
    """Answer 200 with this body."""

    async def fault(exchange):
        await exchange.say(body, kind=kind)

    return fault


html = says(b"<!DOCTYPE html><html><title>Printer</title></html>" + b"." * 3000, "text/html")


async def reset(exchange):
    """Cut the connection with RST, before any answer."""
    sock = exchange.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.writer.transport.abort()


async def vanish(exchange):
    """Close in order, before any answer."""


async def hang(exchange):
    """Never answer."""
    await asyncio.Event().wait()


async def slow(exchange):
    """The right answer, a byte at a time, and never at its end."""
    _, body = await exchange.ask()
    await exchange.start()
    for i in range(len(body)):
        await exchange.chunk(body[i : i + 1])
        await asyncio.sleep(0.02)


async def cut_body(exchange):
    """Half of the answer, under the length of the whole."""
    _, body = await exchange.ask()
    await exchange.say(body[: len(body) // 2], length=len(body))


async def cut_chunk(exchange):
    """Half of a chunk."""
    _, body = await exchange.ask()
    await exchange.start()
    exchange.writer.write(f"{len(body):x}\r\n".encode() + body[: len(body) // 2])
    await exchange.writer.drain()


async def half_json(exchange):
    """Half of the JSON, as if it were whole."""
    _, body = await exchange.ask()
    await exchange.say(body[: len(body) // 2])


async def short_length(exchange):
    """A length that is too small."""
    _, body = await exchange.ask()
    await exchange.say(body, length=len(body) - 7)


async def long_length(exchange):
    """A length that is too large."""
    _, body = await exchange.ask()
    await exchange.say(body, length=len(body) + 7)


async def gzip_garbage(exchange):
    """Bytes that are said to be gzip."""
    _, body = await exchange.ask()
    await exchange.say(body, headers=["Content-Encoding: gzip"])


async def huge(exchange):
    """A stated gigabyte, of which some comes."""
    with suppress(ConnectionError):
        await exchange.say(b"[" + b"0," * 5000, length=1 << 30)
        await hang(exchange)


async def endless(exchange):
    """Chunks without end."""
    with suppress(ConnectionError):
        await exchange.start()
        while True:
            await exchange.chunk(b" " * 65536)


async def late(exchange):
    """Let the server answer, keep the answer, and cut the connection: `kept` hands it to another request."""
    exchange.proxy.kept.append((await exchange.ask())[1])
    await reset(exchange)


def begun(computing):
    """Let the server begin (until ``await computing()``) and cut the connection to the client alone; what the server says
    in the end goes to `ended`."""

    async def fault(exchange):
        reader, writer = await asyncio.open_connection("127.0.0.1", exchange.proxy.upstream)
        writer.write(_closing(exchange.head) + exchange.body)

        async def wait():
            try:
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                await exchange.proxy.ended.put((head.split()[1].decode(), body))
            finally:
                writer.close()

        task = asyncio.create_task(wait())
        exchange.proxy._tasks.add(task)
        task.add_done_callback(exchange.proxy._tasks.discard)
        await computing()
        await reset(exchange)

    return fault


async def kept(exchange):
    """Answer with what `late` kept."""
    await exchange.say(exchange.proxy.kept.popleft())


def rewrite(change):
    """The answer after ``change(answer)``, which returns another one or changes it in place; bytes are sent as they are."""

    async def fault(exchange):
        head, body = await exchange.ask()
        assert head.split()[1] == b"200", (head, body)
        answer = json.loads(body)
        changed = change(answer)
        changed = answer if changed is None else changed
        await exchange.say(changed if isinstance(changed, bytes) else json.dumps(changed).encode())

    return fault


def in_meta(**changes):
    """Rewrite entries of ``meta_info``; a callable gets the old one, None as value removes it."""

    def change(answer):
        for name, value in changes.items():
            old = answer["meta_info"].pop(name, None)
            if value is not None:
                answer["meta_info"][name] = value(old) if callable(value) else value

    return rewrite(change)


def log_prob(value, at=1):
    """Rewrite the log-prob of one new token."""

    def change(answer):
        answer["meta_info"]["output_token_logprobs"][at][0] = value

    return rewrite(change)


def emptied(answer):
    """As if the server had ended the request by itself, before its first token."""
    answer["output_ids"] = []
    answer["meta_info"] |= {
        "finish_reason": {"type": "abort", "message": "Aborted"},
        "output_token_logprobs": [],
        "completion_tokens": 0,
    }


def _one_more(answer):
    answer["output_ids"].append(5)
    answer["meta_info"]["output_token_logprobs"].append([-1.0, 5, None])


def _echo(answer):
    answer["output_ids"][:0] = [3, 4, 12]


BROKEN = [reset, vanish, cut_body, cut_chunk, half_json, short_length, long_length, gzip_garbage]
"""Case 77: what is lost on the way."""

REJECTED = {
    "79 fewer log-probs": (in_meta(output_token_logprobs=lambda old: old[:-1]), "ENG79"),
    "79 no log-probs": (in_meta(output_token_logprobs=None), "ENG79"),
    "80 NaN": (log_prob(float("nan")), "ENG80"),
    "80 null": (log_prob(None), "ENG80"),
    "80 above zero": (log_prob(0.25), "ENG80"),
    "80 minus infinity": (log_prob(float("-inf")), "ENG80"),
    "82 more tokens": (rewrite(_one_more), "ENG82"),
    "82 prompt echoed": (rewrite(_echo), "ENG82"),
    "83 no version": (in_meta(weight_version=None, weight_versions=None), "ENG83"),
    "83 older": (in_meta(weight_version="3.6", weight_versions=None), "ENG83"),
    "83 newer": (in_meta(weight_version="3.8", weight_versions=None), "ENG83"),
    "83 of another epoch": (in_meta(weight_version="2.7", weight_versions=None), "ENG83"),
}
"""Answers that cannot be, to a request of tokens 3, 4, 12 for 8 tokens where version 7 of epoch 3 alone may serve."""
