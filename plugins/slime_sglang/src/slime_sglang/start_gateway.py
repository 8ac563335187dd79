"""Who spreads requests over a model's servers: SGLang's router or none.

rollout_router = builtin                                    -> slime's own
sglang, or a model of prefill and decode servers            -> SGLang's, or an error where it is not installed
auto, several servers of ours, SGLang's router beside them  -> SGLang's; otherwise slime's own
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.clusters.host import ServerPlacement
from slime_core.errors import EngineError
from slime_sglang import ports
from slime_sglang.gateway import KINDS, LOG, Gateway
from slime_sglang.installation import Installation, read_here
from slime_sglang.router_options import router_arguments, uses_router
from slime_sglang.server import Server
from slime_sglang.topology import POLICY

if TYPE_CHECKING:
    from slime_core.config.schema import Config

Note = Callable[[str], None]


def kinds(servers: Sequence[Server]) -> dict[int, str]:
    """What each server does, by its number: regular, prefill or decode.

    Raises:
        EngineError: ENG86 kinds that cannot serve one model together.
    """
    kinds_by_number = {
        server.address.number: KINDS.get(str(server.facts.get("disaggregation_mode") or "null"), "regular")
        for server in servers
    }
    if set(kinds_by_number.values()) not in ({"regular"}, {"prefill", "decode"}):
        raise EngineError(
            f"servers of kinds {', '.join(sorted(set(kinds_by_number.values())))} cannot serve one model together",
            code="ENG86",
            where=", ".join(server.address.url for server in servers),
            why="a request goes to a regular server, or to a prefill and a decode server",
            fix="start them all without --disaggregation-mode, or some with prefill and the others with decode",
        )
    return kinds_by_number


def pairs(by_number: dict[int, str]) -> list[frozenset[int]]:
    """Prefill servers and decode servers: without one of each none serves. Empty for regular ones."""
    modes = sorted(set(by_number.values()) - {"regular"})
    return [frozenset(number for number, kind in by_number.items() if kind == mode) for mode in modes]


async def gateway(
    config: Config,
    servers: Sequence[Server],
    installation: Installation | None,
    *,
    role: str,
    run_dir: Path,
    note: Note,
    placement: ServerPlacement | None = None,
) -> Gateway | None:
    """SGLang's router for these servers, not started; None where slime spreads their requests.

    Args:
        config: of the run.
        servers: of one model, ready.
        installation: that started them; None where others did.
        role: of the model.
        run_dir: its log goes to ``log/gateway.log`` there.
        note: told which router it is.
        placement: where it lives; None is this machine.

    Raises:
        ConfigError: CFG04 it is needed and not installed; its options.
        EngineError: ENG86 servers that do not fit each other.
    """
    paired = bool(pairs(kinds(servers)))
    version = installation.router if installation is not None else ""
    if not uses_router(
        config, servers=len(servers) if installation is not None else 0, installed=version, paired=paired
    ):
        return None
    if installation is None:
        installation = await asyncio.to_thread(read_here, config.table("sglang"), config.cluster.device)
    words = router_arguments(config, installation, paired=paired)
    log = run_dir / "log" / (LOG if role == POLICY else f"gateway-{role}.log")
    policy = ports.option(words, "--policy", "cache_aware")
    of = "" if role == POLICY else f" of {role}"
    note(f"requests{of} go through SGLang's router {installation.router}, policy {policy}; log: {log}")
    rollout, placement = config.rollout, placement or ServerPlacement()
    return Gateway(
        ports.router_launch(
            python=installation.python,
            arguments=words,
            env=installation.env,
            log=log,
            address=placement.address,
            threads=config.cluster.cpu_threads,
        ),
        token=servers[0].address.token if paired else "",  # SGLang's router shows its own token to such servers
        interval=rollout.rollout_health_check_interval,
        timeout=rollout.rollout_health_check_timeout,
        start_timeout=rollout.rollout_start_timeout,
        max_restarts=rollout.rollout_max_restarts,
        host=placement.host,
        note=note,
    )


def one_token(modes: Collection[str]) -> bool:
    """Whether servers of these modes share a token: SGLang's router has only one for prefill and decode servers."""
    return set(modes) != {"regular"}
