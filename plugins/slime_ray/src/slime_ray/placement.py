"""A run's demand of a Ray cluster: bundles, and which part lives in which.

    GPUs, colocate       a bundle a training machine: its ranks, and the engines that share their GPUs
    GPUs, disaggregated  the same, and a bundle an engine
    CPU                  the same, in processors instead of GPUs

A bundle lies within one machine, so ranks of a machine and GPUs of an engine are never torn apart; Ray packs bundles
onto as few machines as it can. Engines are embedded ones, or SGLang's servers as their topology has them: there rank n
has GPU n, and servers that share GPUs with the trainer have lower numbers than all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError
from slime_core.plugins.backends import engine_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config

Resources = Mapping[str, float]
"""``CPU`` and ``GPU``, as Ray counts them."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ProcessPlacement:
    """Where a rank or an engine lives.

    Example: ProcessPlacement(bundle=0, gpus=(2, 3))
    """

    bundle: int
    gpus: tuple[int, ...] = ()  # numbers among the bundle's; empty on a CPU


@dataclass(slots=True, frozen=True, kw_only=True)
class RayPlan:
    """Bundles, and the placements of ranks and engines in them; engines, or servers, by their numbers."""

    bundles: tuple[dict[str, float], ...]
    ranks: tuple[ProcessPlacement, ...]
    engines: tuple[ProcessPlacement, ...]


def plan(config: Config) -> RayPlan:
    """The placement of a resolved config.

    Raises:
        ConfigError: CFG04 engines whose GPUs would lie on two training machines; CFG01 to CFG07 as
            `topology.topology`.
    """
    cluster, rollout = config.cluster, config.rollout
    gpu = cluster.device == "cuda"
    per_node = cluster.actor_num_gpus_per_node
    bundles: list[dict[str, float]] = []
    ranks: list[ProcessPlacement] = []
    if not rollout.debug_rollout_only:
        for machine in range(cluster.actor_num_nodes):
            bundles.append({"GPU": per_node, "CPU": per_node} if gpu else {"CPU": per_node * cluster.cpu_threads})
            ranks += [ProcessPlacement(bundle=machine, gpus=(i,) if gpu else ()) for i in range(per_node)]
    gpus_of = engine_of(config).gpus
    if rollout.debug_train_only or (gpus_of is not None and rollout.rollout_external_engine_addrs):
        return RayPlan(bundles=tuple(bundles), ranks=tuple(ranks), engines=())
    if gpus_of is not None:
        trained, servers = len(bundles), enumerate(gpus_of(config))
        placements = [
            _placement(n, gpus, trained, per_node, cluster.cpu_threads, bundles, config) for n, gpus in servers
        ]
        return RayPlan(bundles=tuple(bundles), ranks=tuple(ranks), engines=tuple(placements))
    count = engines(config)
    size = rollout.rollout_num_gpus_per_engine if gpu else 1
    if cluster.colocate and ranks:
        placements = _shared(count, size, per_node, len(ranks), gpu=gpu)
    else:
        placements = [
            ProcessPlacement(bundle=len(bundles) + i, gpus=tuple(range(size)) if gpu else ()) for i in range(count)
        ]
        bundles += [{"GPU": size, "CPU": 1} if gpu else {"CPU": cluster.cpu_threads} for _ in range(count)]
    return RayPlan(bundles=tuple(bundles), ranks=tuple(ranks), engines=tuple(placements))


def _placement(
    number: int,
    server: Sequence[int],
    trained: int,
    gpus: int,
    threads: int,
    bundles: list[dict[str, float]],
    config: Config,
) -> ProcessPlacement:
    """Of a server: among the ranks of the first ``trained`` bundles, or in a bundle that is added for it."""
    shares, world = config.cluster.colocate and trained > 0, trained * gpus
    if not server:
        if shares:
            return ProcessPlacement(bundle=number % trained)
        bundles.append({"CPU": threads})
        return ProcessPlacement(bundle=len(bundles) - 1)
    first, last = server[0], server[-1]
    if not shares or first >= world:
        bundles.append({"GPU": len(server), "CPU": 1})
        return ProcessPlacement(bundle=len(bundles) - 1, gpus=tuple(range(len(server))))
    if first // gpus != last // gpus:
        raise ConfigError(
            f"server {number} of {len(server)} GPUs would lie on two machines",
            code="CFG04",
            where="rollout.engine_topology"
            if config.rollout.engine_topology
            else "rollout.rollout_num_gpus_per_engine",
            why=f"its GPUs are {first} to {last} of the {world} that servers share with the trainer; each training "
            f"machine has {gpus}, and a server cannot span machines",
            fix=f"servers whose sizes fill each {gpus} GPUs   or --no-colocate, which gives servers their own GPUs",
        )
    return ProcessPlacement(bundle=first // gpus, gpus=tuple(gpu % gpus for gpu in server))


def engines(config: Config) -> int:
    """Number of embedded engines of a run: as configured, or one a GPU; 1 on a CPU."""
    rollout, cluster = config.rollout, config.cluster
    if rollout.rollout_num_engines:
        return rollout.rollout_num_engines
    if cluster.device != "cuda":
        return 1
    trainers = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
    gpus = rollout.rollout_num_gpus or (trainers if cluster.colocate else rollout.rollout_num_gpus_per_engine)
    return max(1, gpus // rollout.rollout_num_gpus_per_engine)


def _shared(count: int, size: int, gpus: int, world: int, *, gpu: bool) -> list[ProcessPlacement]:
    """Seats of engines among the ranks: on GPUs side by side from the first on, on a CPU one machine after another."""
    if not gpu:
        return [ProcessPlacement(bundle=i % (world // gpus)) for i in range(count)]
    if count * size > world or gpus % size:
        raise ConfigError(
            f"{count} engines of {size} GPUs do not fit the {world} GPUs that they share with the trainer",
            code="CFG04",
            where="rollout.rollout_num_gpus_per_engine",
            why=f"each machine has {gpus} of them, and an engine lies within one machine",
            fix=f"--rollout-num-gpus-per-engine {gpus}   or --no-colocate, which gives engines their own GPUs",
        )
    return [
        ProcessPlacement(bundle=first // gpus, gpus=tuple(range(first % gpus, first % gpus + size)))
        for first in range(0, count * size, size)
    ]


def lacking(bundles: Sequence[Resources], machines: Mapping[str, Resources]) -> list[int]:
    """Numbers of the bundles that find no room on any machine, largest bundles placed first; empty: all fit.

    Example: lacking([{"GPU": 8}], {"node-a": {"GPU": 4, "CPU": 32}}) == [0]
    """
    free = {name: dict(resources) for name, resources in machines.items()}
    out = []
    for number in sorted(range(len(bundles)), key=lambda i: (-bundles[i].get("GPU", 0), -bundles[i].get("CPU", 0))):
        bundle = bundles[number]
        room = next((have for have in free.values() if all(have.get(k, 0) >= v for k, v in bundle.items())), None)
        if room is None:
            out.append(number)
            continue
        for kind, amount in bundle.items():
            room[kind] -= amount
    return sorted(out)


def oversize(bundles: Sequence[Resources], machines: Mapping[str, Resources]) -> str:
    """Why the need bundle would fit no machine, were it empty; nothing where it fits one.

    Example: oversize([{"GPU": 8}], {"node-a": {"GPU": 4}})
    """
    for kind in ("GPU", "CPU"):
        need = max((bundle.get(kind, 0) for bundle in bundles), default=0)
        most = max((machine.get(kind, 0) for machine in machines.values()), default=0)
        if need > most:
            return (
                f"an engine, or a machine's ranks, of {need:g} {kind} lie within one machine: none has over {most:g}"
            )
    return ""


def table(bundles: Sequence[Resources], machines: Mapping[str, Resources]) -> str:
    """Wanted against available, for a person.

    Example: "wanted: 2 x (4 GPU, 4 CPU); there: node-a (2 of 8 GPU, 30 of 32 CPU)"
    """
    kinds: dict[str, int] = {}
    for bundle in bundles:
        text = shown(bundle)
        kinds[text] = kinds.get(text, 0) + 1
    requests = ", ".join(f"{count} x ({text})" for text, count in kinds.items())
    free = ", ".join(f"{name} ({shown(resources)})" for name, resources in machines.items())
    return f"wanted: {requests}; free: {free or 'no machine'}"


def shown(resources: Resources) -> str:
    """`4 GPU, 4 CPU`."""
    return ", ".join(f"{resources[kind]:g} {kind}" for kind in ("GPU", "CPU") if resources.get(kind))
