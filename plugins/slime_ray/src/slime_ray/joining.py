"""A Ray cluster to run on: one that is there, or one of our own on this machine; and its hosts, one a bundle.

    ray_address -> ray.init -> machines -> placement group -> a `channel.Host` in each bundle -> starts children there

A cluster started here listens on the loopback, requires Ray's token, and has no dashboard. It ends with the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RuntimeEnvSetupError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_core.clusters.channel import Channel, Child
from slime_core.clusters.hangs import Look, Member
from slime_core.clusters.host import NCCL_MEMORY
from slime_core.errors import ConfigError
from slime_ray import LOCAL, address_of
from slime_ray.channel import Host, RayChannel
from slime_ray.domains import selectors
from slime_ray.head import answers
from slime_ray.placement import ProcessPlacement, RayPlan, Resources, lacking, oversize, table
from slime_ray.token import address_of_auto, let_in, take_up
from slime_ray.travelling import not_set_up, travelling

if TYPE_CHECKING:
    from slime_core.config.schema import Config

ADDRESS = "cluster.ray_address"
NAMESPACE = "slime"  # of our actors' names
LOOPBACK = "127.0.0.1"
PROBE = 10.0  # seconds in which a head must take a connection
STARTS = 3  # tries to start a cluster of our own
TOKEN = "export RAY_AUTH_MODE=token, and the cluster's own token: RAY_AUTH_TOKEN=... or ~/.ray/auth_token"
STATUS = "ray status --address HOST:PORT   shows whether it runs; --ray-address local starts one of its own"
KEPT = (signal.SIGINT, signal.SIGTERM)
"""Signals whose handlers are ours before and after Ray has started."""


@dataclass(slots=True)
class Machine:
    """One bundle's host."""

    host: Any  # handle of a `channel.Host`
    name: str
    address: str
    gpus: Sequence[str]  # CUDA's numbers of the bundle's
    pid: int = 0

    @property
    def node(self) -> str:
        """See `hangs.Asked`."""
        return self.name

    async def look(self) -> Look:
        """See `hangs.Asked`."""
        state: Look = await self.host.look.remote()
        return state

    async def kill(self) -> None:
        """See `hangs.Asked`; calls that wait for it end then."""
        ray.kill(self.host)


class Hosts:
    """Hosts of a plan's bundles; ``start`` for a placement is a `channel.Start`. ``driver``: our address."""

    def __init__(self, machines: Sequence[Machine], driver: str) -> None:
        self.machines = machines
        self.alone = {driver, LOOPBACK} >= {machine.address for machine in machines}

    def reached(self, machine: Machine) -> str:
        """The address of a server on a machine: the loopback if all machines are this one."""
        return LOOPBACK if self.alone else machine.address

    def visible(self, placement: ProcessPlacement) -> dict[str, str]:
        """The variable by which a process sees only the GPUs of its placement; empty where it has none."""
        names = [self.machines[placement.bundle].gpus[number] for number in placement.gpus]
        return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}

    def members(self) -> list[Member]:
        """See `hangs.Watched`."""
        return [Member(name=f"host {number}", channel=machine) for number, machine in enumerate(self.machines)]

    async def start(self, placement: ProcessPlacement, child: Child) -> Channel:
        """Start a child where its placement says; it sees only the GPUs of that placement.

        Raises:
            ConnectionError: the host is gone.
            OSError: it cannot be started there.
        """
        machine = self.machines[placement.bundle]
        env = {**_carried(), **child.env, **self.visible(placement)}
        placed = replace(child, env=env, folder=child.folder or str(Path.cwd()))
        return await RayChannel.start(machine.host, machine.name, placed)


@contextmanager
def joined(config: Config, plan: RayPlan) -> Iterator[str]:
    """The cluster of ``ray_address`` for a while; the answer says which it is.

    Raises:
        ConfigError: CFG17 no cluster at that address, or one of another version.
    """
    address = address_of(config)
    processors = int(sum(bundle.get("CPU", 0) for bundle in plan.bundles))
    with travelling(config) as env, entered(address, env=env, processors=processors) as location:
        yield "its own Ray cluster" if address == LOCAL else f"Ray at {location}"


@contextmanager
def entered(address: str, *, env: Mapping[str, Any] | None = None, processors: int = 0) -> Iterator[str]:
    """The cluster at an address, or one of our own of at least so many processors, for a while; its own address.

    Args:
        env: Ray's runtime environment of the processes started from here.

    Raises:
        ConfigError: CFG17 no cluster at that address, or one of another version.
    """
    if ray.is_initialized():
        raise ConfigError("this process is part of a Ray cluster already", code="CFG17", where=ADDRESS)
    with _our_signals():
        _init(address, processors, dict(env or {}))
    try:
        yield head()
    finally:
        with _our_signals():
            ray.shutdown()


def head() -> str:
    """``HOST:PORT`` of the cluster's GCS."""
    return str(ray.get_runtime_context().gcs_address)


def _init(address: str, processors: int, env: dict[str, Any]) -> None:
    common: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "warning"}
    if env:
        common["runtime_env"] = env
    try:
        if address == LOCAL:
            _start_ray(processors, common)
        else:
            _probe(address)
            ray.init(address, **common)
    except Exception as error:  # Ray has no exception class for most failures here
        shut = isinstance(error, PermissionError) or "token" in str(error).lower()
        raise ConfigError(
            f"no Ray cluster can be joined at {address}",
            code="CFG17",
            where=ADDRESS,
            why=" ".join(str(error).split())[:600],
            fix=TOKEN if shut else STATUS,
        ) from error


def session_folder() -> dict[str, str]:
    """Where Ray keeps a cluster of our own, where its own choice, the folder for temporary files, has too long a path.

    Its sockets lie 68 characters below that folder, and Linux names sockets in 107.
    """
    return {"_temp_dir": "/tmp/ray"} if len(tempfile.gettempdir()) > 107 - 68 else {}


def _start_ray(processors: int, common: dict[str, Any]) -> None:
    """Start one; Ray gives its parts 30 seconds to come up, which a busy machine may need more than once."""
    cores = max(processors, len(os.sched_getaffinity(0)))
    common |= session_folder()
    for remaining in range(STARTS)[::-1]:
        try:
            ray.init(LOCAL, num_cpus=cores, include_dashboard=False, _node_ip_address=LOOPBACK, **common)
            return
        except Exception:
            ray.shutdown()
            if not remaining:
                raise


def _probe(address: str) -> None:
    """Connect once and raise an OSError: Ray itself retries for long where no server listens."""
    location = address_of_auto() if address == "auto" else address
    host, _, port = location.rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), PROBE).close()
        if not let_in(location) and not (take_up() and let_in(location)):
            raise PermissionError("the cluster requires a different token from the one this process has")


@contextmanager
def _our_signals() -> Iterator[None]:
    """Ray replaces them with its own."""
    before = {number: signal.getsignal(number) for number in KEPT}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)


@asynccontextmanager
async def hosts(config: Config, plan: RayPlan) -> AsyncIterator[Hosts]:
    """Reserve the plan's bundles and put a host into each; all are given back at the end.

    Raises:
        ConfigError: CFG18 the cluster has no room for them, with the demand and the resources.
    """
    driver = str(ray.util.get_node_ip_address())
    if not plan.bundles:
        yield Hosts([], driver)
        return
    ranks = len({placement.bundle for placement in plan.ranks})
    group = await reserve(plan.bundles, config.cluster.ray_placement_timeout, ranks=ranks)
    actors: list[Any] = []
    try:
        actor_class = ray.remote(Host)
        for number, bundle in enumerate(plan.bundles):
            strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
            options = actor_class.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=strategy,
                max_concurrency=1000,
            )
            actors.append(options.remote())
        try:
            facts = await asyncio.gather(*(actor.where.remote() for actor in actors))
        except RuntimeEnvSetupError as error:
            raise not_set_up(error) from error
        yield Hosts([Machine(actor, *fact) for actor, fact in zip(actors, facts, strict=True)], driver)
    finally:
        if await answers(head()):  # without it Ray would wait
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)


async def reserve(bundles: Sequence[Resources], timeout: float, *, ranks: int = 0) -> Any:
    """A placement group of these bundles, packed, within one NVLink domain where machines name theirs (`domains`).

    The first ``ranks`` bundles are the trainer's.

    Raises:
        ConfigError: CFG18 machines that are too small, or others' work that does not end within ``timeout`` seconds.
    """
    check_room(bundles)
    labels = {name: node["Labels"] for name, node in _nodes().items()}
    within = selectors(bundles, ranks, machines(free=True), labels)
    copies = [dict(bundle) for bundle in bundles]
    group = placement_group(copies, strategy="PACK", bundle_label_selector=within or None)
    try:
        await asyncio.wait_for(group.ready(), timeout)
    except TimeoutError:
        remove_placement_group(group)
        _no_room(bundles, f"other jobs still used it after {timeout:g} seconds", machines(free=True))
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def check_room(bundles: Sequence[Resources]) -> None:
    """Refuse bundles for which the cluster's machines are too small.

    Raises:
        ConfigError: CFG18.
    """
    if missing := lacking(bundles, machines()):
        message = f"{len(missing)} of {len(bundles)} find no machine that is large enough"
        _no_room(bundles, oversize(bundles, machines()) or message, machines())


def _no_room(bundles: Sequence[Resources], why: str, free: Mapping[str, Resources]) -> None:
    raise ConfigError(
        "the Ray cluster has no room for the run",
        code="CFG18",
        where="cluster.actor_num_nodes, cluster.actor_num_gpus_per_node, rollout.rollout_num_gpus",
        why=f"{why}; {table(bundles, free)}",
        fix="request less, --colocate, add machines, or wait longer: --ray-placement-timeout SECONDS",
    )


def machines(*, free: bool = False) -> dict[str, dict[str, float]]:
    """Processors and GPUs of each living machine, all of them or those that are free, by name."""
    from ray._private.state import available_resources_per_node

    now = available_resources_per_node() if free else {}
    machines: dict[str, dict[str, float]] = {}
    for name, node in _nodes().items():
        resources = now.get(node["NodeID"], {}) if free else node["Resources"]
        machines[name] = {kind: float(resources.get(kind, 0)) for kind in ("GPU", "CPU")}
    return machines


def _nodes() -> dict[str, dict[str, Any]]:
    """Ray's facts about each living machine, by name."""
    nodes: dict[str, dict[str, Any]] = {}
    for node in ray.nodes():
        if node["Alive"]:
            name = str(node["NodeName"])
            name = f"{name}#{node['NodeID'][:6]}" if name in nodes else name  # two nodes of one machine
            nodes[name] = node
    return nodes


def _carried() -> dict[str, str]:
    """Variables that children need from the driver's environment, in addition to their machine's."""
    return {name: os.environ[name] for name in ("PYTHONPATH", NCCL_MEMORY) if name in os.environ}
