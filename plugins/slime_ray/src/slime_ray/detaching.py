"""Drivers that outlive the command that started them, kept by actors of the cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError
from slime_ray import LOCAL, address_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_ray.driver import Drivers


class RayDetached:
    """Implements `slime_cli.detaching.Detaching`."""

    def address(self, config: Config) -> str:
        """See `slime_cli.detaching.Detaching`: of the cluster, which must be there when the command is not."""
        address = address_of(config)
        if address == LOCAL:
            raise ConfigError(
                "--detach needs a cluster that outlives the command",
                code="CFG04",
                where="cluster.ray_address",
                why="a Ray cluster of the run's own ends with it"
                if config.cluster.ray_address
                else "no address is given",
                fix="ray start --head   starts one on this machine; then --ray-address auto",
            )
        return address

    def notes(self, config: Config, plugins: Plugins) -> list[str]:
        """See `slime_cli.detaching.Detaching`."""
        from slime_ray.travelling import check_travelling

        return list(check_travelling(config, plugins))

    @contextmanager
    def drivers(self, address: str, config: Config | None = None) -> Iterator[tuple[Drivers, str]]:
        """See `slime_cli.detaching.Detaching`."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from slime_ray.driver import Drivers
        from slime_ray.joining import entered
        from slime_ray.travelling import travelling

        with ExitStack() as stack:
            env = stack.enter_context(travelling(config)) if config is not None else {}
            location = stack.enter_context(entered(address, env=env))
            yield Drivers(), location

    def environment(self, address: str) -> dict[str, str]:
        """See `slime_cli.detaching.Detaching`."""
        return {"RAY_ADDRESS": address}

    def check_room(self, config: Config) -> None:
        """See `slime_cli.detaching.Detaching`."""
        from slime_ray.joining import check_room
        from slime_ray.placement import plan

        check_room(plan(config).bundles)
