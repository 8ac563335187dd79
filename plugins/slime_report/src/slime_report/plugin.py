"""The plugin `report`: `slime report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import hookimpl

if TYPE_CHECKING:
    import click


class ReportPlugin:
    """One a process."""

    slime_api = 1

    @hookimpl
    def slime_command(self) -> click.Command:
        """`slime report RUN...`."""
        from slime_report.command import report

        return report
