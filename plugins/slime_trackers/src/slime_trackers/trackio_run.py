"""A run in Trackio: local files, or a Hugging Face Space."""

from __future__ import annotations

import io
import uuid
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from slime_core.types import StepReport
from slime_trackers.feed import Arrays, TrackedRun, Tracker


class TrackioRun(Tracker):
    """A run of Trackio; a resumed run continues it."""

    name = "trackio"

    def open(self, run: TrackedRun) -> str:
        """Start or continue it."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        options = run.options
        name = run.id or f"{run.run_dir.name}-{uuid.uuid4().hex[:8]}"
        with redirect_stdout(io.StringIO()):  # a run's own answer stands there
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
            self.newest = SQLiteStorage.get_max_step_for_run(options.trackio_project, name) or 0
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
        with redirect_stdout(io.StringIO()):
            self._run.finish()
