"""slime's engine over a server of these tests, and updates for it by disk, as a trainer would have published them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from raw_server import RawServer
from safetensors.torch import load_file

from slime_core.backends import EngineStart
from slime_core.config.load import load_config
from slime_core.testing.contracts import EngineCase, EngineCheck
from slime_core.types import Completion, GenerateRequest, SamplingParams, WeightUpdate
from slime_core.weights.canary import compare
from slime_core.weights.folder import ModelFolder
from slime_core.weights.hashing import layout_name
from slime_sglang import start as cluster
from slime_sglang.engine import SglangEngine
from slime_sglang.external import features
from slime_sglang.hashing import expected
from slime_sglang.health import Watch
from slime_sglang.model_servers import ModelServers
from slime_sglang.server import Server
from slime_sglang.server_health import WatchLimits
from slime_sglang.topology import POLICY

EPOCH = 7
PROMPT = [13, 14, 15]
VERSION = "0.5.23"  # of constraints-sglang.txt


@asynccontextmanager
async def serving(
    server: Server, model: Path, folder: Path, notes: list[str], *flags: str, limits: WatchLimits | None = None
) -> AsyncIterator[SglangEngine]:
    """The engine that a run would have over this server; it has no weights yet."""
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[rollout]\nhf_checkpoint = {json.dumps(str(model))}\nrollout_engine = "sglang"\n')
    config = load_config(recipe, ["--device", "cpu", "--dtype", "float32", *flags])
    opened = ModelFolder.open(model)
    part = ModelServers(role=POLICY, model=str(model), servers=(server,), features=features(VERSION), version=VERSION)
    start = EngineStart(config=config, folder=opened, run_dir=folder, epoch=EPOCH, note=notes.append)
    engine = await cluster._engine(start, opened, part, -1)
    try:
        async with Watch(
            (server,), engine.fleet, limits or cluster.limits(config), note=notes.append
        ) as engine.fleet.watch:
            yield engine
    finally:
        await engine.close()


async def update(engine: SglangEngine, model: Path, version: int) -> WeightUpdate:
    """The weights of a folder as ``version``, with the checksum of every tensor."""
    route = await engine.route("all")
    assert route is not None
    assert route.transport == "disk"
    tensors = {layout_name(name): tensor for name, tensor in load_file(model / "model.safetensors").items()}
    sums = expected(tensors, route.checks, torch.float32, route.checksum)
    handle = {"folder": str(model)}
    return WeightUpdate(version=version, epoch=EPOCH, transport="disk", handle=handle, fingerprints=sums)


async def load(engine: SglangEngine, model: Path, version: int, count: int = 18) -> WeightUpdate:
    """Serve the weights of a folder; every tensor is the folder's."""
    sent = await update(engine, model, version)
    await engine.load(sent)
    await assert_holds(engine, sent, count)
    return sent


async def assert_holds(engine: SglangEngine, sent: WeightUpdate, count: int = 18) -> None:
    """The server has the bytes of an update, all ``count`` tensors."""
    route = await engine.route("all")
    assert route is not None
    assert compare(route.checks, sent.fingerprints, await engine.fingerprints(), sent.version) == count


def request(name: str, count: int) -> GenerateRequest:
    """A request for ``count`` tokens, whatever they are."""
    return GenerateRequest(
        id=name, tokens=list(PROMPT), params=SamplingParams(max_new_tokens=count, ignore_eos=True), seed=1
    )


def begin(engine: SglangEngine, names: Sequence[str], count: int) -> dict[str, asyncio.Task[Completion]]:
    """Requests under way."""
    return {name: asyncio.create_task(engine.generate(request(name, count))) for name in names}


async def computing(server: RawServer, tokens: int, requests: int = 1) -> None:
    """Wait until the server runs so many requests and holds so many tokens: prompts and what it has made so far."""

    def held() -> bool:
        loads = server.ask("/v1/loads?include=core")["loads"]
        running = sum(load["num_running_reqs"] for load in loads)
        return running >= requests and sum(load["num_used_tokens"] for load in loads) >= tokens

    await asyncio.to_thread(server.until, held, f"{requests} requests run, and {tokens} tokens are held")


def whole(done: Completion, count: int) -> None:
    """A completion whose lists fit each other."""
    assert len(done.tokens) == len(done.log_probs) == len(done.versions) == count
    assert done.epoch == EPOCH
    assert done.versions == sorted(done.versions)


async def keep_contract(check: EngineCheck, server: Server, model: Path, path: Path) -> None:
    """One promise of the engine's contract, of a server that need not be restarted for it."""
    notes: list[str] = []
    async with serving(server, model, path, notes) as engine:

        def update(version: int) -> WeightUpdate:
            return WeightUpdate(version=version, epoch=EPOCH, transport="disk", handle={"folder": str(model)})

        await check(EngineCase(engine=engine, update=update, prompt=list(PROMPT)))
        assert not [note for note in notes if "restart" in note], json.dumps(notes)
