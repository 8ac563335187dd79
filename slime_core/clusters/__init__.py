"""Where engines and trainers live; the only place that chooses a backend."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Parts, Serving


def build_cluster(config: Config, plugins: Plugins, run_dir: Path) -> AbstractAsyncContextManager[Parts]:
    """Everything a run needs, by ``cluster_backend``; started on entering, taken down on leaving."""
    from slime_core.clusters.local import local_cluster

    return {"local": local_cluster}[config.cluster.cluster_backend](config, plugins, run_dir)


def build_serving(config: Config) -> AbstractAsyncContextManager[Serving]:
    """Engines alone, with the weights of ``hf_checkpoint``."""
    from slime_core.clusters.local import local_serving

    return {"local": local_serving}[config.cluster.cluster_backend](config)
