"""A Ray cluster: the same parts as on one machine, each in a process that a host starts where Ray has placed it."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import RunComponents
    from slime_core.report import Report

LOCAL = "local"
"""The address of a cluster of our own on this machine."""

OURS = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # so that every port of it is bound to the loopback
    "RAY_worker_niceness": "0",  # hosts hand theirs on to the processes that compute
}
"""Environment of such a cluster."""


def address_of(config: Config) -> str:
    """The cluster that a run is to join."""
    return config.cluster.ray_address or os.environ.get("RAY_ADDRESS", "") or LOCAL


def ray_cluster(config: Config, plugins: Plugins, report: Report) -> AbstractAsyncContextManager[RunComponents]:
    """See `cluster.ray_cluster`; Ray reads these variables when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address_of(config) == LOCAL:
        for name, value in OURS.items():
            os.environ.setdefault(name, value)
    from slime_ray.cluster import ray_cluster

    return ray_cluster(config, plugins, report)
