"""A Ray cluster: the same parts as on one machine, each in a process that a host starts where Ray has placed it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.clusters.ray.driver import Drivers
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Parts
    from slime_core.report import Report

LOCAL = "local"
"""The address of a cluster of our own on this machine."""

LETTER = "SLIME_LETTER"
"""Variable with the descriptor of what a detached driver's process is told."""

OURS = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # so that every port of it is bound to the loopback
    "RAY_worker_niceness": "0",  # hosts hand theirs on to the processes that compute
}
"""Environment of such a cluster."""


def address_of(config: Config) -> str:
    """The cluster that a run is to join."""
    return config.cluster.ray_address or os.environ.get("RAY_ADDRESS", "") or LOCAL


def ray_cluster(config: Config, plugins: Plugins, report: Report) -> AbstractAsyncContextManager[Parts]:
    """See `cluster.ray_cluster`; Ray reads these variables when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address_of(config) == LOCAL:
        for name, value in OURS.items():
            os.environ.setdefault(name, value)
    from slime_core.clusters.ray.cluster import ray_cluster

    return ray_cluster(config, plugins, report)


@contextmanager
def detached_drivers(address: str, config: Config | None = None) -> Iterator[tuple[Drivers, str]]:
    """Detached drivers of the cluster at an address, and the address as the cluster names it.

    With ``config`` what travels with its run goes to what is started from here.

    Raises:
        ConfigError: CFG17 no cluster, CFG19 no wheel.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from slime_core.clusters.ray.driver import Drivers
    from slime_core.clusters.ray.joining import entered
    from slime_core.clusters.ray.travelling import travelling

    with ExitStack() as stack:
        env = stack.enter_context(travelling(config)) if config is not None else {}
        there = stack.enter_context(entered(address, env=env))
        yield Drivers(), there
