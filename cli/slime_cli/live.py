"""What a person sees while it trains, on stderr: one live line on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from slime_core.report.progress import Pace, Trend, duration, evaluation_line, figures, place, total_steps
from slime_core.report.text import safe_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from slime_core.config.schema import Config
    from slime_core.report.report import Live
    from slime_core.types import StepReport

MINUTE = 60.0


class PlainLines:
    """One line a step, for files and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._pace = Pace(0)
        self._trend = Trend()
        self._waited = 0.0  # seconds of the phase that goes on when it was last shown

    def start(self, config: Config, run_dir: Path) -> None:
        """Count the steps."""
        self._pace = Pace(total_steps(config))

    def starting(self, text: str) -> None:
        """Print it."""
        self._print(f"start: {text}")

    def waiting(self, phase: str, seconds: float, progress: str) -> None:
        """Print it once a minute."""
        self._waited = 0.0 if seconds < self._waited else self._waited
        if seconds - self._waited >= MINUTE:
            self._waited = seconds
            self._print(f"{phase}: {', '.join(filter(None, [progress, f'{duration(seconds)} so far']))}")

    def step(self, report: StepReport, wall: float) -> None:
        """Print the step."""
        self._pace.add(wall)
        values = figures(report, wall, self._trend.add(report))
        self._print(f"{place(report)}  {'  '.join(values)}  eta {duration(self._pace.eta)}")

    def evaluation(self, name: str, version: int, metrics: Mapping[str, float]) -> None:
        """Print the set."""
        self._print(evaluation_line(name, version, metrics))

    def note(self, text: str) -> None:
        """Print the sentence."""
        self._print(text)

    def close(self) -> None:
        """Nothing to leave."""

    def _print(self, text: str) -> None:
        self._stream.write(safe_text(text) + "\n")
        self._stream.flush()


class RichLine:
    """A progress line that stays at the bottom of a terminal, with evaluations and notes above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)
        self._pace = Pace(0)
        self._trend = Trend()
        self._figures = ""
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def start(self, config: Config, run_dir: Path) -> None:
        """Show an empty bar."""
        from rich.progress import BarColumn, Progress, TextColumn

        self._pace = Pace(total_steps(config))
        self._progress = Progress(
            TextColumn("{task.fields[place]}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("eta {task.fields[eta]}", markup=False),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=max(1, self._pace.steps), place="start", figures="", eta="?")
        self._progress.start()

    def starting(self, text: str) -> None:
        """Show it before the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, place=safe_text(f"start: {text}"))

    def waiting(self, phase: str, seconds: float, progress: str) -> None:
        """Show it behind the figures of the last step."""
        if self._progress is not None and self._task is not None:
            text = ", ".join(filter(None, [f"{phase} {duration(seconds)}", progress]))
            self._progress.update(self._task, figures=safe_text("  ".join(filter(None, [self._figures, text]))))

    def step(self, report: StepReport, wall: float) -> None:
        """Move the bar."""
        self._pace.add(wall)
        self._figures = "  ".join(figures(report, wall, self._trend.add(report)))
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task,
                completed=self._pace.done,
                place=safe_text(place(report)),
                figures=safe_text(self._figures),
                eta=duration(self._pace.eta),
            )

    def evaluation(self, name: str, version: int, metrics: Mapping[str, float]) -> None:
        """Print the set above the bar."""
        self.note(evaluation_line(name, version, metrics))

    def note(self, text: str) -> None:
        """Print the sentence above the bar."""
        self._console.print(safe_text(text), markup=False)

    def close(self) -> None:
        """Stop refreshing; the last line stays."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def make_live(stream: TextIO) -> Live:
    """The live line on a terminal, plain lines elsewhere."""
    return RichLine(stream) if stream.isatty() else PlainLines(stream)
