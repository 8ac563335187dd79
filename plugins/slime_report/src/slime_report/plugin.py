"""The plugin `report`: `slime report`, and what a run with `--plugin report` records for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import hookimpl

if TYPE_CHECKING:
    import click

    from slime_core.context import Context
    from slime_core.types import Batch, Sample, StepReport
    from slime_report.recorder import StepRecorder


class ReportPlugin:
    """One a run."""

    slime_api = 1

    def __init__(self) -> None:
        self._own_recorder: StepRecorder | None = None

    @property
    def _recorder(self) -> StepRecorder:
        from slime_report.recorder import StepRecorder

        self._own_recorder = self._own_recorder or StepRecorder()
        return self._own_recorder

    @hookimpl
    def slime_command(self) -> click.Command:
        """`slime report RUN...`."""
        from slime_report.command import report

        return report

    @hookimpl
    def slime_sample_done(self, sample: Sample, ctx: Context) -> None:
        """Note when the last sample was generated."""
        if not ctx.evaluation:
            self._recorder.generated()

    @hookimpl(trylast=True)
    def slime_batch(self, batch: Batch, ctx: Context) -> None:
        """Record the trainer's figures of every token."""
        if ctx.run_dir is not None:
            self._recorder.batch(batch, ctx.run_dir, keep_steps=ctx.config.report.ledger_keep_steps)

    @hookimpl
    def slime_step_done(self, report: StepReport, ctx: Context) -> None:
        """Record memory and times."""
        if ctx.run_dir is not None:
            self._recorder.step(report, ctx.run_dir)
