"""A run in TensorBoard: an event file a process, read together; what a resumed run makes again replaces the old."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.types import StepReport
from slime_trackers.feed import Arrays, TrackedRun, Tracker


class TensorBoardRun(Tracker):
    """Event files in ``tensorboard_dir/PROJECT/EXPERIMENT``, or in RUN/tensorboard."""

    name = "tensorboard"
    rewinds = True

    def open(self, run: TrackedRun) -> str:
        """Begin a file; its id is its folder."""
        from torch.utils.tensorboard import SummaryWriter

        options, folder = run.options, run.run_dir / "tensorboard"
        if options.tensorboard_dir or options.tb_project_name or options.tb_experiment_name:
            base = options.tensorboard_dir or folder
            folder = base / options.tb_project_name / (options.tb_experiment_name or run.run_dir.name)
        self._writer = SummaryWriter(str(folder), purge_step=run.first)
        if run.first is None:
            table = "\n".join(f"| {name} | {value} |" for name, value in run.hyperparameters.items())
            self._writer.add_text("config", f"| key | value |\n| --- | --- |\n{table}", 0)
            notes = "\n\n".join(filter(None, [options.tracker_notes, ", ".join(options.tracker_tags)]))
            if notes:
                self._writer.add_text("notes", notes, 0)
        return str(folder)

    def log(self, report: StepReport, figures: Mapping[str, float]) -> None:
        """One scalar a figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, report.version)
        self._writer.flush()

    def histograms(self, step: int, arrays: Arrays) -> None:
        """Histograms of TensorBoard's own bins."""
        for name, values in arrays.items():
            self._writer.add_histogram(name, values, step)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples as texts, since TensorBoard has no tables."""
        lines = [f"**{row['rank']}, reward {row['reward']}**\n\n    " + _indented(row) for row in rows]
        self._writer.add_text("samples", "\n\n".join(lines), step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _indented(row: Mapping[str, Any]) -> str:
    return f"{row['prompt']}\n---\n{row['response']}".replace("\n", "\n    ")
