"""What a run appends to its files, from one look to the next, as the lines that it prints."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from slime_core.config.load import read
from slime_core.errors import SlimeError
from slime_core.report.progress import Pace, duration, evaluation_line, figures, place, total_steps
from slime_core.report.rundir import RunDir
from slime_core.types import StepReport

SHOWN = 20  # earlier lines
POLL = 0.2  # seconds between looks at files


class Lines:
    """Whole lines that are appended to a file; a look at a new file gives the ``last`` of those that are there.

    A file that is shorter than it was, or another one, is new: a resume trims figures.
    """

    def __init__(self, path: Path, last: int = SHOWN) -> None:
        self._path, self._last, self._inode, self._at, self._rest = path, last, -1, 0, b""
        self.anew = False  # whether the last look was at a new file

    def new(self) -> list[str]:
        """Lines since the last look."""
        self.anew = False
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                self.anew = facts.st_ino != self._inode or facts.st_size < self._at
                if self.anew:
                    self._inode, self._at, self._rest = facts.st_ino, 0, b""
                file.seek(self._at)
                data = self._rest + file.read()
                self._at = file.tell()
        except OSError:
            return []
        *lines, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in (lines[-self._last :] if self.anew else lines)]


class Steps:
    """Lines of ``metrics.jsonl`` as the run prints them."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._pace = Pace(0)

    def line(self, text: str) -> str:
        """What is said of a row; empty for one that says nothing, or was cut."""
        try:
            row = json.loads(text)
            metrics = {name: value for name, value in row["metrics"].items() if value is not None}  # null: not finite
            if row["kind"] == "eval":
                return evaluation_line(row["name"], row["version"], metrics)
            parts = {name: row[name] for name in ("version", "stage", "step", "of", "seconds")}
            wall = sum(value or 0.0 for value in row["seconds"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return ""
        report = StepReport(**parts, metrics=metrics)
        self._pace.steps = total_of(self._run_dir)
        self._pace.done = report.version - 1
        self._pace.add(wall)
        return f"{place(report)}  {'  '.join(figures(report, wall))}  eta {duration(self._pace.eta)}"


def total_of(run_dir: RunDir) -> int:
    """Steps of the whole run, which a resume may change; 0 where its config is of another slime, or cannot be read."""
    try:
        return _total(run_dir.config, run_dir.config.stat().st_mtime_ns)
    except (SlimeError, OSError):
        return 0


@lru_cache(maxsize=8)
def _total(config: Path, written: int) -> int:
    return total_steps(read(config, check=False).config)


def follow(run_dir: RunDir, show: Callable[[str], None]) -> None:
    """Show steps, evaluations and sentences of a run in a process of this or another machine until it ends."""
    notes, figures_of_steps = Lines(run_dir.log / "run.log"), Lines(run_dir.metrics)
    steps = Steps(run_dir)
    while True:
        alive = run_dir.holder() is not None
        for line in notes.new():
            show(line.partition(" ")[2])  # without its time
        for line in figures_of_steps.new():
            if text := steps.line(line):
                show(text)
        if not alive:
            return
        time.sleep(POLL)
