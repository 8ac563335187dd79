"""Core's own backends: the embedded engine, the FSDP2 trainer, and this machine as a cluster."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from slime_core.backends import ClusterBackend, EngineBackend, TrainerBackend
from slime_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Parts
    from slime_core.report import Report
    from slime_core.trainers.fsdp import FsdpTrainer


@hookimpl(trylast=True)
def slime_engine() -> list[EngineBackend]:
    """The embedded engine: it lives in the trainer's process, or in processes that the cluster starts."""
    return [EngineBackend(name="local", transports=frozenset({"tensors"}))]


@hookimpl(trylast=True)
def slime_trainer() -> list[TrainerBackend]:
    """FSDP2."""
    return [TrainerBackend(name="fsdp", trainer=_fsdp)]


@hookimpl(trylast=True)
def slime_cluster() -> list[ClusterBackend]:
    """This machine."""
    return [ClusterBackend(name="local", parts=_local)]


def _fsdp() -> type[FsdpTrainer]:
    from slime_core.trainers.fsdp import FsdpTrainer

    return FsdpTrainer


def _local(config: Config, plugins: Plugins, report: Report) -> AbstractAsyncContextManager[Parts]:
    from slime_core.clusters.local import local_cluster

    return local_cluster(config, plugins, report)
