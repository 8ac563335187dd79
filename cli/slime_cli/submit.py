"""`slime run --detach`: start a driver on the Ray cluster, and say how to follow it.

    a cluster that stays? -> joined -> room? -> the run directory -> its record -> the actor -> its first answer

All of `slime run`'s checks have passed by then, here, where their errors are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_cli.detaching import Detaching, actor_name
from slime_cli.driver_process import Letter, deadline
from slime_cli.failure import CliSession
from slime_cli.restarts import MEMORY, allowed, unsaved
from slime_core.clusters.detached import FILE, LOG, DriverRecord, Order, read_record, second_driver_error, time_of_day
from slime_core.errors import ConfigError
from slime_core.plugins.backends import cluster_of
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.settings import Settings
    from slime_core.report import RunDir

PROGRAM = ("-P", "-m", "slime_cli.driver_process")


@dataclass(slots=True, frozen=True, kw_only=True)
class Detach:
    """A command line of `slime run --detach`."""

    session: CliSession
    words: Sequence[str]  # recipe, flags and keys
    run_dir: Path | None
    resume: str | None
    old: Path | None  # the run that it resumes
    forced: Sequence[str]
    stop_after: float | None
    verify_step: int

    def first(self, at: Path) -> list[str]:
        """Words after `slime` of the driver's first process."""
        if self.resume is None:
            place = ["--run-dir", str(at)]
        elif self.resume == "auto":
            place = ["--resume", "auto", "--run-dir", str(at)]
        else:
            place = ["--resume", str(at)]
        place += [word for key in self.forced for word in ("--force-key", key)]
        place += ["--verify-step", str(self.verify_step)] * bool(self.verify_step)
        return ["run", *place, *["--verbose"] * self.session.verbose, *self.words]


def submit(detach: Detach, settings: Settings) -> dict[str, Any]:
    """Start the driver of a run; the answer says where it is.

    Raises:
        ConfigError: CFG04 a run that does not outlive the command, CFG12 the run directory holds another, CFG16 a
            process runs there, CFG17 no cluster, CFG18 no room in it, CFG19 what travels does not fit.
    """
    from slime_core.clusters.machine import resolve_machine

    environment = {name: value for name, value in os.environ.items() if name != MEMORY}
    cluster = detaching(settings)
    address = cluster.address(settings.config)
    config = resolve_machine(settings.config)
    for text in cluster.notes(config, settings.plugins):
        say(text)
    with cluster.drivers(address, config) as (drivers, cluster_address):
        cluster.check_room(config)
        with claimed(detach, settings) as run_dir:
            name, letter = actor_name(run_dir.path), letter_of(detach, settings, run_dir)
            if name in drivers.names():
                raise second_driver_error(str(run_dir.path), name)
            order = Order(
                run_dir=letter.run_dir,
                program=PROGRAM,
                folder=str(Path.cwd()),
                letter=json.dumps(asdict(letter)),
                environment={**environment, **cluster.environment(cluster_address)},
                restarts=letter.allowed,
            )
            DriverRecord(actor=name, address=cluster_address, epoch=letter.epoch, submitted=time_of_day()).write(
                run_dir.path
            )
            about = drivers.submit(name, order)
    say(f"the driver is process {about['pid']} on {about['host']}; its output: {run_dir.path / LOG}")
    say(f"follow  slime attach {run_dir.path}")
    say(f"stop    slime stop {run_dir.path}")
    return {
        "run_dir": str(run_dir.path),
        "actor": name,
        "address": cluster_address,
        "host": about["host"],
        "pid": about["pid"],
    }


def letter_of(detach: Detach, settings: Settings, run_dir: RunDir) -> Letter:
    """The settings for the driver's processes."""
    return Letter(
        run_dir=str(run_dir.path),
        words=detach.first(run_dir.path),
        epoch=0 if detach.old is None else int(run_dir.read_info().get("epoch") or 0),
        forced=list(detach.forced),
        until=None if detach.stop_after is None else deadline(detach.stop_after),
        verify_step=detach.verify_step,
        verbose=detach.session.verbose,
        allowed=allowed(settings.config),
        secrets=unsaved(settings),
    )


def detaching(settings: Settings) -> Detaching:
    """What keeps drivers on the run's cluster.

    Raises:
        ConfigError: CFG04 the cluster keeps none.
    """
    config = settings.config
    cluster: Detaching | None = cluster_of(config).detached
    if cluster is None:
        raise ConfigError(
            "--detach needs a Ray cluster to run on",
            code="CFG04",
            where="command line: --detach",
            why=f"cluster_backend = {config.cluster.cluster_backend}: the run would end with this command",
            fix="--cluster ray --ray-address HOST:PORT   or, on this machine alone: nohup slime run ... &",
        )
    return cluster


@contextmanager
def claimed(detach: Detach, settings: Settings) -> Iterator[RunDir]:
    """The run directory, new or old, locked until a driver waits for it; unchanged if none comes.

    Raises:
        ConfigError: CFG12 it holds another run, CFG16 a process runs there, CFG20 it would not persist.
    """
    from slime_cli.preflight import check_kept
    from slime_core.report import RunDir

    check_kept(detach.run_dir)
    if detach.old is None:
        run_dir, before = RunDir.create(settings.config.name, at=detach.run_dir), None
    else:
        run_dir, before = RunDir.open(detach.old), read_record(detach.old)
        run_dir.lock()
    try:
        yield run_dir
    except BaseException:
        run_dir.close()
        if detach.old is None:
            forget(run_dir.path)
        elif before is not None:
            before.write(run_dir.path)
        else:
            (run_dir.path / FILE).unlink(missing_ok=True)
        raise
    finally:
        run_dir.close()


def forget(path: Path) -> None:
    """Remove a run directory, unless something has begun in it."""
    from slime_core.report.rundir import check_free

    with suppress(OSError):
        (path / FILE).unlink(missing_ok=True)
    try:
        check_free(path)
    except ConfigError:
        return
    for file in (path / LOG, path / "run.json", path / "lock"):
        with suppress(OSError):
            file.unlink(missing_ok=True)
    for folder in (*(child for child in path.iterdir() if child.is_dir()), path):
        with suppress(OSError):  # it holds something
            folder.rmdir()
