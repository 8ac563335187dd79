"""A config in, running SGLang servers out: the policy's behind one Engine, frozen models by role.

    [sglang] -> installation -> topology -> a command a server -> all started at once -> engine, watch -> Served
    rollout_external_engine_addrs -> servers that others run ------------------------------^

Logs are RUN/log/engine-N.log. What the policy's servers start with is never sampled: they serve from the first `load`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from slime_core.clusters import gateway as gateways
from slime_core.clusters.embedded import context_len
from slime_core.compat.locate import locate
from slime_core.engines.sglang import external
from slime_core.engines.sglang.command import Command, commands
from slime_core.engines.sglang.engine import Settings, SglangEngine
from slime_core.engines.sglang.health import Watch
from slime_core.engines.sglang.home import Launch
from slime_core.engines.sglang.installation import Installation, environment_of, find_python, read_installation
from slime_core.engines.sglang.pulse import Limits
from slime_core.engines.sglang.router import Middleware
from slime_core.engines.sglang.server import Server
from slime_core.engines.sglang.topology import POLICY, ServerGroup, topology
from slime_core.engines.sglang.weights import Ways, Weights, why_unmapped
from slime_core.errors import ConfigError, EngineError
from slime_core.notices import NOTICES
from slime_core.protocols import Serving
from slime_core.types import WeightUpdate
from slime_core.weights.folder import ModelFolder

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.engines.sglang.gateway import Gateway
    from slime_core.protocols import Engine

Note = Callable[[str], None]
MIDDLEWARE = "rollout.rollout_middleware_paths"


@dataclass(slots=True, kw_only=True)
class Served:
    """What runs."""

    engine: SglangEngine  # the policy's
    roles: dict[str, Engine] = field(default_factory=dict)  # frozen models, by role
    logs: tuple[Path, ...] = ()
    servers: tuple[Server, ...] = ()


@asynccontextmanager
async def sglang_engines(
    config: Config, folder: ModelFolder, run_dir: Path, epoch: int, note: Note, *, fixed: bool = False
) -> AsyncIterator[Served]:
    """Start all servers of a run, or meet those that run elsewhere; take ours down at the end, whatever happened.

    With ``fixed`` the policy's servers serve the weights of ``folder``, as version 0; no trainer sends others.

    Raises:
        ConfigError: SGLang is not found, an option it does not know, GPUs that do not suffice.
        EngineError: ENG69-ENG73 a server that does not come up, with the end of its log.
    """
    async with AsyncExitStack() as stack:
        if config.rollout.rollout_external_engine_addrs:
            found = attached(config)
        else:
            found = await launched(config, run_dir, epoch, fixed=fixed)
        servers = [server for part in found for server in part.servers]
        stack.push_async_callback(_stop, servers)
        await _start(servers, config.rollout.rollout_start_timeout)
        served: dict[str, SglangEngine] = {}
        for part in found:
            serves = folder if part.role == POLICY else await asyncio.to_thread(ModelFolder.open, part.model)
            version = 0 if fixed or part.role != POLICY else -1
            made = await gateways.gateway(
                config, part.servers, part.installation, role=part.role, run_dir=run_dir, note=note
            )
            gateway = await stack.enter_async_context(made) if made is not None else None
            engine = await _engine(config, serves, run_dir, epoch, note, part, version, gateway=gateway)
            stack.push_async_callback(engine.close)
            needed = gateways.pairs(gateways.kinds(part.servers))
            bounds = replace(limits(config), told=gateway is not None)
            watch = Watch(part.servers, engine.fleet, bounds, note=note, needed=needed)
            engine.fleet.watch = await stack.enter_async_context(watch)
            served[part.role] = engine
        for text in told(found):
            note(text)
        policy = served.pop(POLICY)
        logs = tuple(server.log for part in found for server in part.servers if server.log is not None)
        yield Served(engine=policy, roles=dict(served), logs=logs, servers=tuple(servers))


@asynccontextmanager
async def sglang_serving(config: Config, folder: ModelFolder) -> AsyncIterator[Serving]:
    """The policy's servers alone, with the folder's weights; logs go into a folder that is removed at the end."""
    with TemporaryDirectory(prefix="slime-eval-") as name:
        run_dir, drawn = Path(name), folder.init_weights == "random"
        async with sglang_engines(
            config, folder, run_dir, 0, lambda text: NOTICES.say(text, text), fixed=not drawn
        ) as served:
            if drawn:
                weights = await asyncio.to_thread(_drawn, config, folder, run_dir / "drawn")
                handle = {"folder": str(weights)}
                await served.engine.load(WeightUpdate(version=0, epoch=0, transport="disk", handle=handle))
            yield Serving(
                engines=served.engine,
                tokenizer=folder.tokenizer(),
                vocab_size=folder.vocab_size,
                roles=served.roles,
            )


def _say(text: str) -> None:
    NOTICES.say(text, text)


def _drawn(config: Config, folder: ModelFolder, path: Path) -> Path:
    """A folder of the weights that are drawn from the seed."""
    model: Any = folder.build_model("float32", seed=config.seed)
    model.save_pretrained(str(path))
    return path


@dataclass(slots=True, frozen=True, kw_only=True)
class Part:
    """The servers of one model."""

    role: str
    model: str  # folder
    servers: tuple[Server, ...]
    features: frozenset[str]  # of the installation; empty: they are asked
    version: str = ""  # of SGLang
    torch: str = ""  # version in the servers' environment; empty: not known
    installation: Installation | None = None  # that starts them
    places: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # server -> trainer ranks on its GPUs


def attached(config: Config) -> list[Part]:
    """Servers that others run: all of them serve the policy."""
    rollout = config.rollout
    token = os.environ.get(rollout.rollout_engine_token_env, "")
    servers = [
        Server.attach(url, token=token, ca=rollout.rollout_engine_ca, number=number)
        for number, url in enumerate(rollout.rollout_external_engine_addrs)
    ]
    return [Part(role=POLICY, model=rollout.hf_checkpoint, servers=tuple(servers), features=frozenset())]


async def launched(config: Config, run_dir: Path, epoch: int, *, fixed: bool) -> list[Part]:
    """Servers of ours, not started yet.

    Raises:
        ConfigError: see `sglang_engines`.
    """
    python, env = find_python(config.sglang), environment_of(config.sglang)
    installation = await asyncio.to_thread(read_installation, python, env)
    check_transport(config, installation)
    placed = topology(config, gpus=_gpus(config))
    how = commands(config, installation, placed)
    shared = secrets.token_urlsafe(32)
    world = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    return [
        Part(
            role=role,
            model=placed.of(role)[0].model,
            servers=tuple(
                _server(
                    config,
                    installation,
                    group,
                    number,
                    how[number],
                    run_dir,
                    _stamp(group, epoch, fixed),
                    token=shared if gateways.one_token({group.mode}) else "",
                )
                for group in placed.of(role)
                for number in (server.number for server in group.servers)
            ),
            features=installation.features,
            version=installation.version,
            torch=installation.torch,
            installation=installation,
            places=placed.beside(world) if role == POLICY and config.cluster.colocate else {},
        )
        for role in (POLICY, *placed.roles)
    ]


def check_transport(config: Config, installation: Installation) -> None:
    """Refuse weights by tensor that was asked for where the torch of both sides differs, before a server starts.

    Raises:
        ConfigError: CFG04 with both versions.
    """
    if config.rollout.update_weight_transport == "tensor" and (why := why_unmapped(installation.torch)):
        raise ConfigError(
            "update_weight_transport = tensor with another torch beside SGLang",
            code="CFG04",
            where="rollout.update_weight_transport",
            why=why,
            fix=f"--update-weight-transport auto   or the same torch in the environment of {installation.python}",
        )


def _stamp(group: ServerGroup, epoch: int, fixed: bool) -> tuple[str, ...]:
    """Frozen weights are version 0 of this process."""
    return ("--weight-version", f"{epoch}.0") if group.frozen or fixed else ()


def _server(
    config: Config,
    installation: Installation,
    group: ServerGroup,
    number: int,
    how: Command,
    run_dir: Path,
    more: Sequence[str],
    *,
    token: str = "",
) -> Server:
    launch = Launch(
        python=installation.python,
        arguments=(*how.arguments, *more),
        env=how.env,
        log=run_dir / "log" / f"engine-{number}.log",
        threads=config.cluster.cpu_threads,
    )
    return Server.launch(launch, number=number, group=group.name, token=token)


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
    config: Config,
    folder: ModelFolder,
    run_dir: Path,
    epoch: int,
    note: Note,
    part: Part,
    version: int,
    *,
    gateway: Gateway | None = None,
) -> SglangEngine:
    """An engine over servers that are ready."""
    rollout, frozen = config.rollout, part.role != POLICY
    facts = part.servers[0].facts
    features = part.features or external.common_features(server.facts for server in part.servers)
    device: Literal["cpu", "cuda"] = "cpu" if facts.get("device", config.cluster.device) == "cpu" else "cuda"
    ways = Ways(
        model=folder.config,
        dtype=external.common_dtype(part.servers, config.train.dtype, folder.config),
        features=features,
        folder=Path(rollout.update_weight_disk_dir or run_dir / "weights"),
        device=device,
        wanted=rollout.update_weight_transport,
        shared=config.cluster.colocate and part.servers[0].owned and not frozen,
        buffer_bytes=rollout.update_weight_buffer_size,
        timeout=rollout.rollout_start_timeout,
        places=part.places,
        torch=part.torch,
    )
    if not frozen:
        for text in unused(config, ways):
            note(text)
    mode, wanted = "enable_deterministic_inference", rollout.rollout_deterministic
    others = [server.address.url for server in part.servers if not server.facts.get(mode, wanted)]
    if wanted and others:
        raise EngineError(
            "rollout_deterministic with a server that is not in deterministic mode",
            code="ENG86",
            where=", ".join(others),
            why="how a server computes is settled where it is started",
            fix="start it with --enable-deterministic-inference",
        )
    paired = bool(gateways.pairs(gateways.kinds(part.servers)))
    settings = Settings(
        vocab_size=folder.vocab_size,
        context_len=folder.context_len if frozen else context_len(config, folder),
        features=features,
        epoch=epoch,
        eos=folder.eos_token_ids,
        # a decode server goes on with what another has computed of a prompt: with new weights it must begin anew
        pause_mode="abort" if paired else rollout.pause_generation_mode,
        scores=not paired,
        deterministic=not others,
        memory_saver=all(server.facts.get("enable_memory_saver") for server in part.servers),
        concurrency=rollout.server_concurrency,
        timeout=rollout.rollout_request_timeout,
        retries=rollout.rollout_max_retries,
    )
    engine = SglangEngine(
        part.servers,
        settings,
        weights=Weights(ways, note),
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


def unused(config: Config, ways: Ways) -> Iterator[str]:
    """Keys that a person set for another way than the one that ``auto`` takes."""
    rollout, found = config.rollout, ways.transport
    default = type(rollout).model_fields["update_weight_buffer_size"].default
    if rollout.update_weight_transport != "auto":
        return
    if rollout.update_weight_disk_dir and found != "disk":
        yield f"update_weight_disk_dir: no effect; update_weight_transport = auto takes {found}"
    if rollout.update_weight_buffer_size != default and found == "tensor":
        yield f"update_weight_buffer_size: no effect; update_weight_transport = auto takes {found}: one buffer"


def middleware(config: Config) -> list[Middleware]:
    """The functions that stand around every request.

    Raises:
        PluginError: PLG50, PLG51 one that cannot be found.
    """
    return [locate(path, MIDDLEWARE) for path in config.rollout.rollout_middleware_paths]


def limits(config: Config) -> Limits:
    """What the watch goes by."""
    rollout = config.rollout
    return Limits(
        interval=rollout.rollout_health_check_interval,
        timeout=rollout.rollout_health_check_timeout,
        start_timeout=rollout.rollout_start_timeout,
        max_restarts=rollout.rollout_max_restarts,
        min_healthy=rollout.min_healthy_engines,
    )


def told(parts: Sequence[Part]) -> list[str]:
    """Which servers there are, and where their logs."""
    found = []
    for part in parts:
        what = f"SGLang {part.version}".strip() + ("" if part.role == POLICY else f" for {part.role} ({part.model})")
        logs = [str(server.log) for server in part.servers if server.log is not None]
        urls = [server.address.url for server in part.servers]
        count = f"{len(urls)} server{'s' if len(urls) > 1 else ''}"
        where = f"logs: {', '.join(logs)}" if logs else f"at {', '.join(urls)}"
        found.append(f"{what}: {count}, {where}")
    return found


def _gpus(config: Config) -> int | None:
    """GPUs that this process sees."""
    if config.cluster.device != "cuda":
        return None
    import torch

    return torch.cuda.device_count()
