"""What SGLang's client is tested against: a server that speaks its wire, and a proxy that misbehaves on command.

    client -> FaultProxy (one fault a request, in the order given) -> Canned, or the real server

The proxy knows HTTP only as far as it must to spoil it, so the same faults run before either.
"""

import asyncio
import json
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
        app.router.add_route("*", "/{path:.+}", self._other)
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
            writer.write(closing(self.head) + self.body)
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
            proxy.add(faults.html, None, faults.status(503))    # the second goes through
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
            writer.write(closing(exchange.head) + exchange.body)
            while data := await reader.read(1 << 16):
                exchange.writer.write(data)
                await exchange.writer.drain()
        finally:
            writer.close()


def closing(head):
    """The head of a request, told to close the connection and to take no encoding."""
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
