"""A run in Trackio: local files, or a Hugging Face Space."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from typing import IO, Any, cast

from slime_core.types import StepReport
from slime_trackers.feed import Arrays, TrackedRun, Tracker


class OthersStdout:
    """Standard output for all threads but the one that makes it, whose texts are dropped."""

    def __init__(self) -> None:
        self._stdout, self._thread = sys.stdout, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def write(self, text: str) -> int:
        """Write or drop; returns how many characters."""
        return len(text) if threading.get_ident() == self._thread else self._stdout.write(text)


def quiet() -> AbstractContextManager[Any]:
    """Drop what this thread prints inside the block."""
    return redirect_stdout(cast(IO[str], OthersStdout()))


class TrackioRun(Tracker):
    """A run of Trackio; a resumed run continues it."""

    name = "trackio"

    def open(self, run: TrackedRun) -> str:
        """Start or continue it."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        options = run.options
        name = run.id or f"{run.run_dir.name}-{uuid.uuid4().hex[:8]}"
        with quiet():  # a run's own answer stands there
            self._run: Any = trackio.init(
                project=options.trackio_project,
                name=name,
                space_id=options.trackio_space or None,
                config=run.hyperparameters,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        if run.id and not options.trackio_space:
            newest = SQLiteStorage.get_max_step_for_run(options.trackio_project, name)
            self.newest = -1 if newest is None else newest
        return name

    def log(self, report: StepReport, figures: Mapping[str, float]) -> None:
        """Figures at step ``version``."""
        self._run.log(dict(figures), step=report.version)

    def histograms(self, step: int, arrays: Arrays) -> None:
        """Histograms of Trackio's own bins."""
        import trackio

        self._run.log({name: trackio.Histogram(values) for name, values in arrays.items()}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table ``samples``."""
        import pandas
        import trackio

        self._run.log({"samples": trackio.Table(dataframe=pandas.DataFrame(rows).drop(columns="terms"))}, step=step)

    def close(self) -> None:
        """Send what is queued."""
        with quiet():
            self._run.finish()
