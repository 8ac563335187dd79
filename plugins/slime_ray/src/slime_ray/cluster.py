"""A run's parts on a Ray cluster: trainer ranks and engines in processes of their own, wherever there is room.

    driver: loop, collector, ledger, plugins --- hosts (actors) --- ranks, engines, SGLang servers (processes)

The driver needs no GPU. All machines see the run directory; ranks of one meet in a file there, those of several at a
port of the first. SGLang's servers are started before the ranks, which then find the memory that they leave.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

from slime_core.clusters.local import Places, assembled
from slime_core.plugins.backends import engine_of
from slime_ray.head import head_kept
from slime_ray.joining import Hosts, head, hosts, joined
from slime_ray.placement import RayPlan, plan
from slime_ray.servers import RayPlacements
from slime_ray.travelling import check_travelling

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import RunComponents
    from slime_core.report import Report


def ray_cluster(config: Config, plugins: Plugins, report: Report) -> AbstractAsyncContextManager[RunComponents]:
    """Join the cluster, place and start everything; give it all back at the end, whatever happened.

    Raises:
        ConfigError: CFG17 no cluster, CFG18 no room in it, CFG19 a wheel that does not fit.
        EngineError, TrainerError: a process that does not come up, with the end of its log.
    """

    async def place(stack: AsyncExitStack) -> Places:
        for text in check_travelling(config, plugins):
            report.note(text)
        placed = plan(config)
        name = stack.enter_context(joined(config, placed))
        await stack.enter_async_context(head_kept(head()))
        ray_hosts = await stack.enter_async_context(hosts(config, placed))
        for text in _summary(name, placed, ray_hosts):
            report.note(text)
        if not engine_of(config).embedded and placed.engines and not ray_hosts.alone:
            report.note("servers listen on their machines' addresses: tokens and rollouts travel in clear text there")
        several = len({placement.bundle for placement in placed.ranks}) > 1
        return Places(
            ranks=len(placed.ranks),
            engines=len(placed.engines),
            start_rank=lambda number, child: ray_hosts.start(placed.ranks[number], child),
            start_engine=lambda number, child: ray_hosts.start(placed.engines[number], child),
            rendezvous=ray_hosts.machines[0].address if several else "",
            placements=RayPlacements(config, placed, ray_hosts),
            watched=[ray_hosts],
        )

    return assembled(config, plugins, report, place)


def _summary(name: str, placed: RayPlan, ray_hosts: Hosts) -> list[str]:
    """Where everything lives; SGLang's servers are engines too."""
    names = [machine.name for machine in ray_hosts.machines]
    where = [f"{name}: {len(placed.ranks)} trainer rank(s), {len(placed.engines)} engine(s)"]
    for number, machine in enumerate(names):
        ranks = [str(i) for i, placement in enumerate(placed.ranks) if placement.bundle == number]
        engines = [str(i) for i, placement in enumerate(placed.engines) if placement.bundle == number]
        parts = [f"rank {', '.join(ranks)}"] * bool(ranks) + [f"engine {', '.join(engines)}"] * bool(engines)
        where.append(f"on {machine}: {'; '.join(parts) or 'nothing'}")
    return where
