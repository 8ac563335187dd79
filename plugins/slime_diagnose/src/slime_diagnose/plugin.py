"""The plugin `diagnose`: `slime diagnose RUN`, and with `--plugin diagnose` findings as notes while a run trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from slime_core import Context, StepReport, hookimpl
from slime_core.notices import notice

if TYPE_CHECKING:
    import click


class Options(BaseModel, extra="forbid", frozen=True):
    """Keys of `[plugin.diagnose]`."""

    interval: int = Field(
        10, ge=1, description="Steps between two looks at a run; longer runs are looked at less often."
    )


class Diagnose:
    """One process's plugin: it remembers when it looks again."""

    slime_api = 1

    def __init__(self) -> None:
        self._next = 0

    @hookimpl
    def slime_options(self) -> type[BaseModel]:
        """The model of `[plugin.diagnose]`."""
        return Options

    @hookimpl
    def slime_command(self) -> click.Command:
        """`slime diagnose RUN`."""
        from slime_diagnose.command import diagnose

        return diagnose

    @hookimpl
    def slime_step_done(self, report: StepReport, ctx: Context) -> None:
        """Note what is new, every ``interval`` steps, or every tenth of the run where that is more."""
        if report.version >= self._next:
            self._next = report.version + max(ctx.options.interval, report.version // 10)
            self._note(ctx)

    @hookimpl
    def slime_run_done(self, ctx: Context) -> None:
        """Note what is new at the end: of an evaluation after the last step, for instance."""
        self._next = 0
        self._note(ctx)

    def _note(self, ctx: Context) -> None:
        from slime_diagnose.rules import diagnose

        if ctx.run_dir is None or not (ctx.run_dir / "metrics.jsonl").is_file():
            return
        try:
            for finding in diagnose(ctx.run_dir):
                notice(("diagnose", finding.stage, finding.adapter, finding.rule), "\n".join(finding.lines()))
        except Exception as error:  # a file that cannot be read ends no training
            notice("diagnose", f"the run is not diagnosed: {type(error).__name__}: {error}")
