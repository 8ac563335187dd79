"""Rules of where a run lives: what cannot hold there, and what has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict
from slime_core.plugins.backends import engine_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config

BACKEND = "cluster.cluster_backend"


def conflicts(config: Config) -> Iterator[Problem]:
    """What a Ray cluster cannot do."""
    cluster, rollout = config.cluster, config.rollout
    road = rollout.update_weight_transport
    if not engine_of(config).embedded and rollout.debug_rollout_only and road in ("tensor", "nccl"):
        yield conflict(
            f"update_weight_transport = {road} with debug_rollout_only on a Ray cluster",
            ["rollout.update_weight_transport", "rollout.debug_rollout_only", BACKEND],
            why="no rank trains, so the weights come from the driver, which has no GPU there",
            fix="--update-weight-transport disk   or   auto",
        )
    address = cluster.ray_address
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("", "auto", "local") and not (host and colon and port.isdigit()):
        yield conflict(
            "ray_address is not an address of a Ray cluster",
            ["cluster.ray_address"],
            code="CFG03",
            why=f"'{address}' is neither HOST:PORT nor auto nor local",
            fix="ray status   on the head machine shows it; --ray-address HOST:6379",
        )
    if odd := [path for path in cluster.ray_py_modules if not path.endswith(".whl") and not _is_package(Path(path))]:
        yield conflict(
            "ray_py_modules takes wheels and package folders",
            ["cluster.ray_py_modules"],
            code="CFG03",
            why=f"neither: {', '.join(odd)}",
            fix="python -m build --wheel PLUGIN_FOLDER   makes a wheel; a package folder has an __init__.py",
        )


def _is_package(path: Path) -> bool:
    return (path / "__init__.py").is_file()
