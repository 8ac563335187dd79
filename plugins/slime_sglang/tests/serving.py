"""An engine over servers in this process that speak SGLang's wire: they take weights, pause, give memory, and fail."""

from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version

import numpy as np
from aiohttp import web
from faulty import TOKEN, VOCAB, Canned
from safetensors.numpy import save_file

from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_sglang.engine import FleetSettings, SglangEngine
from slime_sglang.external import NEW, OLD
from slime_sglang.server import Server
from slime_sglang.weights import Ways, WeightRoutes

__all__ = ["EPOCH", "NEW", "OLD", "PATIENCE", "Serving", "request", "serving", "update"]

EPOCH = 3
PATIENCE = 20.0


class Serving(Canned):
    """A server that can be given weights. ``refuse`` answers the next updates with an error."""

    def __init__(self, *, dp=1, **more):
        super().__init__(version="default", **more)
        self.dp, self.refuse, self.paused, self.held, self.unasked = dp, 0, [], set(), 0
        self.checksums = {"model.norm.weight": "00ff00ff00ff00ff"}

    def paths(self):
        return [path for path, _ in self.calls]

    async def _other(self, request):
        path = request.path
        if path == "/health":
            return web.Response()
        if self._refused(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json() if request.can_read_body else {}
        if path.startswith("/update_weights_from"):
            self.calls.append((path, body))
            if self.refuse:
                self.refuse -= 1
                return web.json_response({"success": False, "message": "a shard is missing"}, status=400)
            self.version = body["weight_version"]
            message = f"Succeeded to update model weights. Weight version updated to {self.version}."
            return web.json_response({"success": True, "message": message})
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            assert not self.running, "memory was taken from a server that runs requests"
            self.calls.append((path, body))
            return web.json_response({})
        if path == "/pause_generation":
            self.paused.append(body["mode"])
        if path in ("/model_info", "/server_info"):
            self.calls.append((path, body))
            facts = {"model_path": "m", "version": "0.5.23", "dp_size": self.dp, "tp_size": 1}
            return web.json_response(facts | ({"skip_tokenizer_init": True} if self.encode is None else {}))
        if path in ("/begin_weight_update", "/end_weight_update"):
            return web.json_response({"success": True, "message": "Success"})
        if path == "/weights_checker":
            return web.json_response({"success": True, "ranks": [{"checksums": self.checksums}]})
        return await super()._other(request)

    def answer(self, body, made, finish):
        if self.unasked and finish == "length":
            self.unasked -= 1
            made, finish = 0, "abort"
        return super().answer(body, made, finish)


@asynccontextmanager
async def serving(
    tmp_path, count=2, *, features=NEW, middleware=(), device="cpu", dp=1, tokenizer=None, change=None, **settings
):
    """An engine that has met ``count`` servers, each of them after ``change``; it has no weights yet."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(Serving(dp=dp, spans=features == NEW)) for _ in range(count)]
        for fake in fakes:
            if change is not None and (changing := change(fake)) is not None:
                await changing
        servers = [Server.attach(fake.url, token=TOKEN, number=number) for number, fake in enumerate(fakes)]
        ways = Ways(model=None, dtype="float32", features=features, folder=tmp_path / "weights", device=device,
                    torch=version("torch"))  # fmt: skip
        more = {"concurrency": 64, "timeout": PATIENCE, "retries": 1, "epoch": EPOCH, **settings}
        for server in servers:
            await server.ready(PATIENCE)
        engine = SglangEngine(
            servers,
            FleetSettings(vocab_size=VOCAB, context_len=512, features=features, **more),
            weights=WeightRoutes(ways),
            tokenizer=tokenizer,
            middleware=middleware,
        )
        stack.push_async_callback(engine.close)
        await engine.open()
        engine.servers = servers
        yield engine, fakes


def update(tmp_path, version, transport="disk"):
    """An update whose folder is there."""
    if transport == "tensor":
        return WeightUpdate(
            version=version, epoch=EPOCH, transport="tensor", handle={"buckets": [{"handle": "of this process"}]}
        )
    folder = tmp_path / f"v-{version}"
    folder.mkdir(exist_ok=True)
    save_file({"x": np.zeros(2, dtype=np.float32)}, folder / "model.safetensors")
    return WeightUpdate(version=version, epoch=EPOCH, transport="disk", handle={"folder": str(folder)})


def request(name, count=6, **more):
    """A request for ``count`` tokens."""
    params = SamplingParams(max_new_tokens=count, ignore_eos=True)
    return GenerateRequest(id=name, tokens=[5, 6, 7], params=params, seed=11, **more)
