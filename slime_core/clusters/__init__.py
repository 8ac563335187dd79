"""Where engines and trainers live."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from slime_core.plugins.backends import cluster_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Parts, Serving
    from slime_core.report import Report


def build_cluster(config: Config, plugins: Plugins, report: Report) -> AbstractAsyncContextManager[Parts]:
    """Everything a run needs, by ``cluster_backend``; started on entering, taken down on leaving."""
    return cluster_of(config).parts(config, plugins, report)


def build_serving(config: Config) -> AbstractAsyncContextManager[Serving]:
    """Engines alone, on this machine, with the weights of ``hf_checkpoint``."""
    from slime_core.clusters.local import local_serving

    return local_serving(config)
