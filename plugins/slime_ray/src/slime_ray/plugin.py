"""A Ray cluster as `cluster_backend = "ray"`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import slime_core
from slime_core.backends import ClusterBackend, Plan, Planning
from slime_ray import ray_cluster
from slime_ray.detaching import RayDetached

if TYPE_CHECKING:
    from slime_core.config.problems import Problem
    from slime_core.config.schema import Config


@slime_core.hookimpl
def slime_cluster() -> list[ClusterBackend]:
    """A Ray cluster: one that runs already, or one of the run's own on this machine."""
    return [
        ClusterBackend(
            name="ray",
            library="ray",
            rules=_rules,
            plan=_plan,
            start=ray_cluster,
            remote=True,
            device=_device,
            detached=RayDetached(),
        )
    ]


def _rules(config: Config) -> Iterable[Problem]:
    from slime_ray import rules

    return rules.conflicts(config)


def _plan(planning: Planning) -> Plan | None:
    from slime_ray.placement import plan

    plan(planning.config)
    return None


def _device(config: Config) -> str:
    from slime_ray.device import device_of

    return device_of(config) or ""
