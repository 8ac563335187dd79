"""How a server of a run is started: SGLang's arguments and variables.

slime's own options, then [sglang], then a group's options; what a person writes wins where both may.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.config.problems import raise_all
from slime_core.errors import ConfigError
from slime_core.weights.fp8 import rollout_form
from slime_core.weights.nf4 import Nf4Format
from slime_core.weights.stored_forms import storage_form
from slime_sglang import adapters, rules as engine_rules
from slime_sglang.installation import (
    RESERVED,
    Installation,
    arguments,
    environment_of,
    find_python,
    read_installation,
)
from slime_sglang.model_config import raw_config
from slime_sglang.options import Place
from slime_sglang.pictures import OPTIONS as PICTURE_OPTIONS, UNKEPT
from slime_sglang.router_options import router_arguments, uses_router
from slime_sglang.sharing import SHARE, gives_memory, options_set, shares
from slime_sglang.topology import (
    ServerGroup,
    ServerPlace,
    Topology,
    parallel_size,
    topology,
    visible,
)

if TYPE_CHECKING:
    from slime_core.config.schema import Config

ON_CPU: Mapping[str, Any] = {  # what SGLang needs where there is no GPU, and no build of its kernels for this CPU
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # an idle scheduler would take a core for itself
}
DRAFT = "speculative_algorithm"  # of SGLang; all but n-grams have a draft model
SEEDS = 2**31
SPARE = 8  # positions; SGLang ends a request two before its context does, and slime counts by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that is needed to start a run's servers; nothing is started yet.

    Example: prepare(resolve_machine(config)).commands[0].arguments
    """

    installation: Installation
    topology: Topology
    commands: Mapping[int, Command]  # by the server's number


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How one server is started; host, ports and token come from who starts it.

    Example: Command(arguments=("--model-path", "/models/m"), env={"CUDA_VISIBLE_DEVICES": "0"})
    """

    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # added to ours


def prepare(
    config: Config, *, gpus: int | None = None, where: str | Place = "sglang", cache: Path | None = None
) -> Prepared:
    """Check all that can be checked before servers of a run start, and say how they are started.

    Args:
        config: device and dtype settled.
        gpus: that the run sees; None where that is not known.
        where: places of the options of [sglang], for messages.
        cache: folder for what is read of the installation; None is the user's.

    Raises:
        ConfigError: CFG01 to CFG07: rules between keys, no SGLang, its options, the topology.
    """
    raise_all(list(engine_rules.conflicts(config)))
    servers = topology(config, gpus=gpus)
    installation = read_installation(
        find_python(config.table("sglang")), environment_of(config.table("sglang"), config.cluster.device), cache
    )
    return Prepared(
        installation=installation,
        topology=servers,
        commands=commands(config, installation, servers, where=where),
    )


def commands(
    config: Config,
    installation: Installation,
    servers: Topology,
    *,
    where: str | Place = "sglang",
    fixed: bool = False,
) -> dict[int, Command]:
    """Every server of a topology, by its number.

    Args:
        fixed: they serve their folders as these are; no trainer sends weights.
        config: device and dtype settled (another ``auto`` is left to SGLang).
        installation: that starts them.
        servers: of :func:`slime_sglang.topology.topology`.
        where: places of the options of [sglang], for messages.

    Raises:
        ConfigError: of :func:`slime_sglang.installation.arguments`; CFG04 the installation lacks what
            the config needs of it, or a draft model cannot be loaded.
    """
    check_features(config, installation)
    _check_router(config, installation, servers, where)
    commands = {}
    for group in servers.groups:
        for server in group.servers:
            commands[server.number] = command(config, installation, group, server, where=where, fixed=fixed)
    return commands


def _check_router(config: Config, installation: Installation, servers: Topology, where: str | Place) -> None:
    """What can be checked of SGLang's router before servers run; raises as `router_options.router_arguments`."""

    def place(name: str) -> str:
        return where(f"router.{name}") if callable(where) else f"{where}.router.{name}"

    for role in dict.fromkeys(group.role for group in servers.groups):
        groups = servers.of(role)
        paired, count = groups[0].mode != "regular", sum(len(group.servers) for group in groups)
        if uses_router(config, servers=count, installed=installation.router, paired=paired):
            router_arguments(config, installation, paired=paired, where=place)


def command(
    config: Config,
    installation: Installation,
    group: ServerGroup,
    server: ServerPlace,
    *,
    where: str | Place = "sglang",
    fixed: bool = False,
) -> Command:
    """One server of a group; raises as :func:`commands`."""
    options = {name: value for name, value in config.table("sglang").items() if name not in RESERVED}
    arguments(installation, options, where=where)
    arguments(installation, group.options, where=lambda name: f"{group.where}, options.{name}")
    written = {**_canonical(installation, options), **_canonical(installation, group.options)}
    defaults = own_options(config, group, server, parallel_size(group.gpus, written, group.where))
    if not group.frozen and not fixed and (as_sent := stored_otherwise(config, group.model)):
        _check_draft(written)
        defaults |= as_sent
    if group.frozen or fixed:
        _check_served(config, installation, group.model)
    beside = {} if group.frozen or fixed else adapters.options(config, group.model)
    defaults |= beside
    if not group.frozen and shares(config):
        if gives_memory(config, options_set(config)):
            defaults["enable_memory_saver"] = True
            if beside:
                defaults["enable_weights_cpu_backup"] = True  # the base is sent once
        else:
            defaults["mem_fraction_static"] = SHARE
    defaults = {
        name: value for name, value in defaults.items() if name in installation.options and name not in written
    }
    env = {**installation.env, **group.env}
    trains_tower = not (group.frozen or config.train.freeze_vision_tower)
    if trains_tower and "vision_config" in raw_config(group.model):
        env = {**UNKEPT, **env}
    if config.cluster.device == "cpu":
        env = {"SGLANG_USE_CPU_ENGINE": "1", **env}
    elif server.gpus:
        env["CUDA_VISIBLE_DEVICES"] = visible(server.gpus)
    words = [*arguments(installation, defaults, by_slime=True), *arguments(installation, written, where=where)]
    return Command(arguments=tuple(words), env=env)


def own_options(config: Config, group: ServerGroup, server: ServerPlace, tp_size: int) -> dict[str, Any]:
    """The options that slime sets, by SGLang's names."""
    rollout, device = config.rollout, config.cluster.device
    options: dict[str, Any] = {
        "model_path": group.model,
        "tp_size": tp_size,
        "random_seed": (config.seed + 1_000_003 * server.number) % SEEDS,  # equal ones would draw alike
        "trust_remote_code": rollout.trust_remote_code,
        "enable_deterministic_inference": rollout.rollout_deterministic,
        "enable_return_routed_experts": config.train.routing_replay == "rollout" and not group.frozen,
    }
    if device != "auto":
        options["device"] = device
    if device == "cpu":
        options |= ON_CPU
    if "vision_config" in raw_config(group.model):
        options |= PICTURE_OPTIONS
    if group.mode != "regular":
        options["disaggregation_mode"] = group.mode
    if group.frozen:
        return options
    if config.train.dtype != "auto":
        options["dtype"] = config.train.dtype
    if rollout.rollout_max_context_len and rollout.rollout_max_context_len + SPARE <= _context(group.model):
        options["context_length"] = rollout.rollout_max_context_len + SPARE
    if rollout.init_weights == "random":
        options["load_format"] = (
            "dummy"  # the folder may have no weights; the trainer sends them before the first token
        )
    return options


def stored_otherwise(config: Config, model: str) -> dict[str, Any]:
    """Options of a server whose weights are sent in another form than its folder has; empty where they are alike.

    It starts without the folder's weights: the trainer's come before the first token.
    """
    stored = storage_form(raw_config(model))
    sent = rollout_form(config.rollout.rollout_quantization, stored)
    if sent == stored:
        return {}
    table = sent.table() if sent is not None else None
    return {"load_format": "dummy", engine_rules.OVERRIDES: json.dumps({"quantization_config": table})}


def _check_served(config: Config, installation: Installation, model: str) -> None:
    """Refuse a folder in nf4 for servers that read it as it is, where they cannot.

    Raises:
        ConfigError: CFG04.
    """
    on_cpu, python = config.cluster.device == "cpu", installation.python
    if not isinstance(storage_form(raw_config(model)), Nf4Format):
        return
    if on_cpu or "bitsandbytes" not in installation.features:
        raise ConfigError(
            f"SGLang cannot serve {model}, whose weights are nf4 of bitsandbytes",
            code="CFG04",
            where=model,
            why="it reads them on a GPU alone" if on_cpu else f"{python} has no bitsandbytes",
            fix=("" if on_cpu else f"{python} -m pip install bitsandbytes   or   ")
            + "--rollout-engine local, which reads them as floats   or   name a folder of floats",
        )


def _check_draft(options: Mapping[str, Any]) -> None:
    """Refuse a draft model beside weights in another form than their folder's.

    Raises:
        ConfigError: CFG04.
    """
    algorithm = options.get(DRAFT)
    if algorithm and str(algorithm).upper() != "NGRAM":
        raise ConfigError(
            f"{DRAFT} = {algorithm} with weights that are sent in another form than their folder has",
            code="CFG04",
            where=f"sglang.{DRAFT}, rollout.rollout_quantization",
            why="servers then start with random weights, and no trainer sends those of the draft model",
            fix=f"leave {DRAFT} out   or   --rollout-quantization auto, with a folder in fp8 or in floats",
        )


def _context(model: str) -> int:
    """Positions of a model folder, from its config; 0 where that is not told."""
    try:
        raw = raw_config(model)
        return int((raw.get("text_config") or raw)["max_position_embeddings"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return 0


def check_features(config: Config, installation: Installation) -> None:
    """Refuse an installation that lacks what the run needs of it.

    Raises:
        ConfigError: CFG04.
    """
    rollout, has = config.rollout, installation.features
    if "memory_saver" not in has and gives_memory(config, options_set(config)):
        raise ConfigError(
            f"torch_memory_saver is not installed beside SGLang {installation.version}",
            code="CFG04",
            where=installation.python,
            why="servers that share the trainer's GPUs give memory back",
            fix=f"{installation.python} -m pip install torch_memory_saver   or   --no-offload-rollout",
        )
    if config.train.routing_replay == "rollout" and "routed_experts" not in has:
        raise ConfigError(
            f"SGLang {installation.version} does not say which experts it chose",
            code="CFG04",
            where="train.routing_replay",
            fix="update it   or   --routing-replay policy",
        )
    if adapters.adapter_names(config) and "adapters" not in has:
        raise ConfigError(
            f"SGLang {installation.version} takes no adapters from memory",
            code="CFG04",
            where=adapters.SYNC,
            fix=f"{adapters.MERGED}   or a newer SGLang",
        )
    updates = {"disk": "disk_update", "tensor": "tensor_update", "nccl": "nccl_update"}
    transport = rollout.update_weight_transport
    if transport != "auto" and updates[transport] not in has:
        raise ConfigError(
            f"SGLang {installation.version} takes no weights by {transport}",
            code="CFG04",
            where="rollout.update_weight_transport",
            fix="--update-weight-transport auto",
        )


def _canonical(installation: Installation, table: Mapping[str, Any]) -> dict[str, Any]:
    """A checked table by the options' first names."""
    canonical = {}
    for name, value in table.items():
        option = installation.options[name.replace("-", "_")]
        canonical[option.name] = value
    return canonical
