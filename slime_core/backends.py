"""What a plugin provides as engine, trainer or cluster; `plugins.backends` finds them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import click
    from pydantic import BaseModel

    from slime_core.config.problems import Origins, Problem
    from slime_core.config.schema import Config
    from slime_core.planning.footprint import EngineFootprint, Subject, TrainerFootprint
    from slime_core.protocols import Engine, RunComponents, ServerProcess
    from slime_core.types import WeightRoute


def nothing(*_: Any) -> tuple[()]:
    """No problems, no notices."""
    return ()


@dataclass(slots=True, frozen=True, kw_only=True)
class Plan:
    """What a backend would do: ``facts``, JSON-ready, for `slime run --dry-run --json`, and ``rows`` of its table."""

    facts: dict[str, Any]
    rows: Mapping[str, str]


@dataclass(slots=True, frozen=True, kw_only=True)
class Planning:
    """What a backend checks before anything starts.

    ``config`` is settled for this machine. ``complete``: a dry run, which may import heavy packages.
    """

    config: Config
    origins: Origins
    plugins: Any  # plugins.Plugins
    folder: Any = None  # weights.folder.ModelFolder, where it is open
    complete: bool = False


@dataclass(slots=True, frozen=True, kw_only=True)
class Backend:
    """What engines, trainers and clusters have in common.

    A backend's own options stand in the table ``[NAME]`` of a recipe, and ``section`` is the pydantic model of it. On
    the command line they are ``--NAME-KEY``; those that ``flags`` lists, with the types of their values, are also
    ``--KEY``.
    """

    name: str
    library: str = ""  # a module that it cannot run without, of a package that comes with an extra
    section: type[BaseModel] | None = None  # a backend without it checks [NAME] in ``problems``
    tables: tuple[str, ...] = ()  # tables inside [NAME]
    flags: Callable[[], Mapping[str, Any]] | None = None
    options: Callable[[], list[dict[str, str]]] | None = None  # rows of `slime config keys --backend NAME`
    markdown: Callable[[list[dict[str, str]]], str] | None = None  # those rows as tables of a page
    problems: Callable[[Config, Origins], Iterable[Problem]] = nothing  # of [NAME] by itself, used or not
    rules: Callable[[Config], Iterable[Problem]] = nothing  # what cannot hold where it is used
    notices: Callable[[Config], Iterable[str]] = nothing
    plan: Callable[[Planning], Plan | None] | None = None  # its checks before anything starts
    resumable: frozenset[str] = frozenset()  # keys of [NAME] that may differ when a run is resumed


@dataclass(slots=True, kw_only=True)
class ServedEngines:
    """Engines that run.

    ``resync`` takes a function that sends the weights of the policy once more, for servers that may restart.
    """

    engine: Engine
    roles: dict[str, Engine] = field(default_factory=dict)  # frozen models, by role
    processes: Sequence[ServerProcess] = ()
    resync: Callable[[Callable[[WeightRoute], Any]], object] = nothing


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineStart:
    """What an engine is started with.

    With ``fixed`` it serves the weights of ``folder`` as version 0; no trainer sends others.
    """

    config: Config
    folder: Any  # weights.folder.ModelFolder
    run_dir: Path
    epoch: int
    note: Callable[[str], None]
    placements: Any = None  # clusters.host.ServerPlacements, where servers live; None is this machine
    fixed: bool = False


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineBackend(Backend):
    """What `rollout_engine` names.

    Without ``start`` it is embedded: it lives in the trainer's process, or in processes that the cluster starts.

    Example:
        EngineBackend(name="mine", start=start)     # start(EngineStart) -> async context manager of Served
    """

    start: Callable[[EngineStart], AbstractAsyncContextManager[ServedEngines]] | None = None
    gpus: Callable[[Config], Sequence[Sequence[int]]] | None = None  # of each server, numbered over the run
    count: Callable[[Config], int] | None = None  # number of engines in the config
    spreads: Callable[[Config], bool] = lambda _: False  # others than slime choose the server of a request
    gives_memory: Callable[[Config], bool] = lambda _: True  # servers give GPU memory back before the trainer starts
    memory: Callable[[Subject, TrainerFootprint | None], EngineFootprint] | None = None
    """What it has on its GPUs, for `slime plan`; with the trainer that shares them, if one does."""
    senders: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Transports of its routes but ``disk``: each makes a `weights.transports.senders.Sender` of a torch.device."""
    checksums: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Kinds of its routes but ``sha256``: each makes a `weights.hashing.Checksums` of a torch.dtype."""

    @property
    def embedded(self) -> bool:
        """Whether it has no servers."""
        return self.start is None


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainerBackend(Backend):
    """What `train_backend` names: ``trainer()`` imports and returns the class of its ranks (`protocols.RankTrainer`).

    ``converters()`` returns words of `slime convert` with their commands, for checkpoints in a format of its own. A
    command's function returns ``work(how) -> Done`` (`slime_convert.folder_writing`), or does it all itself; the
    flags and the progress that words share come from `slime convert`.

    Example:
        TrainerBackend(name="mine", trainer=lambda: MyTrainer)
    """

    trainer: Callable[[], type[Any]]
    memory: Callable[[Subject], TrainerFootprint] | None = None  # what it has on a GPU, for `slime plan`
    megatron_hooks: bool = False  # calls the hooks slime_megatron_*
    converters: Callable[[], Mapping[str, click.Command]] | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class ClusterBackend(Backend):
    """What `cluster_backend` names: ``start`` starts everything and takes it down again.

    ``device`` is cuda or cpu, empty where the machines cannot say: then it is this machine's. ``detached`` keeps
    drivers that outlive the command (`slime run --detach`).

    Example:
        ClusterBackend(name="mine", start=my_cluster, remote=True)
    """

    start: Callable[[Config, Any, Any], AbstractAsyncContextManager[RunComponents]]
    remote: bool = False  # ranks and engines may live on other machines
    device: Callable[[Config], str] = lambda _: ""
    detached: Any = None  # slime_cli.detaching.Detaching
