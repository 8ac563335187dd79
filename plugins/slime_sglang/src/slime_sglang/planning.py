"""A run's servers checked before any starts, the list of SGLang's options, its row of `slime doctor`."""

from __future__ import annotations

from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.backends import Plan, Planning
from slime_core.config.problems import raise_all
from slime_core.config.values import show
from slime_core.errors import ConfigError, install_line
from slime_core.plugins.backends import cluster_of
from slime_core.protocols import CheckResult
from slime_sglang import adapters, rules
from slime_sglang.architectures import fallback
from slime_sglang.command import prepare
from slime_sglang.installation import PYTHON_ENV, find_python, is_here, named_here, read_here
from slime_sglang.options import SERVER, describe
from slime_sglang.router_options import ROUTER, options_of
from slime_sglang.server_sizes import unknown
from slime_sglang.topology import topology

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_sglang.command import Prepared
    from slime_sglang.topology import ServerGroup

BLACKWELL = (10, 0)  # compute capability


def plan(planning: Planning) -> Plan | None:
    """The servers of a run, everything about them checked; None where nothing is served.

    Raises:
        ConfigError: rules between keys, no usable SGLang, its options, the topology.
    """
    if planning.config.rollout.debug_train_only:
        return None
    facts, reason = _facts(planning), ""
    if planning.folder is not None:
        adapters.check_model(planning.config, planning.folder.config)
    if planning.folder is not None and planning.config.rollout.check_weights != "off":
        reason = unknown(planning.folder.config)
    table = rows(facts) | ({"weight check": reason} if reason else {})
    if names := adapters.adapter_names(planning.config):
        table["adapters"] = (
            f"{', '.join(names)}, beside the base: SGLang's adapters of rank {planning.config.train.lora_rank}"
        )
    return Plan(facts=facts, rows=table)


def _fallbacks(planning: Planning, prepared: Prepared) -> dict[str, str]:
    """What to say of models that SGLang serves by transformers' code, by group; raises as `architectures.fallback`."""
    folder, trust = planning.folder, planning.config.rollout.trust_remote_code
    texts = {}
    for group in prepared.topology.groups:
        policy = not group.frozen
        model = folder.path if policy and folder is not None else Path(group.model)
        where = planning.origins.of(("rollout", "hf_checkpoint")) if policy else group.where
        command = prepared.commands[group.servers[0].number]
        texts[group.name] = fallback(
            prepared.installation, command, model, trust=trust, where=where or "rollout.hf_checkpoint"
        )
        if policy and texts[group.name] and adapters.adapter_names(planning.config):
            raise ConfigError(
                "lora_sync = adapter with a model that SGLang serves by transformers' code",
                code="CFG04",
                where=where or "rollout.hf_checkpoint",
                why="SGLang puts adapters on layers of its own models",
                fix=adapters.MERGED,
            )
    return {name: text for name, text in texts.items() if text}


def _facts(planning: Planning) -> dict[str, Any]:
    config, places = planning.config, planning.origins
    addresses = config.rollout.rollout_external_engine_addrs
    if addresses:
        raise_all([places.place(problem) for problem in rules.conflicts(config)])
        return {"external": list(addresses)}

    def where(name: str) -> str:
        return places.of(("sglang", *name.split("."))) or f"sglang.{name}"

    remote = cluster_of(config).remote
    if remote:
        raise_all([places.place(problem) for problem in rules.conflicts(config)])
        if not _is_here(config):
            return {"version": "", "python": "", "groups": [_group(group) for group in topology(config).groups]}
    if not remote:
        _refuse_blackwell(config)
    prepared = prepare(config, gpus=None if remote else _gpus(config), where=where)
    return described(prepared) | {"fallbacks": _fallbacks(planning, prepared)}


def described(prepared: Prepared) -> dict[str, Any]:
    """Version, Python and groups of servers."""
    installation = prepared.installation
    return {
        "version": installation.version,
        "python": installation.python,
        "groups": [
            _group(group) | {"arguments": list(prepared.commands[group.servers[0].number].arguments)}
            for group in prepared.topology.groups
        ],
    }


def _group(group: ServerGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "role": group.role,
        "mode": group.mode,
        "model": group.model,
        "servers": [list(server.gpus) for server in group.servers],
    }


def rows(servers: dict[str, Any]) -> dict[str, str]:
    """The same for a table of two columns."""
    if "external" in servers:
        return {"servers": f"{len(servers['external'])} that run already: {', '.join(servers['external'])}"}
    note = "looked for where the servers start"
    table = {"sglang": f"{servers['version']} of {servers['python']}" if servers["python"] else note}
    for group in servers["groups"]:
        gpus = "; ".join(",".join(map(str, gpus)) for gpus in group["servers"] if gpus)
        kind = "" if group["mode"] == "regular" else f" {group['mode']}"
        table[f"servers {group['name']}"] = f"{len(group['servers'])}{kind} of {group['role']}, {group['model']}" + (
            f", GPUs {gpus}" if gpus else ""
        )
    return table | {f"model {name}": text for name, text in servers.get("fallbacks", {}).items()}


def _is_here(config: Config) -> bool:
    """Whether this machine has the SGLang that [sglang] names; of a cluster the servers' machines may alone."""
    try:
        return bool(find_python(config.table("sglang")))
    except ConfigError as error:
        if error.code == "CFG02":
            raise
        return False


def _refuse_blackwell(config: Config) -> None:
    """CFG04 where servers would round the scales of fp8 weights after loading them."""
    if config.rollout.rollout_quantization != "fp8" or config.cluster.device != "cuda":
        return
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= BLACKWELL:
        raise ConfigError(
            f"rollout_quantization = fp8 on {torch.cuda.get_device_name()}",
            code="CFG04",
            where="rollout.rollout_quantization",
            why="SGLang makes the scales powers of two there (UE8M0 of DeepGEMM), other weights than it was sent",
            fix="--rollout-quantization none   or a GPU of the Hopper kind",
        )


def _gpus(config: Config) -> int | None:
    if config.cluster.device != "cuda":
        return None
    import torch

    return torch.cuda.device_count()


def option_rows() -> list[dict[str, str]]:
    """Every option of the SGLang of this environment, or of the one that SLIME_SGLANG_PYTHON names, and of its router.

    Raises:
        ConfigError: there is none, or it does not work.
    """
    installation = read_here({})
    tables = (
        ("sglang", SERVER, {option.name: option for option in installation.options.values()}),
        ("sglang.router", ROUTER, options_of(installation)),
    )
    rows = []
    for section, family, options in tables:
        for option in options.values():
            key_of_slime = family.fixed.get(option.name)
            rows.append(
                {
                    "section": section,
                    "key": f"{section}.{option.name}",
                    "flag": f"{family.flags}{option.name.replace('_', '-')}",
                    "type": describe(option),
                    "default": "" if option.default is None else show(option.default),
                    "text": f"Set by slime: {key_of_slime}" if key_of_slime else option.help,
                }
            )
    return rows


def sglang() -> CheckResult:
    """SGLang: where it is, its version and what it can do. A run with the embedded engine needs none."""
    if not is_here() and not named_here():
        message = f"none in this environment, and {PYTHON_ENV} is not set; only rollout_engine = sglang needs it"
        return CheckResult(status="ok", found=message)
    read = read_here({})
    count = len({option.name for option in read.options.values()})
    message = f"{read.version} at {read.python}; {count} options; {', '.join(sorted(read.features - {'router'}))}"
    message += f"; its router {read.router}" if read.router else "; no router of its own (sglang-router)"
    if read.torch and util.find_spec("torch") is not None and _minor(read.torch) != _minor(metadata.version("torch")):
        message += f"; its torch is {read.torch}: weights cannot travel by tensor"
    if util.find_spec("aiohttp") is None:
        return CheckResult(
            status="warn", found=f"{message}; aiohttp, which asks its servers, is missing", fix=install_line("sglang")
        )
    return CheckResult(status="ok", found=message)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])
