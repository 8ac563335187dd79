"""Start of the SGLang servers of a config: the policy's behind one Engine, frozen models by role.

    [sglang] -> installation -> topology -> a command a server -> all started at once -> engine, watch -> Served
    rollout_external_engine_addrs -> servers that others run ------------------------------^

Logs are RUN/log/engine-N.log. What the policy's servers start with is never sampled: they serve from the first `load`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, MutableMapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slime_core.backends import EngineStart, ServedEngines
from slime_core.clusters.embedded import context_len
from slime_core.clusters.host import LOOPBACK, NCCL_MEMORY
from slime_core.errors import ConfigError, EngineError
from slime_core.plugins.locate import locate
from slime_core.weights.folder import ModelFolder
from slime_sglang import external, start_gateway as gateways
from slime_sglang.adapters import MERGED, adapter_names, missing_options
from slime_sglang.engine import FleetSettings, SglangEngine
from slime_sglang.health import Watch
from slime_sglang.host import LocalPlacements
from slime_sglang.model_servers import ModelServers, attached, launched
from slime_sglang.pictures import PictureCodec
from slime_sglang.router import Middleware
from slime_sglang.server import Server
from slime_sglang.server_health import WatchLimits
from slime_sglang.topology import POLICY
from slime_sglang.weights import Ways, WeightRoutes

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_sglang.gateway import Gateway

MIDDLEWARE = "rollout.rollout_middleware_paths"


@asynccontextmanager
async def sglang_engines(start: EngineStart) -> AsyncIterator[ServedEngines]:
    """Start all servers of a run, or meet those that run elsewhere; take ours down at the end, whatever happened.

    Raises:
        ConfigError: SGLang is not found, an option it does not know, GPUs that do not suffice.
        EngineError: ENG69-ENG73 a server that does not come up, with the end of its log.
    """
    config, folder, note = start.config, start.folder, start.note
    _require_local_folder(start)
    agree(config, os.environ)
    async with AsyncExitStack() as stack:
        placements = start.placements or LocalPlacements(config)
        if config.rollout.rollout_external_engine_addrs:
            engines_served = attached(config)
        else:
            engines_served = await launched(config, placements, start.run_dir, start.epoch, fixed=start.fixed)
        servers = [server for part in engines_served for server in part.servers]
        stack.push_async_callback(_stop, servers)
        await _start(servers, config.rollout.rollout_start_timeout)
        trainer_address = placements.trainer_address([server.address.url for server in servers])
        served: dict[str, SglangEngine] = {}
        for part in engines_served:
            serves = folder if part.role == POLICY else await asyncio.to_thread(ModelFolder.open, part.model)
            version = 0 if start.fixed or part.role != POLICY else -1
            router = await gateways.gateway(
                config,
                part.servers,
                part.installation,
                role=part.role,
                run_dir=start.run_dir,
                note=note,
                placement=placements.beside(part.role),
            )
            gateway = await stack.enter_async_context(router) if router is not None else None
            engine = await _engine(start, serves, part, version, gateway=gateway, host=trainer_address)
            stack.push_async_callback(engine.close)
            needed = gateways.pairs(gateways.kinds(part.servers))
            bounds = replace(limits(config), counts_requests=gateway is not None)
            watch = Watch(part.servers, engine.fleet, bounds, note=note, needed=needed)
            engine.fleet.watch = await stack.enter_async_context(watch)
            served[part.role] = engine
        for text in summary(engines_served):
            note(text)
        policy = served.pop(POLICY)
        yield ServedEngines(engine=policy, roles=dict(served), processes=tuple(servers), resync=policy.fleet.resync)


def _require_local_folder(start: EngineStart) -> None:
    """CFG05 for a quantised model by its hub name: its config.json decides what servers are started with."""
    model = start.config.rollout.hf_checkpoint
    if start.folder.stored_in and not start.fixed and not Path(model).is_dir():
        raise ConfigError(
            f"{model} is quantised and is named by its hub name",
            code="CFG05",
            where="rollout.hf_checkpoint",
            why="servers start by what its config.json says of weights, which is read before the run begins",
            fix=f"--hf-checkpoint {start.folder.path}",
        )


def agree(config: Config, environment: MutableMapping[str, str]) -> None:
    """Settle how NCCL shares memory, here and in what is started, before it is used here; a value that is there stays.

    Symmetric memory needs it. Where GPUs are shared nothing goes by NCCL.
    """
    if config.cluster.device == "cuda" and not config.cluster.colocate:
        options = {name.replace("-", "_"): value for name, value in config.table("sglang").items()}
        environment.setdefault(NCCL_MEMORY, "1" if options.get("enable_symm_mem") else "0")


async def _start(servers: Sequence[Server], timeout: float) -> None:
    """All servers at once; the first that fails ends the start."""

    async def up(server: Server) -> None:
        await server.start()
        await server.ready(timeout)

    starts = [asyncio.ensure_future(up(server)) for server in servers]
    try:
        await asyncio.gather(*starts)
    finally:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)


async def _stop(servers: Sequence[Server]) -> None:
    """All servers at once; one that cannot be stopped holds up no other, and its error rises when all are through."""
    ends = await asyncio.gather(*(server.stop() for server in servers), return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def _engine(
    start: EngineStart,
    folder: ModelFolder,
    part: ModelServers,
    version: int,
    *,
    gateway: Gateway | None = None,
    host: str = LOOPBACK,
) -> SglangEngine:
    """An engine over servers that are ready."""
    config, note = start.config, start.note
    rollout, frozen = config.rollout, part.role != POLICY
    facts = part.servers[0].facts
    features = part.features or external.common_features(server.facts for server in part.servers)
    adapters = () if frozen or start.fixed else adapter_names(config)
    _require_adapters(config, part.servers if adapters else ())
    device: Literal["cpu", "cuda"] = "cpu" if facts.get("device", config.cluster.device) == "cpu" else "cuda"
    ways = Ways(
        model=folder.config,
        dtype=external.common_dtype(part.servers, config.train.dtype, folder.config),
        features=features,
        folder=Path(rollout.update_weight_disk_dir or start.run_dir / "weights"),
        device=device,
        requested=rollout.update_weight_transport,
        shared=config.cluster.colocate and part.servers[0].owned and not frozen,
        buffer_bytes=rollout.update_weight_buffer_size,
        timeout=rollout.rollout_start_timeout,
        places=part.places,
        fp8=rollout.rollout_quantization == "fp8",
        torch=part.torch,
        trainer=part.trainer,
        host=host,
        adapters=bool(adapters),
    )
    if not frozen:
        for text in unused(config, ways):
            note(text)
    mode, deterministic = "enable_deterministic_inference", rollout.rollout_deterministic
    others = [server.address.url for server in part.servers if not server.facts.get(mode, deterministic)]
    if deterministic and others:
        raise EngineError(
            "rollout_deterministic with a server that is not in deterministic mode",
            code="ENG86",
            where=", ".join(others),
            why="how a server computes is settled where it is started",
            fix="start it with --enable-deterministic-inference",
        )
    paired = bool(gateways.pairs(gateways.kinds(part.servers)))
    experts = None if frozen else routed_experts(config, folder, part.servers, paired=paired)
    settings = FleetSettings(
        vocab_size=folder.vocab_size,
        context_len=folder.context_len if frozen else context_len(config, folder),
        features=features,
        epoch=start.epoch,
        eos=folder.eos_token_ids,
        # a decode server goes on with what another has computed of a prompt: with new weights it must begin anew
        pause_mode="abort" if paired else rollout.pause_generation_mode,
        scores=not paired,
        experts=experts,
        pictures=PictureCodec.of(folder),
        adapters=adapters,
        deterministic=not others,
        memory_saver=all(server.facts.get("enable_memory_saver") for server in part.servers),
        concurrency=rollout.server_concurrency,
        timeout=rollout.rollout_request_timeout,
        retries=rollout.rollout_max_retries,
    )
    engine = SglangEngine(
        part.servers,
        settings,
        weights=WeightRoutes(ways, note),
        tokenizer=folder.tokenizer(),
        middleware=() if frozen else middleware(config),
        gateway=gateway,
    )
    try:
        await engine.open(version=version)
    except BaseException:
        await engine.close()
        raise
    return engine


def _require_adapters(config: Config, servers: Sequence[Server]) -> None:
    """ENG86 for servers that were started without room for the run's adapters."""
    for server in servers:
        if missing := missing_options(server.facts, config):
            raise EngineError(
                "a server has no room for the run's adapters",
                code="ENG86",
                where=server.address.url,
                why="adapters, their rank and layers are settled where a server is started",
                fix=f"start it with {missing}   or   {MERGED}",
            )


def routed_experts(
    config: Config, folder: ModelFolder, servers: Sequence[Server], *, paired: bool
) -> tuple[int, int] | None:
    """Layers, and experts a token, of answers that say which were chosen; None where the run does not replay them.

    Raises:
        ConfigError: CFG04, servers or a model without them.
    """
    if config.train.routing_replay != "rollout":
        return None
    text = folder.config.get_text_config()
    top_k = int(getattr(text, "num_experts_per_tok", 0) or 0)
    silent = [s.address.url for s in servers if not s.facts.get("enable_return_routed_experts", s.owned)]
    reasons = {
        "the model has no experts": not top_k,
        "of a prompt that another server computed, a decode server does not know the experts": paired,
        f"started without --enable-return-routed-experts: {', '.join(silent)}": bool(silent),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ConfigError(
            "the engine cannot say which experts it chose",
            code="CFG04",
            where="train.routing_replay = rollout",
            why=reason,
            fix="--routing-replay off",
        )
    return int(text.num_hidden_layers), top_k


def unused(config: Config, ways: Ways) -> Iterator[str]:
    """Keys that a person set for another way than the one that ``auto`` takes."""
    rollout, transport = config.rollout, ways.transport
    default = type(rollout).model_fields["update_weight_buffer_size"].default
    if rollout.update_weight_transport != "auto":
        return
    if rollout.update_weight_disk_dir and transport != "disk":
        yield f"update_weight_disk_dir: no effect; update_weight_transport = auto takes {transport}"
    if rollout.update_weight_buffer_size != default and transport == "tensor":
        yield f"update_weight_buffer_size: no effect; update_weight_transport = auto takes {transport}: one buffer"


def middleware(config: Config) -> list[Middleware]:
    """The functions that stand around every request.

    Raises:
        PluginError: PLG50, PLG51 one that cannot be found.
    """
    return [locate(path, MIDDLEWARE) for path in config.rollout.rollout_middleware_paths]


def limits(config: Config) -> WatchLimits:
    """What the watch goes by."""
    rollout = config.rollout
    return WatchLimits(
        interval=rollout.rollout_health_check_interval,
        timeout=rollout.rollout_health_check_timeout,
        start_timeout=rollout.rollout_start_timeout,
        max_restarts=rollout.rollout_max_restarts,
        min_healthy=rollout.min_healthy_engines,
    )


def summary(parts: Sequence[ModelServers]) -> list[str]:
    """Which servers there are, and where their logs."""
    lines = []
    for part in parts:
        title = f"SGLang {part.version}".strip() + ("" if part.role == POLICY else f" for {part.role} ({part.model})")
        logs = [server.where for server in part.servers if server.log is not None]
        urls = [server.address.url for server in part.servers]
        count = f"{len(urls)} server{'s' if len(urls) > 1 else ''}"
        where = f"logs: {', '.join(logs)}" if logs else f"at {', '.join(urls)}"
        lines.append(f"{title}: {count}, {where}")
    return lines
