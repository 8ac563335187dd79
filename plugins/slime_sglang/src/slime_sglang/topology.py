"""Which servers there are, of which models, on which GPUs: the rollout_num_* keys, or a file of groups, in.

    [[group]]
    name = "policy"
    count = 2                       # servers
    gpus = 2                        # of each: its tensor-parallel size, times what its options multiply

    [[group]]
    name = "judge"
    role = "reward"                 # any name but policy: a frozen model that Serving.roles offers under it
    model = "/models/judge"
    options = { mem_fraction_static = 0.8 }

GPUs are numbered among those that the run sees, in the order of the file, from the first one that is not the
trainer's (from 0 where they share).
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from slime_core.config.positions import key_lines
from slime_core.config.problems import Origins, Problem, raise_all
from slime_core.config.sections import Section
from slime_core.config.validate import check_model
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.schema import Config

POLICY = "policy"
KEY = "rollout.engine_topology"
Mode = Literal["regular", "prefill", "decode"]
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """One server: its number in the run, and its GPUs.

    Example: ServerPlace(number=1, gpus=(2, 3))
    """

    number: int
    gpus: tuple[int, ...] = ()  # among those that the run sees; none on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerGroup:
    """Servers that are alike.

    Example: ServerGroup(name="policy", role="policy", model="/models/m", servers=(ServerPlace(number=0),))
    """

    name: str
    role: str  # policy, or what a frozen model is for: teacher, reward, ...
    model: str  # folder
    servers: tuple[ServerPlace, ...]
    mode: Mode = "regular"
    options: Options = field(default_factory=dict)  # of SGLang, laid over [sglang]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # laid over [sglang.env]
    where: str = "rollout"  # for messages: file and line, or the section

    @property
    def gpus(self) -> int:
        """Of one server."""
        return len(self.servers[0].gpus)

    @property
    def frozen(self) -> bool:
        """Whether its weights never change."""
        return self.role != POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All servers of a run that slime starts.

    Example: Topology(groups=(policy, judge)).of("policy")
    """

    groups: tuple[ServerGroup, ...]

    def of(self, role: str) -> tuple[ServerGroup, ...]:
        """The groups of one role."""
        return tuple(group for group in self.groups if group.role == role)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the frozen models, in order."""
        return tuple(dict.fromkeys(group.role for group in self.groups if group.frozen))

    def beside(self, world: int) -> dict[int, tuple[int, ...]]:
        """Of each of the policy's servers, by number, the trainer rank on each of its GPUs; rank n has GPU n.

        For a GPU without a rank, the first rank on another GPU of the server. Empty where a server has none at all.
        """
        beside_of = {}
        for server in (server for group in self.of(POLICY) for server in group.servers):
            near = [gpu for gpu in server.gpus if gpu < world]
            if server.gpus and not near:
                return {}
            beside_of[server.number] = tuple(gpu if gpu < world else near[0] for gpu in server.gpus)
        return beside_of

    @property
    def servers(self) -> tuple[ServerPlace, ...]:
        """Of all groups; numbers count from 0 over them."""
        return tuple(server for group in self.groups for server in group.servers)


class GroupTable(Section):
    """One `[[group]]` of the file."""

    name: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,64}$", description="For logs and metrics; default: the role.")
    role: str = Field(POLICY, pattern=r"^[a-z][a-z0-9_]{0,63}$", description="policy, or a frozen model's name.")
    model: str = Field("", description="Model folder; the policy's is hf_checkpoint.")
    count: int = Field(1, ge=1, le=4096, description="Servers.")
    gpus: int = Field(1, ge=1, le=64, description="GPUs of a server; a CPU has none.")
    mode: Mode = Field("regular", description="prefill and decode belong together: one makes the other's KV cache.")
    options: dict[str, Any] = Field({}, description="SGLang options, laid over [sglang].")
    env: dict[str, str] = Field({}, description="Environment variables, laid over [sglang.env].")


class TopologyFile(Section):
    """The file."""

    group: tuple[GroupTable, ...] = Field((), description="Groups of servers.")


def topology(config: Config, *, gpus: int | None = None) -> Topology:
    """The servers of a run.

    Args:
        config: device settled (``cuda`` or ``cpu``).
        gpus: that the run sees, to refuse more; None where that is not known.

    Raises:
        ConfigError: CFG01 to CFG07 about the file, with its lines; CFG04 more GPUs than there are, no server at all.
    """
    path = config.rollout.engine_topology
    on_gpu = config.cluster.device != "cpu"
    groups = _read(Path(path), config) if path else [(_described(config, on_gpu), "rollout")]
    first = 0 if config.cluster.colocate else _trainers(config)
    placed = _placed(groups, config.rollout.hf_checkpoint, first, on_gpu)
    if on_gpu and gpus is not None:
        _check_room(placed, first, gpus, config.cluster.colocate)
    return placed


def visible(gpus: Sequence[int], environ: Mapping[str, str] | None = None) -> str:
    """CUDA_VISIBLE_DEVICES for a server on these GPUs; numbers count among those that are visible to us."""
    names = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES", "")
    devices = [name.strip() for name in names.split(",") if name.strip()]
    return ",".join(devices[gpu] if gpu < len(devices) else str(gpu) for gpu in gpus)


def parallel_size(gpus: int, options: Options, where: str = "sglang") -> int:
    """Tensor-parallel size of a server on that many GPUs (at least 1), beside its pipeline and data parallelism.

    Raises:
        ConfigError: CFG04 they do not divide.
    """
    plain = {name.replace("-", "_"): value for name, value in options.items()}
    stages = _size(plain, "pp_size", "pipeline_parallel_size")
    inside = bool(plain.get("enable_dp_attention")) or _size(plain, "attn_dp_size", "attention_data_parallel_size") > 1
    copies = 1 if inside else _size(plain, "dp_size", "data_parallel_size")
    whole = max(1, gpus)
    if whole % (stages * copies) and gpus:
        raise ConfigError(
            f"{gpus} GPUs of a server do not divide by pp_size * dp_size = {stages} * {copies}",
            code="CFG04",
            where=where,
            why="each pipeline stage of each copy of the model has the same number of GPUs",
            fix=f"give the server a multiple of {stages * copies} GPUs, or lower pp_size or dp_size",
        )
    return max(1, whole // (stages * copies))


def _size(options: Options, *names: str) -> int:
    size = next((options[name] for name in names if name in options), 1)
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 1


def _trainers(config: Config) -> int:
    return config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node


def _described(config: Config, on_gpu: bool) -> GroupTable:
    """The one group that rollout_num_* describe."""
    rollout = config.rollout
    size = rollout.rollout_num_gpus_per_engine
    total = rollout.rollout_num_gpus or (_trainers(config) if config.cluster.colocate else 0)
    count = rollout.rollout_num_engines or (total // size if on_gpu else 1)
    if not count:
        raise ConfigError(
            f"rollout_engine = sglang has no GPU to serve on: {total} for servers of {size}",
            code="CFG04",
            where="rollout.rollout_num_gpus",
            why="the trainer keeps its own (colocate = false)" if not config.cluster.colocate else "",
            fix="--rollout-num-gpus N   or   --colocate",
        )
    return GroupTable(name=POLICY, count=count, gpus=size)


def _read(path: Path, config: Config) -> list[tuple[GroupTable, str]]:
    """The groups of a file, each with its place."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        data = tomllib.loads(text)
    except FileNotFoundError as error:
        message = f"there is no file {path.absolute()}"
        raise ConfigError(message, code="CFG05", where=KEY, fix="--engine-topology FILE.toml") from error
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(message, code="CFG05", where=KEY, fix="--engine-topology FILE.toml") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", code="CFG06", where=str(path), fix="fix the file") from error
    origins = Origins({key: f"{path.name}:{line}" for key, line in key_lines(text).items()})
    content = check_model(TopologyFile, data)
    if isinstance(content, list):
        raise_all([origins.place(problem) for problem in content])
        raise AssertionError
    groups = [group.model_copy(update={"model": _folder(group.model, path.parent)}) for group in content.group]
    raise_all([origins.place(problem) for problem in _problems(groups, path, config)])
    return [(group, origins.of(("group", at)) or path.name) for at, group in enumerate(groups)]


def _folder(model: str, base: Path) -> str:
    """A model folder whose path starts at the file's folder; a name on the hub stays what it is."""
    text = os.path.expanduser(model)
    local = os.path.isabs(text) or text.startswith(".") or (base / text).is_dir()
    return os.path.normpath(base / text) if text and local else text


def _problems(groups: Sequence[GroupTable], path: Path, config: Config) -> Iterator[Problem]:
    """What cannot hold together in a file."""
    if not any(group.role == POLICY for group in groups):
        yield Problem(
            code="CFG04",
            what="no group serves the policy",
            where=path.name,
            fix='add a table:\n[[group]]\nname = "policy"',
        )
    names = [group.name or group.role for group in groups]
    for at, group in enumerate(groups):
        key = ("group", at)
        if names[at] in names[:at]:
            message = f"two groups are named '{names[at]}'"
            keys = ((*key, "name") if group.name else key,)
            yield Problem(code="CFG07", what=message, keys=keys, fix="give each group its own name")
        if group.role == POLICY and group.model and not _same(group.model, config.rollout.hf_checkpoint):
            yield Problem(
                code="CFG04",
                what=f"the policy of group '{names[at]}' is another model than hf_checkpoint",
                keys=((*key, "model"),),
                why=f"{group.model} is not {config.rollout.hf_checkpoint}, which is trained and sent to its servers",
                fix="leave model out, or give the group its own role",
            )
        if group.role != POLICY and not group.model:
            fix = 'model = "/path/of/the/model"'
            message = f"group '{names[at]}' names no model"
            yield Problem(code="CFG02", what=message, keys=(key,), why=f"its role is {group.role}", fix=fix)
        if os.path.isabs(group.model) and not os.path.isdir(group.model):
            message = f"group '{names[at]}': there is no model folder {group.model}"
            yield Problem(code="CFG05", what=message, keys=((*key, "model"),), fix="correct the path")
    yield from _roles(groups, config)


def _roles(groups: Sequence[GroupTable], config: Config) -> Iterator[Problem]:
    """One model a role; prefill and decode belong together."""
    for role in dict.fromkeys(group.role for group in groups):
        members = [(at, group) for at, group in enumerate(groups) if group.role == role]
        modes = {group.mode for _, group in members}
        keys = tuple(("group", at, "mode") if group.mode != "regular" else ("group", at) for at, group in members)
        if role != POLICY and len({group.model for _, group in members}) > 1:
            message = f"role {role} has groups of different models"
            yield Problem(code="CFG04", what=message, keys=keys, fix="give each model its own role")
        if modes not in ({"regular"}, {"prefill", "decode"}):
            yield Problem(
                code="CFG04",
                what=f"role {role} has groups of mode {', '.join(sorted(modes))}",
                keys=keys,
                why="requests of prefill groups continue in decode groups: each mode needs the other, and "
                "neither works beside regular groups",
                fix="add the other mode, or make all of them regular",
            )
        elif modes != {"regular"} and config.cluster.device == "cpu":
            reason = "SGLang sends their KV cache from pinned memory of GPUs, and its prefill server ends without"
            message = "prefill and decode groups need GPUs"
            yield Problem(code="CFG04", what=message, keys=keys, why=reason, fix='mode = "regular"')
        elif modes != {"regular"} and config.rollout.rollout_router == "builtin":
            yield Problem(
                code="CFG04",
                what="prefill and decode groups with rollout_router = builtin",
                keys=(*keys, ("rollout", "rollout_router")),
                why="slime's own router sends a request to one server, and theirs need two that are paired",
                fix="--rollout-router sglang   or   auto",
            )


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(os.path.expanduser(other))


def _placed(groups: Sequence[tuple[GroupTable, str]], policy: str, first: int, on_gpu: bool) -> Topology:
    """Every server with its number and its GPUs, in order."""
    server_groups, number, gpu = [], 0, first
    for group, where in groups:
        servers = []
        for _ in range(group.count):
            size = group.gpus if on_gpu else 0
            servers.append(ServerPlace(number=number, gpus=tuple(range(gpu, gpu + size))))
            number, gpu = number + 1, gpu + size
        server_groups.append(
            ServerGroup(
                name=group.name or group.role,
                role=group.role,
                model=group.model or policy,
                servers=tuple(servers),
                mode=group.mode,
                options=dict(group.options),
                env=dict(group.env),
                where=where,
            )
        )
    return Topology(groups=tuple(server_groups))


def _check_room(topology: Topology, first: int, gpus: int, shared: bool) -> None:
    needed = 1 + max((gpu for server in topology.servers for gpu in server.gpus), default=-1)
    if needed <= gpus:
        return
    parts = [f"{len(group.servers)} x {group.gpus} for {group.name}" for group in topology.groups]
    raise ConfigError(
        f"the run needs {needed} GPUs and sees {gpus}",
        code="CFG04",
        where=topology.groups[0].where,
        why=", ".join([*parts, "shared with the trainer" if shared else f"and {first} for the trainer"]),
        fix="fewer or smaller servers (--rollout-num-gpus, --rollout-num-gpus-per-engine, --engine-topology), or "
        "--colocate",
    )
