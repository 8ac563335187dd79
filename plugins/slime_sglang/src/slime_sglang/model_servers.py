"""Which SGLang servers a run has, by model; nothing is started here.

rollout_external_engine_addrs -> `attached`: servers that others run
[sglang], topology, placement -> `launched`: servers of ours, each with its command, log and place
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.clusters.host import ServerPlacements
from slime_core.errors import ConfigError
from slime_sglang import ports, start_gateway as gateways
from slime_sglang.command import Command, commands
from slime_sglang.installation import Installation, named_here
from slime_sglang.server import Server
from slime_sglang.topology import POLICY, ServerGroup, topology
from slime_sglang.weights import why_unmapped

if TYPE_CHECKING:
    from slime_core.config.schema import Config

READ = "slime_sglang.installation:read_here"


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelServers:
    """The servers of one model."""

    role: str
    model: str  # folder
    servers: tuple[Server, ...]
    features: frozenset[str]  # of the installation; empty: they are asked
    version: str = ""  # of SGLang
    torch: str = ""  # version in the servers' environment; empty: not known
    trainer: str = ""  # and in the trainer's; empty: that of this process
    installation: Installation | None = None  # that starts them
    places: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # server -> trainer ranks on its GPUs


def attached(config: Config) -> list[ModelServers]:
    """Servers that others run: all of them serve the policy."""
    rollout = config.rollout
    token = os.environ.get(rollout.rollout_engine_token_env, "")
    servers = [
        Server.attach(url, token=token, ca=rollout.rollout_engine_ca, number=number)
        for number, url in enumerate(rollout.rollout_external_engine_addrs)
    ]
    return [ModelServers(role=POLICY, model=rollout.hf_checkpoint, servers=tuple(servers), features=frozenset())]


async def launched(
    config: Config, placements: ServerPlacements, run_dir: Path, epoch: int, *, fixed: bool
) -> list[ModelServers]:
    """Servers of ours, not started yet.

    Raises:
        ConfigError: SGLang is not found, an option it does not know, GPUs that do not suffice.
    """
    installation: Installation = await placements.on_server(
        READ, dict(config.table("sglang")), config.cluster.device, named_here()
    )
    trainer: str = await placements.on_trainer("importlib.metadata:version", "torch")
    check_transport(config, installation, trainer)
    placed = topology(config, gpus=placements.gpus())
    how = commands(config, installation, placed, fixed=fixed)
    shared = secrets.token_urlsafe(32)
    world = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    return [
        ModelServers(
            role=role,
            model=placed.of(role)[0].model,
            servers=tuple(
                _server(
                    config,
                    placements,
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
            trainer=trainer,
            installation=installation,
            places=placed.beside(world) if role == POLICY and config.cluster.colocate else {},
        )
        for role in (POLICY, *placed.roles)
    ]


def check_transport(config: Config, installation: Installation, trainer: str = "") -> None:
    """Refuse weights by tensor that was asked for where the torch of both sides differs, before a server starts.

    ``trainer`` is the version in its environment; empty: that of this process.

    Raises:
        ConfigError: CFG04 with both versions.
    """
    if config.rollout.update_weight_transport == "tensor" and (reason := why_unmapped(installation.torch, trainer)):
        raise ConfigError(
            "update_weight_transport = tensor with another torch beside SGLang",
            code="CFG04",
            where="rollout.update_weight_transport",
            why=reason,
            fix=f"--update-weight-transport auto   or the same torch in the environment of {installation.python}",
        )


def _stamp(group: ServerGroup, epoch: int, fixed: bool) -> tuple[str, ...]:
    """Frozen weights are version 0 of this process."""
    return ("--weight-version", f"{epoch}.0") if group.frozen or fixed else ()


def _server(
    config: Config,
    placements: ServerPlacements,
    installation: Installation,
    group: ServerGroup,
    number: int,
    how: Command,
    run_dir: Path,
    more: Sequence[str],
    *,
    token: str = "",
) -> Server:
    placement = placements.server(number)
    launch = ports.server_launch(
        python=installation.python,
        arguments=(*how.arguments, *more),
        env={**how.env, **placement.env},
        log=run_dir / "log" / f"engine-{number}.log",
        address=placement.address,
        threads=config.cluster.cpu_threads,
    )
    return Server.launch(launch, number=number, group=group.name, token=token, host=placement.host)
