"""An engine over servers in this process with a router before them: the real launcher around a stand-in for SGLang's."""

import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

from aiohttp import web
from faulty import TOKEN, VOCAB
from serving import EPOCH, NEW, PATIENCE, Serving

from slime_sglang.engine import FleetSettings, SglangEngine
from slime_sglang.gateway import Gateway
from slime_sglang.ports import router_launch
from slime_sglang.server import Server
from slime_sglang.weights import Ways, WeightRoutes

STAND_IN = Path(__file__).with_name("stand_in")


class Kind(Serving):
    """A server of a kind: regular, prefill or decode; what it is asked comes with its headers."""

    def __init__(self, kind="null", **more):
        super().__init__(**more)
        self.kind, self.headers, self.rids, self.fails = kind, [], [], 0

    async def _generate(self, request):
        self.headers.append(dict(request.headers))
        self.rids.append((await request.json()).get("rid"))  # none: the question for the vocabulary
        if self.fails:
            self.fails -= 1
            return web.json_response({"error": {"message": "out of luck"}}, status=500)
        return await super()._generate(request)

    async def _other(self, request):
        if request.path == "/v1/loads":
            counts = {"num_used_tokens": 7, "num_running_reqs": len(self.running), "num_waiting_reqs": 0}
            return web.json_response({"loads": [counts]})
        answer = await super()._other(request)
        if request.path == "/server_info" and answer.status == 200:
            facts = {"model_path": "m", "version": "0.5.23", "dp_size": 1, "tp_size": 1}
            port = {"disaggregation_bootstrap_port": 8123}
            return web.json_response(facts | {"disaggregation_mode": self.kind} | port)
        return answer


def launch(tmp_path, *behave, more=()):
    """How the stand-in is started."""
    env = {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ["--disable-retries", "--behave", ",".join(behave), *more]
    log = tmp_path / "log" / "gateway.log"
    return router_launch(
        python=sys.executable,
        arguments=tuple(words),
        log=log,
        env=env,
    )


@asynccontextmanager
async def routed(tmp_path, count=2, *behave, kinds=(), more=(), restarts=2, program=None, **settings):
    """An engine that has met its servers, and a router (the stand-in, or ``program``) that knows them; no weights yet."""
    notes = []
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(Kind(kind)) for kind in kinds or ["null"] * count]
        servers = [Server.attach(fake.url, token=TOKEN, number=number) for number, fake in enumerate(fakes)]
        for server in servers:
            await server.ready(PATIENCE)
        gateway = Gateway(
            program or launch(tmp_path, *behave, more=more),
            interval=0.02,
            timeout=PATIENCE,
            start_timeout=PATIENCE,
            max_restarts=restarts,
            token=TOKEN if kinds else "",
            note=notes.append,
        )
        await stack.enter_async_context(gateway)
        ways = Ways(model=None, dtype="float32", features=NEW, folder=tmp_path / "weights", device="cpu")
        words = {"concurrency": 64, "timeout": PATIENCE, "retries": 2, "epoch": EPOCH, **settings}
        engine = SglangEngine(
            servers,
            FleetSettings(vocab_size=VOCAB, context_len=512, features=NEW, **words),
            weights=WeightRoutes(ways),
            gateway=gateway,
        )
        stack.push_async_callback(engine.close)
        await engine.open()
        yield SimpleNamespace(engine=engine, fakes=fakes, servers=servers, gateway=gateway, notes=notes)
