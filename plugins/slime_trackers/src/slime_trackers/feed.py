"""A sink that brings a run's figures to one tracker, in order, each once, on a thread of its own.

    Report.write -> queue -> thread: what metrics.jsonl has and the tracker has not, then the queue -> Tracker

The loop never waits for a tracker. What the tracker has is noted in ``RUN/trackers/NAME.json``, with the id that it
gave the run; a resumed run continues that run, and one that gets a tracker late brings it all earlier steps.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.report.sinks import evaluation_report
from slime_core.types import StepReport

if TYPE_CHECKING:
    from slime_trackers.options import TrackerOptions

Arrays = Mapping[str, Any]
"""Name to a flat numpy array, of which a histogram is made."""

CLOSE_SECONDS = 60.0
"""How long the end of a run waits for a tracker that has not everything yet."""


@dataclass(slots=True, frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is opened with."""

    run_dir: Path
    config: Mapping[str, Any]  # secrets redacted
    options: TrackerOptions
    id: str = ""  # that the tracker gave the run in an earlier process
    first: int | None = None  # figures of this step and later ones come again; None: there are none yet

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Keys of the config with their values, dotted; what is empty is left out."""
        return dict(_flat(self.config))


class Tracker(ABC):
    """One run in one tracker; all methods run on one thread, and any may raise."""

    name: ClassVar[str]
    rewinds: ClassVar[bool] = False
    """Whether figures of a step replace those that an earlier process wrote; others keep what came first."""
    sends_at_close: ClassVar[bool] = False
    """Whether a crash may lose what was logged before `close`; a resumed run then sends it again."""
    newest: int | None = None
    """Once it is open: the last step that it has, where it can tell; it may have lost some in a crash."""

    @abstractmethod
    def open(self, run: TrackedRun) -> str:
        """Start or continue the run; returns its id."""

    @abstractmethod
    def log(self, report: StepReport, figures: Mapping[str, float]) -> None:
        """Log the finite figures of a step or an evaluation, at step ``report.version``."""

    def histograms(self, step: int, arrays: Arrays) -> None:
        """Log histograms of a step."""
        return

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a step's best and worst samples, rows of ``samples.jsonl``."""
        return

    @abstractmethod
    def close(self) -> None:
        """Send everything, and end."""


@dataclass(slots=True)
class Delivered:
    """What a tracker has: the last version of each series, where ``""`` is the steps and others are evaluations."""

    id: str = ""
    last: dict[str, int] = field(default_factory=dict)


class TrackerFeed:
    """A `protocols.Sink` before a tracker; an error of the tracker is raised by the next call."""

    def __init__(self, tracker: Tracker, options: TrackerOptions, arrays: Mapping[int, Arrays]) -> None:
        self._tracker, self._options, self._arrays = tracker, options, arrays
        self._queue: queue.SimpleQueue[tuple[StepReport, Arrays] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._delivered = Delivered()
        self._saved: dict[str, int] = {}  # of ``last``, what is surely sent
        self._samples: SampleRows | None = None

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        """Begin to bring what the run directory has."""
        reports = list(read_reports(run_dir / "metrics.jsonl"))  # here: the loop is about to append
        name = f"slime-{self._tracker.name}"
        self._thread = threading.Thread(target=self._work, args=(run_dir, config, reports), name=name, daemon=True)
        self._thread.start()

    def write(self, report: StepReport) -> None:
        """Queue a step or an evaluation."""
        self._raise()
        self._queue.put((report, self._arrays.get(report.version, {})))

    def close(self) -> None:
        """Wait until the tracker has everything.

        Raises:
            TimeoutError: it has not after a minute; a resume of the run sends the rest.
        """
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                raise TimeoutError(f"{self._tracker.name} has not taken everything after {CLOSE_SECONDS:.0f} s")
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError(f"{self._tracker.name}: {type(error).__name__}: {error}") from error

    def _work(self, run_dir: Path, config: Mapping[str, Any], reports: Sequence[StepReport]) -> None:
        try:
            self._open(run_dir, config, reports)
            while (item := self._queue.get()) is not None:
                self._deliver(run_dir, *item)
            self._tracker.close()
            self._save(run_dir, self._delivered.last)
        except Exception as error:
            self._error = error

    def _open(self, run_dir: Path, config: Mapping[str, Any], reports: Sequence[StepReport]) -> None:
        tracker, path = self._tracker, self._state_path(run_dir)
        self._delivered = Delivered(**json.loads(path.read_text())) if path.exists() else Delivered()
        self._saved = dict(self._delivered.last)
        run = TrackedRun(run_dir=run_dir, config=config, options=self._options, id=self._delivered.id)
        if tracker.rewinds and self._delivered.last:
            newest = min(self._delivered.last.get("", -1), reports[-1].version if reports else 0)
            run = replace(run, first=newest + 1)
            self._delivered.last = {name: min(last, newest) for name, last in self._delivered.last.items()}
            reports = [report for report in reports if report.version >= newest]
        self._samples = SampleRows(run_dir / "samples.jsonl")
        self._delivered.id = tracker.open(run)
        if tracker.newest is not None:
            self._delivered.last = {name: min(last, tracker.newest) for name, last in self._delivered.last.items()}
        self._save(run_dir, self._saved)
        for report in reports:
            self._deliver(run_dir, report, {})

    def _deliver(self, run_dir: Path, report: StepReport, arrays: Arrays) -> None:
        tracker, (series, version) = self._tracker, series_of(report)
        if version <= self._delivered.last.get(series, -1):
            return
        tracker.log(report, {name: value for name, value in report.items() if math.isfinite(value)})
        interval = self._options.tracker_samples_interval
        if not series:
            if arrays and self._options.tracker_histograms:
                tracker.histograms(version, arrays)
            if interval and version % interval == 0 and self._samples and (rows := self._samples.of(version)):
                tracker.samples(version, rows)
        if version == report.version or not tracker.rewinds:  # else it may be taken back with a later step
            self._delivered.last[series] = version
        self._save(run_dir, self._saved if tracker.sends_at_close else self._delivered.last)

    def _state_path(self, run_dir: Path) -> Path:
        return run_dir / "trackers" / f"{self._tracker.name}.json"

    def _save(self, run_dir: Path, last: Mapping[str, int]) -> None:
        path = self._state_path(run_dir)
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps({"id": self._delivered.id, "last": last}))
        path.with_suffix(".new").replace(path)


class SampleRows:
    """Rows of ``samples.jsonl`` by version, which rise; each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def of(self, version: int) -> list[dict[str, Any]]:
        """The rows of a version."""
        rows = []
        with self._path.open("rb") if self._path.exists() else open("/dev/null", "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # torn
                    break
                row = json.loads(line)
                if row["version"] > version:
                    break
                self._offset += len(line)
                rows += [row] if row["version"] == version else []
        return rows


def read_reports(path: Path) -> Iterator[StepReport]:
    """Steps and evaluations of a ``metrics.jsonl``, in the shape that trackers take."""
    last: StepReport | None = None
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        metrics, seconds = (_numbers(row.get(name, {})) for name in ("metrics", "seconds"))
        if row["kind"] == "step":
            facts = {name: row[name] for name in ("version", "stage", "step", "of")}
            last = StepReport(**facts, metrics=metrics, seconds=seconds)
            yield last
        elif row["kind"] == "eval":
            times = {"seconds": seconds["eval"]} if "eval" in seconds else {}
            yield evaluation_report(row["name"], row["version"], metrics | times, last)


def series_of(report: StepReport) -> tuple[str, int]:
    """The series of a report, ``""`` for steps or an evaluation's name, and the version that its figures are of."""
    name = next(iter((*report.metrics, *report.seconds)), "")
    if not name.startswith("eval/"):
        return "", report.version
    series = name.split("/")[1]
    return series, int(report.metrics.get(f"eval/{series}/version", report.version))


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def _flat(data: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        elif value not in (None, "", [], ()):
            yield f"{path}{name}", value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
