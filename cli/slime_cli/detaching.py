"""Clusters that keep drivers which outlive the command, as the commands ask them; and the names of their actors."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.backends import ClusterBackend
from slime_core.clusters.detached import PREFIX
from slime_core.plugins.backends import named

if TYPE_CHECKING:
    from slime_core.clusters.detached import DetachedDriver, Order
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins


class DetachedDrivers(Protocol):
    """Detached drivers of one cluster, by name."""

    def submit(self, name: str, order: Order) -> dict[str, Any]:
        """Start one; its host, pid and run_dir.

        Raises:
            ConfigError: CFG16 one of that name is there, CFG17 it does not come up, CFG19 what travels with it cannot.
        """
        ...

    def names(self) -> list[str]:
        """All of them."""
        ...

    def find(self, name: str) -> DetachedDriver | None:
        """One of them; None if it does not exist or has ended."""
        ...

    def stop(self, name: str, *, now: bool) -> bool:
        """Ask it to end; False where it does not answer at present."""
        ...


class Detaching(Protocol):
    """A cluster that keeps drivers which outlive the command (`backends.ClusterBackend.detached`)."""

    def address(self, config: Config) -> str:
        """Of the cluster of a run.

        Raises:
            ConfigError: CFG04 it would end with the command.
        """
        ...

    def notes(self, config: Config, plugins: Plugins) -> list[str]:
        """What the user should know before the run is sent there."""
        ...

    def drivers(
        self, address: str, config: Config | None = None
    ) -> AbstractContextManager[tuple[DetachedDrivers, str]]:
        """Its drivers, and its address as it names it; with ``config`` what the run needs goes there too.

        Raises:
            ConfigError: CFG17 no cluster, CFG19 no wheel.
        """
        ...

    def environment(self, address: str) -> dict[str, str]:
        """Variables by which a driver finds the cluster that keeps it."""
        ...

    def check_room(self, config: Config) -> None:
        """Refuse a run for which the cluster is too small.

        Raises:
            ConfigError: CFG18.
        """
        ...


def actor_name(run_dir: Path) -> str:
    """The name of the actor that keeps the driver of a run directory, the same from wherever it is seen.

    Example: actor_name(Path("/data/runs/demo-0")) == "driver:demo-0-5f4dcc3b"
    """
    resolved = run_dir.resolve()
    digest = hashlib.blake2b(str(resolved).encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()
    return f"{PREFIX}{resolved.name}-{digest}"


def detaching() -> Detaching:
    """What keeps detached drivers where no config names a cluster.

    Raises:
        ConfigError: CFG04 no package that is installed can.
    """
    detached: Detaching | None = named("slime_cluster", "ray", (), ClusterBackend).detached
    assert detached is not None
    return detached
