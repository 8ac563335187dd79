"""The plugin `watch`: `slime watch`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import hookimpl

if TYPE_CHECKING:
    import click


class WatchPlugin:
    """One a process."""

    slime_api = 1

    @hookimpl
    def slime_command(self) -> click.Command:
        """`slime watch RUN`."""
        from slime_watch.command import watch

        return watch
