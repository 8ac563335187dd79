"""A server in this process that speaks SGLang's wire: it generates, takes weights, pauses, gives memory, and fails."""

import asyncio
import json
from base64 import b64encode
from contextlib import suppress

import numpy as np
from aiohttp import web

VOCAB = 1000
TOKEN = "a-token-for-tests"
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def draw(seed, position):
    """The token at an absolute position: a function of seed and position, as SGLang's deterministic mode draws."""
    return (seed * 2654435761 + position * 40503) % (VOCAB - 10) + 5


def rows(seed, start, count):
    """``output_token_logprobs`` of ``count`` tokens from ``start`` on."""
    return [[-0.001 * (position % 700) - 0.01, draw(seed, position), None] for position in range(start, start + count)]


def experts(count):
    """[count, 3 layers, 2], the experts of ``count`` tokens; the first layer has none."""
    chosen = np.arange(count * 6, dtype="<i4").reshape(count, 3, 2) % 64
    chosen[:, 0] = 0
    return chosen


def response(code=200, /, **body):
    """JSON, as SGLang words it."""
    return web.json_response(body, status=code)


class FakeServer:
    """Its answers are right. Enter it; ``url`` is its address.

    With ``hold`` a request waits until it is aborted, with ``made`` tokens, or until ``go`` is set. ``spans`` False is
    SGLang 0.5.12; ``chunk`` is the tokens of a streamed piece, ``incremental`` whether a piece repeats those before.
    The next ``refuse`` weight updates and ``fails`` requests get an error, the next ``unasked`` an abort.
    """

    def __init__(self, *, version="3.7", spans=True, incremental=False, chunk=3, dp=1, kind="null"):
        self.version, self.spans, self.incremental, self.chunk, self.dp = version, spans, incremental, chunk, dp
        self.kind = kind  # of disaggregation: null, prefill or decode
        self.hold, self.made, self.go = False, 2, asyncio.Event()
        self.refuse = self.fails = self.unasked = 0
        self.headers, self.rids, self.bodies = [], [], []  # of requests to generate; the last without those refused
        self.aborts, self.calls, self.paused = [], [], []
        self.came = asyncio.Condition()
        self.running = {}  # rid -> event of its abort
        self.most = 0  # at once
        self.adapters, self.loses = {}, False  # name -> what was loaded; loads that it says it did and did not
        self.checksums = {"model.norm.weight": "00ff00ff00ff00ff"}
        self.ids = VOCAB  # of the model; None: it does not tell
        self.prompt = lambda body: body["input_ids"]  # as it counts the tokens
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
        for event in (self.go, *self.running.values()):
            event.set()
        await self._runner.cleanup()

    def paths(self):
        """Paths of all calls but those to generate, in order."""
        return [path for path, _ in self.calls]

    async def until(self, ready):
        """Wait until ``ready()`` holds; it is looked at when a request comes, ends or is aborted."""
        async with self.came:
            await self.came.wait_for(ready)

    async def _notify(self):
        async with self.came:
            self.came.notify_all()

    def _unauthorized(self, request):
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return response(401, error="Unauthorized")
        return None

    async def _other(self, request):
        if request.path == "/health":
            return web.Response()
        if refusal := self._unauthorized(request):
            return refusal
        body = json.loads(await request.read() or b"{}")
        self.calls.append((request.path, body))
        if request.path == "/abort_request":
            self.aborts.append(body)
            for rid, event in self.running.items():
                if body.get("abort_all") or rid.startswith(body["rid"]):
                    event.set()
            await self._notify()
            return web.Response()
        return self._control(request.path, body)

    def _control(self, path, body):
        match path.strip("/"):
            case "tokenize":
                if self.encode is None:
                    return response(500, message="'NoneType' object has no attribute 'encode'")
                return response(tokens=[self.encode(text) for text in body["prompt"]])
            case "flush_cache":
                return web.Response(text="Cache flushed.\n")
            case "weights_checker":
                rank = {"checksums": self.checksums, "parallelism_info": [{"tp_rank": 0}]}
                return response(success=True, message="Success.", ranks=[rank])
            case "update_weights_from_disk" | "update_weights_from_tensor" | "update_weights_from_distributed":
                if self.refuse:
                    self.refuse -= 1
                    return response(400, success=False, message="a shard is missing")
                self.version = body["weight_version"]
                message = f"Succeeded to update model weights. Weight version updated to {self.version}."
                return response(success=True, message=message)
            case "load_lora_adapter" | "load_lora_adapter_from_tensors" | "unload_lora_adapter":
                return self._adapt(path, body)
            case "update_weight_version":
                self.version = body["new_version"]
                return response(success=True, message=f"Weight version updated to {self.version}")
            case "v1/models":
                models = [{"id": "m", "parent": None}, *({"id": name, "parent": "m"} for name in self.adapters)]
                return response(data=models)
            case "begin_weight_update" | "end_weight_update":
                return response(success=True, message="Success")
            case "release_memory_occupation" | "resume_memory_occupation":
                assert not self.running, "memory was taken from a server that runs requests"
                return response()
            case "pause_generation":
                self.paused.append(body["mode"])
                return response(status="ok")
            case "continue_generation":
                return response(status="ok")
            case "model_info" | "server_info":
                tokenizer = {"skip_tokenizer_init": True} if self.encode is None else {}
                parallel = {"dp_size": self.dp, "tp_size": 1, "disaggregation_mode": self.kind}
                facts = {"model_path": "m", "version": "0.5.23", "disaggregation_bootstrap_port": 8123}
                return response(weight_version=self.version, **facts, **parallel, **tokenizer)
            case "v1/loads":
                return response(
                    loads=[{"num_used_tokens": 7, "num_running_reqs": len(self.running), "num_waiting_reqs": 0}]
                )
        return response(404, detail="Not Found")

    def _adapt(self, path, body):
        name, unloads = body["lora_name"], path.endswith("unload_lora_adapter")
        assert not self.running, "an adapter is unloaded once no request has it: SGLang would wait here"
        if self.refuse or unloads != (name in self.adapters):
            self.refuse = max(0, self.refuse - 1)
            return response(400, success=False, error_message=f"{name} is {'not' if unloads else 'already'} loaded")
        if unloads:
            del self.adapters[name]
        elif not self.loses:
            self.adapters[name] = body
        return response(success=True, error_message="", loaded_adapters=dict.fromkeys(self.adapters, "m"))

    async def _generate(self, request):
        if refusal := self._unauthorized(request):
            return refusal
        body = await request.json()
        self.headers.append(dict(request.headers))
        self.rids.append(body.get("rid"))  # none: the question for the vocabulary
        if self.fails:
            self.fails -= 1
            return response(500, error={"message": "out of luck"})
        if body["sampling_params"].get("logit_bias"):  # an id that no model has: how a client learns their range
            said = f"logit_bias must has keys in [0, {self.ids - 1}], got 2147483647." if self.ids else "no such key"
            return response(400, error={"message": said})
        if (name := body.get("lora_path")) and name not in self.adapters:
            return response(400, error={"message": f"Got LoRA adapter that has never been loaded: {name}"})
        self.bodies.append(body)
        rid = body["rid"]
        if any(rid.startswith(other) or other.startswith(rid) for other in self.running):
            return response(400, error={"message": f"Duplicate request ID {rid}"})
        aborted = self.running[rid] = asyncio.Event()
        self.most = max(self.most, len(self.running))
        await self._notify()
        try:
            if body.get("stream"):
                return await self._streamed(request, body, aborted)
            if self.hold:
                waits = [asyncio.ensure_future(event.wait()) for event in (aborted, self.go)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in waits:
                    task.cancel()
            if aborted.is_set():
                return response(**self.answer(body, self.made, "abort"))
            if self.unasked:
                self.unasked -= 1
                return response(**self.answer(body, 0, "abort"))
            return response(**self.answer(body, body["sampling_params"]["max_new_tokens"], "length"))
        finally:
            self.running.pop(rid, None)
            await self._notify()

    async def _streamed(self, request, body, aborted):
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        limit, sent = body["sampling_params"]["max_new_tokens"], 0
        for made in [*range(self.chunk, limit, self.chunk), limit]:
            if self.hold and made > self.made:
                await aborted.wait()
            if aborted.is_set():
                await self._event(stream, self.answer(body, self.made, "abort"), -1)
                break
            await self._event(stream, self.answer(body, made, "length" if made == limit else None), sent)
            sent = made
        with suppress(ConnectionError):
            await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _event(self, stream, answer, sent):
        """``sent`` is how many tokens went before; -1: an abort, with all log-probs and the last id, as SGLang does."""
        if sent < 0:
            answer["output_ids"] = answer["output_ids"][-1:]
        elif self.incremental:
            answer["output_ids"], answer["text"] = answer["output_ids"][sent:], answer["text"][sent:]
            answer["meta_info"]["output_token_logprobs"] = answer["meta_info"]["output_token_logprobs"][sent:]
        with suppress(ConnectionError):
            await stream.write(b"data: " + json.dumps(answer).encode() + b"\n\n")

    def answer(self, body, made, finish):
        """What SGLang says to a request after ``made`` tokens; ``finish`` None where it goes on."""
        ids, seed = self.prompt(body), body["sampling_params"].get("sampling_seed", 0)
        start, new = body.get("logprob_start_len", -1), rows(seed, len(ids), made)
        reasons = {
            "abort": ABORTED,
            "length": {"type": "length", "length": made},
            "stop": {"type": "stop", "matched": 1},
        }
        meta = {
            "id": body["rid"], "finish_reason": reasons.get(finish), "prompt_tokens": len(ids), "cached_tokens": 0,
            "weight_version": self.version, "completion_tokens": made, "output_token_logprobs": new,
        }  # fmt: skip
        if body.get("return_routed_experts") and finish is not None:
            meta["routed_experts"] = b64encode(experts(len(ids) + made - 1).tobytes()).decode()
        if self.spans and finish is not None:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": made}]
        if start >= 0:
            scores = [[None if i == start else -0.5 * i, ids[i], None] for i in range(start, len(ids))]
            meta["input_token_logprobs"] = scores
        text = "".join(chr(97 + row[1] % 26) for row in new)
        return {"text": text, "output_ids": [row[1] for row in new], "meta_info": meta}
