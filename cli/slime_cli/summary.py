"""Summary of a run's steps when it has ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_core.report import RunDir
    from slime_core.types import StepReport


class StepRange:
    """Remembers the first and the last step, for the summary."""

    def __init__(self) -> None:
        self.first: StepReport | None = None
        self.last: StepReport | None = None

    def start(self, run_dir: Path, config: Any) -> None:
        """Nothing to open."""

    def write(self, report: StepReport) -> None:
        """Keep it, unless it is an evaluation's."""
        if any(key.startswith("eval/") for key in report.metrics):
            return
        if self.first is None or self.first.stage != report.stage:
            self.first = report
        self.last = report

    def close(self) -> None:
        """Nothing to close."""


def say_end(run_dir: RunDir, version: int, seconds: float, summary: StepRange, final: Path | None) -> None:
    """Steps, time, and how the reward went."""
    from slime_core.report.progress import duration

    line = f"done: {version} steps in {duration(seconds)}"
    if summary.first is not None and summary.last is not None and "reward/mean" in summary.last.metrics:
        first = summary.first.metrics.get("reward/mean")
        if first is not None and summary.last.step > 0:
            line += f", {summary.last.stage} reward {first:.3f} -> {summary.last.metrics['reward/mean']:.3f}"
    say(line)
    if final is not None:
        say(f"model {final}")
    say(f"look  slime show {run_dir.path}")


def say_answer(answer: dict[str, Any], as_json: bool) -> None:
    """Print the result on stdout; a closed stdout does not fail a finished run."""
    try:
        click.echo(json.dumps(answer, indent=1, sort_keys=True) if as_json else answer["run_dir"])
    except BrokenPipeError:
        return
    except OSError as error:
        say(f"stdout takes no answer ({error.strerror or error}); the run is done: {answer['run_dir']}")
