"""A detached run as its folder tells of it: the actor that keeps its driver, where, what it was asked, how it ended.

slime run --detach --writes--> RUN_DIR/driver.json <--keeps up to date-- the actor (`slime_ray.driver`)
                                      `--read by slime attach, slime stop, and the driver's next process
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_core.durable import replace_file, storage_error
from slime_core.errors import ConfigError, Preempted, SlimeError

FILE, LOG = "driver.json", "log/driver.log"
DETACHED = "SLIME_DETACHED"
"""Variable of a detached driver's processes; ``run.json`` says under ``detached`` whether the last one was such."""
LETTER = "SLIME_LETTER"
"""Variable with the descriptor of what a detached driver's process is told."""
PREFIX = "driver:"
"""Beginning of the names of our actors that keep drivers."""
CODES = {"finished": 0, "stopped": Preempted.exit_code, "interrupted": 130, "terminated": 143}
"""Exit codes of what ``run.json`` says of a run's end; a failed one has that of its error."""


@dataclass(slots=True, frozen=True, kw_only=True)
class DriverRecord:
    """``driver.json``. Only who holds the actor writes it.

    Example: DriverRecord(actor="driver:demo-0-1f...", address="10.0.0.5:6379", epoch=0, submitted="2026-11-22")
    """

    actor: str
    address: str  # of the cluster
    epoch: int  # of the run when it was submitted; its own starts have later ones
    submitted: str  # time of day
    keeper: str = ""  # which of the actor's processes keeps the driver; a later one takes its place
    asked: str = ""  # "stop", or "now": an end that somebody asked for
    code: int | None = None  # exit code, once it has ended
    last: int = 0  # epoch at its end: later starts are not of this driver
    ended: str = ""  # time of day

    def write(self, run_dir: Path) -> None:
        """Put it into the run directory.

        Raises:
            StorageError: STO109, STO110 or STO121.
        """
        path = run_dir / FILE
        try:
            replace_file(path, (json.dumps(asdict(self), indent=1, sort_keys=True) + "\n").encode())
        except OSError as error:
            raise storage_error(error, path, f"{FILE} cannot be written") from error

    def asking(self, what: str) -> DriverRecord:
        """The same, asked to end."""
        return replace(self, asked=what)

    def ending(self, code: int, epoch: int) -> DriverRecord:
        """The same, at its end."""
        return replace(self, code=code, last=epoch, ended=time_of_day())


def time_of_day() -> str:
    """Now, for people; nothing compares it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S")


def read_record(run_dir: Path) -> DriverRecord | None:
    """What a run directory says of its detached driver; None where it never had one."""
    with suppress(OSError, ValueError, TypeError):
        return DriverRecord(**json.loads((run_dir / FILE).read_text(encoding="utf-8")))
    return None


def code_of(info: Mapping[str, Any]) -> int:
    """The exit code of the process that ``run.json`` tells of; 137 where it was killed and says nothing."""
    if info.get("status") == "failed":
        code = info.get("exit_code")
        return code if isinstance(code, int) else SlimeError.exit_code
    return CODES.get(str(info.get("status")), 137)


@dataclass(slots=True, frozen=True, kw_only=True)
class Order:
    """A driver that a cluster is to keep running.

    Example: Order(run_dir="/data/runs/demo-0", program=("-m", "slime_cli.driver_process"), folder="/", letter="{}")
    """

    run_dir: str
    program: Sequence[str]  # after the interpreter; its last word is the process id of what keeps it
    folder: str
    letter: str = field(repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    restarts: int = 0  # of the process, and of what keeps it


@dataclass(slots=True, frozen=True, kw_only=True)
class DetachedDriver:
    """A driver in the cluster. ``state``: running, or restarting where its actor does not answer."""

    actor: str
    state: str
    about: Mapping[str, Any]  # its host, pid and run_dir; empty where it does not answer


def second_driver_error(run_dir: str, name: str) -> ConfigError:
    """The error of a second driver of one run directory."""
    return ConfigError(
        "a detached driver runs in this run directory",
        code="CFG16",
        where=run_dir,
        why=f"the cluster has its actor, {name}",
        fix=f"slime attach {run_dir}   follows it\nslime stop {run_dir}   ends it",
    )
