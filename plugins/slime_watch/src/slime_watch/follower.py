"""A run as its files describe it, from one look to the next.

    metrics.jsonl samples.jsonl log/run.log    what was appended since the last look
    run.json lock log/phase ledger.sqlite      as they are now

The run is not changed and no lock is kept. A resume trims figures, so a file that is new is read from its start.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from slime_core.errors import StorageError
from slime_core.report.following import Lines, total_of
from slime_core.report.history import complete, evaluations_among, states, steps_among
from slime_core.report.progress import Pace
from slime_core.report.rundir import RunDir, status_of
from slime_report.data import columns_of, config_of, evaluation_columns, notices_of, stages_of, with_record
from slime_report.recorder import read_steps

NOTES = 500  # sentences of log/run.log that are kept
SAMPLES = 256  # samples likewise: 64 steps of the default
RECENT = 10  # steps over which speed is measured

Points = list[tuple[float, float]]


class RunFollower:
    """What is known of one run.

    Example:
        follower = RunFollower(RunDir.open(Path("runs/demo-0")))
        follower.look()
        follower.series["reward/mean"]            # [(1, 0.02), (2, 0.05), ...]
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._metrics = Lines(run_dir.metrics, sys.maxsize)
        self._samples = Lines(run_dir.samples, SAMPLES)
        self._notes = Lines(run_dir.log / "run.log", NOTES)
        self._config = config_of(run_dir)
        self.generation = 0  # counts up where metrics.jsonl begins anew
        self.rows: list[dict[str, Any]] = []  # of metrics.jsonl
        self.damaged = 0  # lines of it that are none
        self.steps: list[dict[str, Any]] = []  # those of steps by version; of one written twice, the later
        self.series: dict[str, Points] = {}  # their metrics by version, without what is not finite
        self.samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)
        self.notes: deque[str] = deque(maxlen=NOTES)
        self.info: dict[str, Any] = {}
        self.status = "unknown"
        self.phase: tuple[str, float] = ("", 0.0)  # part of the step that runs, and since when (Unix time)
        self.counts: dict[str, int] = {}  # samples by state

    def look(self) -> bool:
        """Read what is new; whether rows, samples or sentences came, or the run started or ended.

        Raises:
            StorageError: STO111 the run directory was removed or moved.
        """
        if not self.run_dir.config.exists():
            raise StorageError(
                "the run directory was removed or moved while it was watched",
                code="STO111",
                where=str(self.run_dir.path),
                fix="after a move: slime watch NEW_PATH",
            )
        lines = self._metrics.new()
        rows = [row for line in lines if (row := parsed(line))]
        if self._metrics.anew:
            self.rows, self.damaged, self.generation = [], 0, self.generation + 1
        self.rows += rows
        self.damaged += len(lines) - len(rows)
        if rows or self._metrics.anew:
            self._add(rows)
        samples = [row for line in self._samples.new() if (row := parsed(line))]
        if self._samples.anew:
            self.samples.clear()
        notes = self._notes.new()
        self.samples.extend(samples)
        self.notes.extend(notes)
        holder, before = self.run_dir.holder(), self.status  # before run.json: a run writes its end, then lets go
        self.info = self.run_dir.read_info()
        self.status = status_of(self.info, holder)
        self.phase = self.run_dir.read_phase()
        self.counts = states(self.run_dir)
        return bool(rows or samples or notes) or self.status != before

    def _add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Put steps in order; a version that is written again makes all of them anew."""
        steps = [row for row in rows if row["kind"] == "step"]
        versions = [step["version"] for step in [*self.steps[-1:], *steps]]
        if self._metrics.anew or any(later <= earlier for earlier, later in pairwise(versions)):
            self.steps, steps, self.series = [], steps_among(self.rows), {}
        self.steps += steps
        for step in steps:
            for name, value in step["metrics"].items():
                if is_figure(value):
                    self.series.setdefault(name, []).append((float(step["version"]), float(value)))

    @property
    def cursor(self) -> str:
        """What was read, for :meth:`update`: which file of figures, its rows, how the run is."""
        return f"{self.generation}.{len(self.rows)}.{self.status}"

    def update(self, after: str) -> dict[str, Any]:
        """What came after a ``cursor``: the new one, and the run's facts for a page that has the earlier steps.

        The steps are columns, as `slime_report.data.columns_of` makes them: new ones, or ``whole`` all of them.
        """
        records = read_steps(self.run_dir.path)
        generation, _, rest = after.partition(".")
        rows = rest.partition(".")[0]
        count = int(rows) if generation == str(self.generation) and rows.isdecimal() else 0
        earlier = {row["version"] for row in self.rows[:count] if row["kind"] == "step"}
        steps = [step for step in self.steps if step["version"] not in earlier]
        whole = not earlier or any(row["version"] in earlier for row in self.rows[count:] if row["kind"] == "step")
        return {
            "cursor": self.cursor,
            "run": {
                "whole": whole,
                "steps": columns_of(
                    [with_record(step, records) for step in (self.steps if whole else steps)], ("stage",)
                ),
                "notices": notices_of(self._config, self.damaged, self.steps, self.counts),
                "status": self.status,
                "phase": self.phase[0],
                "of": self.steps[-1].get("of") if self.steps else None,
                "stages": stages_of(self.steps),
                "states": self.counts,
                "restarts": [row for row in self.rows if row["kind"] == "restart"],
                "evaluations": evaluation_columns(evaluations_among(self.rows)),
            },
        }

    @property
    def running(self) -> bool:
        """Whether a process has the run now."""
        return self.status == "running"

    @property
    def total(self) -> int:
        """Steps of the whole run; 0 where its config cannot be read."""
        return total_of(self.run_dir)

    @property
    def eta(self) -> float:
        """Seconds to the end, as long as the last ten steps took."""
        pace = Pace(self.total)
        for step in self.steps[-RECENT:]:
            pace.add(wall(step))
        pace.done = self.steps[-1]["version"] if self.steps else 0
        return pace.eta

    @property
    def stage_start(self) -> int:
        """The version from which the newest step's stage trains."""
        stage, start = (self.steps[-1].get("stage") if self.steps else None), 0
        for step in reversed(self.steps):
            if step.get("stage") != stage:
                return start
            start = step["version"] - 1
        return start

    def evaluations(self) -> dict[str, Points]:
        """Mean reward of every evaluation set by version."""
        sets: dict[str, Points] = {}
        for row in evaluations_among(self.rows):
            if is_figure(value := row["metrics"].get("reward/mean")):
                sets.setdefault(row["name"], []).append((float(row["version"]), float(value)))
        return sets

    def seconds(self, last: int) -> dict[str, float]:
        """Seconds by part, summed over the last steps, the longest first."""
        sums: dict[str, float] = {}
        for step in self.steps[-last:]:
            for name, value in step["seconds"].items():
                sums[name] = sums.get(name, 0.0) + (value or 0.0)
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of the last ten steps by their time."""
        steps = self.steps[-RECENT:]
        tokens = sum(step["metrics"].get("tokens/response") or 0.0 for step in steps)
        return tokens / (sum(map(wall, steps)) or 1.0)

    @property
    def dropped(self) -> dict[str, int]:
        """Samples that were dropped, by reason, the most first."""
        drops = {name[8:]: count for name, count in self.counts.items() if name.startswith("dropped/")}
        return dict(sorted(drops.items(), key=lambda item: -item[1]))


def parsed(line: str) -> dict[str, Any] | None:
    """A row of a JSONL file; None where the line is damaged or of another kind."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("version"), int):
        return None
    if row.get("kind") in ("step", "eval"):
        return complete(row)
    return row if "kind" in row or "rank" in row else None


def is_figure(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, (int, float)) and isfinite(value)


def wall(step: Mapping[str, Any]) -> float:
    """Seconds of a step."""
    return sum(value or 0.0 for value in step["seconds"].values())
