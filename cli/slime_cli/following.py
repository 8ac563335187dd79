"""Following of a run, by directory or detached name: its output as it comes, and how it ended.

detached          its driver's output, log/driver.log; its actor says whether it lives
in a process      log/run.log and metrics.jsonl, as the lines that it prints; its lock shows whether it lives
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime_cli.detaching import actor_name, detaching
from slime_core.clusters.detached import LOG, PREFIX, DriverRecord, code_of, read_record
from slime_core.errors import ConfigError, SlimeError, install_line
from slime_core.report.following import POLL, Lines, follow as follow_files
from slime_core.report.rundir import RunDir
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_cli.detaching import DetachedDrivers

ASK = 2.0  # seconds between questions to an actor


@dataclass(slots=True, frozen=True, kw_only=True)
class RunTarget:
    """A run named on the command line."""

    run_dir: RunDir
    record: DriverRecord | None

    @property
    def path(self) -> Path:
        """Of the run directory."""
        return self.run_dir.path

    @property
    def detached(self) -> bool:
        """Whether its driver is an actor that has not ended, and no other process has resumed the run."""
        if self.record is None or self.record.code is not None:
            return False
        info = self.run_dir.read_info()
        return (info.get("epoch") or 0) <= self.record.epoch or bool(info.get("detached", True))

    @property
    def code(self) -> int:
        """The exit code of its last process, which has ended."""
        record, info = self.record, self.run_dir.read_info()
        if record is not None and record.code is not None and record.last >= (info.get("epoch") or 0):
            return record.code
        return code_of(info)


def target_of(path: Path) -> RunTarget:
    """The run in a folder.

    Raises:
        ConfigError: CFG05 there is none.
    """
    resolved = path.expanduser().absolute()
    record = read_record(resolved)
    run_dir = RunDir(resolved) if record is not None else RunDir.open(path)
    return RunTarget(run_dir=run_dir, record=record)


def named(word: str, address: str) -> RunTarget:
    """A run by its folder, or a detached one by the name of its actor or of its folder.

    Raises:
        ConfigError: CFG05 no such run, or several; CFG04, CFG17 no cluster to look the name up.
    """
    if os.sep in word or Path(word).is_dir():
        return target_of(Path(word))
    try:
        with reached(address) as drivers:
            names = drivers.names()
            matches = [name for name in names if word in (name, name.removeprefix(PREFIX), plain(name))]
            driver = drivers.find(matches[0]) if len(matches) == 1 else None
    except ConfigError as error:
        error.why = f"'{word}' is not a folder in {Path.cwd()}, so it was looked up on a Ray cluster; {error.why}"
        error.fix = f"name the run directory, such as runs/NAME-0\n{error.fix}"
        raise
    if driver is None or not driver.about:
        raise ConfigError(
            f"{len(matches)} detached runs are named '{word}'"
            if len(matches) != 1
            else f"{matches[0]} does not answer now",
            code="CFG05",
            where=word,
            why=f"it is not a folder in {Path.cwd()}, and the cluster has: {', '.join(names) or 'no detached run'}",
            fix="name the run directory; slime attach   without a name lists detached runs",
        )
    return target_of(Path(driver.about["run_dir"]))


def plain(actor: str) -> str:
    """The folder's name in an actor's."""
    return actor.removeprefix(PREFIX).rpartition("-")[0]


@contextmanager
def reached(address: str) -> Iterator[DetachedDrivers]:
    """Detached drivers of a cluster: the address that is given, or RAY_ADDRESS, or that of this machine.

    Raises:
        ConfigError: CFG04 Ray is not installed here, CFG17 no cluster.
    """
    address_used = address or os.environ.get("RAY_ADDRESS", "") or "auto"
    try:
        with detaching().drivers(address_used) as (drivers, _):
            yield drivers
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "detached runs live on a Ray cluster, and ray is not installed here",
            code="CFG04",
            where=f"Ray cluster {address_used}",
            why="a run that was not detached is named by its folder, and needs no Ray",
            fix=install_line("ray"),
        ) from error
    except ConfigError as error:
        if error.code == "CFG17":
            error.where = "--address, or RAY_ADDRESS"
            error.fix = error.fix.replace("--ray-address local starts one of its own", "--address HOST:PORT names one")
        raise


@contextmanager
def reached_of(target: RunTarget, address: str) -> Iterator[DetachedDrivers]:
    """The cluster of a detached run.

    Raises:
        ConfigError: CFG17 it does not respond, with the way to continue without it.
    """
    assert target.record is not None
    try:
        with reached(address or target.record.address) as drivers:
            yield drivers
    except ConfigError as error:
        if error.code == "CFG17":
            error.fix += f"\nwhere that cluster is gone: slime run --resume {target.path}"
        raise


def follow(target: RunTarget, address: str, show: Callable[[str], None] = say) -> int:
    """Show the run's output until it ends; return its exit code.

    Raises:
        ConfigError: CFG17 the cluster of a detached run does not answer.
        SlimeError: SLM01 its driver was lost and is not started again.
    """
    if target.detached:
        return follow_detached(target, address, show)
    if target.record is not None and target.run_dir.holder() is None and target.record.code == target.code:
        for line in Lines(target.path / LOG).new():
            show(line)
        return target.code
    follow_files(target.run_dir, show)
    return target.code


def follow_detached(target: RunTarget, address: str, show: Callable[[str], None]) -> int:
    """Its driver's output; the actor is polled now and then, its record always."""
    lines, name = Lines(target.path / LOG), actor_name(target.path)
    with reached_of(target, address) as drivers:
        last_asked = -ASK
        while True:
            now = target_of(target.path)
            for line in lines.new():
                show(line)
            if not now.detached:
                for line in lines.new():
                    show(line)
                return now.code
            if time.monotonic() - last_asked >= ASK:
                if drivers.find(name) is None and target_of(target.path).detached:
                    raise lost(target)
                last_asked = time.monotonic()
            time.sleep(POLL)


def lost(target: RunTarget) -> SlimeError:
    """The error of a driver that is not started again and could not say how it ended."""
    return SlimeError(
        "the run's driver was lost, and is not started again",
        code="SLM01",
        where=str(target.path / LOG),
        why="its actor is no longer on the cluster: it failed too often, or ray stop ended the cluster",
        fix=f"slime run --resume {target.path}   resumes it",
    )
