"""What `cluster.device = auto` is on a cluster that is there: its machines count, not that of the driver."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from slime_ray import LOCAL, address_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config


def device_of(config: Config) -> Literal["cpu", "cuda", ""]:
    """``cuda`` where one of the cluster's machines has GPUs; empty where the run starts its cluster on this machine.

    Raises:
        ConfigError: CFG17 there is no cluster at the address.
    """
    address = address_of(config)
    return "" if address == LOCAL else _device_at(address)


@lru_cache
def _device_at(address: str) -> Literal["cpu", "cuda"]:
    """Joins the cluster for a moment, once a process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from slime_ray.joining import entered, machines

    with entered(address):
        return "cuda" if any(machine["GPU"] for machine in machines().values()) else "cpu"
