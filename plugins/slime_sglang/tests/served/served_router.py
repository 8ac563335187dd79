"""slime's engine over servers of these tests with SGLang's own router before them, as a run would start it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from served_engine import EPOCH, VERSION

from slime_core.backends import EngineStart
from slime_core.config.load import load_config
from slime_core.weights.folder import ModelFolder
from slime_sglang import start as cluster, start_gateway as gateways
from slime_sglang.engine import SglangEngine
from slime_sglang.external import features
from slime_sglang.gateway import Gateway
from slime_sglang.health import Watch
from slime_sglang.installation import Installation
from slime_sglang.model_servers import ModelServers
from slime_sglang.server import Server
from slime_sglang.server_health import WatchLimits
from slime_sglang.topology import POLICY


@dataclass(slots=True)
class Routed:
    """What runs."""

    engine: SglangEngine
    gateway: Gateway
    notes: list[str]


@asynccontextmanager
async def routed(
    servers: Sequence[Server],
    installation: Installation,
    model: Path,
    folder: Path,
    *flags: str,
    limits: WatchLimits | None = None,
) -> AsyncIterator[Routed]:
    """The engine that a run would have; it has no weights yet. The router's log is FOLDER/log/gateway.log."""
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[rollout]\nhf_checkpoint = {json.dumps(str(model))}\nrollout_engine = "sglang"\n')
    words = ["--device", "cpu", "--dtype", "float32", "--rollout-router", "sglang", *flags]
    config = load_config(recipe, words)
    notes: list[str] = []
    part = ModelServers(
        role=POLICY, model=str(model), servers=tuple(servers), features=features(VERSION), version=VERSION
    )
    made = await gateways.gateway(config, servers, installation, role=POLICY, run_dir=folder, note=notes.append)
    assert made is not None
    async with made:
        opened = ModelFolder.open(model)
        start = EngineStart(config=config, folder=opened, run_dir=folder, epoch=EPOCH, note=notes.append)
        engine = await cluster._engine(start, opened, part, -1, gateway=made)
        bounds = limits or WatchLimits(interval=0.5, told=True)
        try:
            async with Watch(servers, engine.fleet, bounds, note=notes.append) as engine.fleet.watch:
                yield Routed(engine, made, notes)
        finally:
            await engine.close()
