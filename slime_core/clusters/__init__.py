"""Where engines and trainers live; core's own backends: the embedded engine, the FSDP2 trainer, and this machine."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from slime_core.backends import ClusterBackend, EngineBackend, TrainerBackend
from slime_core.hookspecs import hookimpl
from slime_core.planning.embedded import footprint as engine_footprint
from slime_core.planning.fsdp import footprint as trainer_footprint
from slime_core.plugins.backends import cluster_of
from slime_core.trainers import rank_grid

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import RunComponents, Serving
    from slime_core.report import Report
    from slime_core.trainers.fsdp import FsdpTrainer


def build_cluster(config: Config, plugins: Plugins, report: Report) -> AbstractAsyncContextManager[RunComponents]:
    """Everything a run needs, by ``cluster_backend``; started on entering, taken down on leaving."""
    return cluster_of(config).start(config, plugins, report)


def build_serving(config: Config) -> AbstractAsyncContextManager[Serving]:
    """Engines alone, on this machine, with the weights of ``hf_checkpoint``."""
    from slime_core.clusters.local import local_serving

    return local_serving(config)


@hookimpl(trylast=True)
def slime_engine() -> list[EngineBackend]:
    """The embedded engine: it lives in the trainer's process, or in processes that the cluster starts."""
    return [EngineBackend(name="local", memory=engine_footprint)]


@hookimpl(trylast=True)
def slime_trainer() -> list[TrainerBackend]:
    """FSDP2."""
    return [TrainerBackend(name="fsdp", trainer=_fsdp, rules=rank_grid.conflicts, memory=trainer_footprint)]


@hookimpl(trylast=True)
def slime_cluster() -> list[ClusterBackend]:
    """This machine."""
    return [ClusterBackend(name="local", start=_local)]


def _fsdp() -> type[FsdpTrainer]:
    from slime_core.trainers.fsdp import FsdpTrainer

    return FsdpTrainer


def _local(config: Config, plugins: Plugins, report: Report) -> AbstractAsyncContextManager[RunComponents]:
    from slime_core.clusters.local import local_cluster

    return local_cluster(config, plugins, report)
