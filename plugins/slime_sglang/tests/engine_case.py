"""An engine over servers in this process that speak SGLang's wire, with or without a router before them."""

import asyncio
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from fake_sglang import TOKEN, VOCAB, FakeServer, draw
from safetensors.numpy import save_file

from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate
from slime_sglang.bodies import seed
from slime_sglang.engine import FleetSettings, SglangEngine
from slime_sglang.external import NEW
from slime_sglang.gateway import Gateway
from slime_sglang.ports import router_launch
from slime_sglang.server import Server
from slime_sglang.weights import Ways, WeightRoutes

STAND_IN = Path(__file__).with_name("stand_in")
EPOCH = 3
PATIENCE = 20.0
EXPECTED = [draw(seed(11), position) for position in range(3, 9)]  # of request(...)


def run(work):
    """Run a coroutine, for so long as a test may take."""
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def request(name, count=6, **more):
    """A request for ``count`` tokens."""
    params = SamplingParams(max_new_tokens=count, ignore_eos=True)
    return GenerateRequest(id=name, tokens=[5, 6, 7], params=params, seed=11, **more)


def update(tmp_path, number, transport="disk"):
    """An update whose folder is there."""
    handle = {"buckets": [{"handle": "of this process"}]}
    if transport == "disk":
        folder = tmp_path / f"v-{number}"
        folder.mkdir(exist_ok=True)
        save_file({"x": np.zeros(2, dtype=np.float32)}, folder / "model.safetensors")
        handle = {"folder": str(folder)}
    return WeightUpdate(version=number, epoch=EPOCH, transport=transport, handle=handle)


async def begun(engine, fakes, names, count=6):
    """Requests that servers have and hold."""
    for fake in fakes:
        fake.hold = True
    tasks = {name: asyncio.create_task(engine.generate(request(name, count))) for name in names}
    for fake in fakes:
        await fake.until(lambda: sum(len(one.running) for one in fakes) == len(names))
    return tasks


@asynccontextmanager
async def over(
    servers, folder, *, features=NEW, device="cpu", tokenizer=None, middleware=(), gateway=None, **settings
):
    """An engine that has met these servers; it has no weights yet."""
    for server in servers:
        await server.ready(PATIENCE)
    ways = Ways(
        model=None, dtype="float32", features=features, folder=folder, device=device, torch=version("torch"),
        adapters=bool(settings.get("adapters")),
    )  # fmt: skip
    limits = {"concurrency": 64, "timeout": PATIENCE, "retries": 1, "epoch": EPOCH, **settings}
    engine = SglangEngine(
        servers, FleetSettings(vocab_size=VOCAB, context_len=512, features=features, **limits),
        weights=WeightRoutes(ways), tokenizer=tokenizer, middleware=middleware, gateway=gateway,
    )  # fmt: skip
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def serving(tmp_path, count=2, *, features=NEW, dp=1, change=None, **more):
    """An engine that has met ``count`` servers, each of them after ``change``."""
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(FakeServer(version="default", dp=dp, spans=features == NEW))
            for _ in range(count)
        ]
        for fake in fakes:
            if change is not None and (changing := change(fake)) is not None:
                await changing
        servers = [Server.attach(fake.url, token=TOKEN, number=number) for number, fake in enumerate(fakes)]
        engine = await stack.enter_async_context(over(servers, tmp_path / "weights", features=features, **more))
        engine.servers = servers
        yield engine, fakes


def launch(tmp_path, *behave, more=()):
    """How the stand-in of SGLang's router is started, by the real launcher."""
    env = {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1"}
    words = ("--disable-retries", "--behave", ",".join(behave), *more)
    return router_launch(python=sys.executable, arguments=words, log=tmp_path / "log" / "gateway.log", env=env)


@asynccontextmanager
async def routed(tmp_path, count=2, *behave, kinds=(), more=(), restarts=2, program=None, **settings):
    """An engine that has met its servers, and a router (the stand-in, or ``program``) that knows them."""
    notes = []
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(FakeServer(version="default", kind=kind))
            for kind in kinds or ["null"] * count
        ]
        servers = [Server.attach(fake.url, token=TOKEN, number=number) for number, fake in enumerate(fakes)]
        for server in servers:
            await server.ready(PATIENCE)
        gateway = Gateway(
            program or launch(tmp_path, *behave, more=more),
            interval=0.02, timeout=PATIENCE, start_timeout=PATIENCE, max_restarts=restarts,
            token=TOKEN if kinds else "", note=notes.append,
        )  # fmt: skip
        await stack.enter_async_context(gateway)
        opened = over(servers, tmp_path / "weights", gateway=gateway, **{"retries": 2, **settings})
        engine = await stack.enter_async_context(opened)
        yield SimpleNamespace(engine=engine, fakes=fakes, servers=servers, gateway=gateway, notes=notes)
