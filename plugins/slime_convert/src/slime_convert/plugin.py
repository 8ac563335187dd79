"""The plugin `convert`: the command `slime convert`. Everything else is a library for the words of trainers."""

from __future__ import annotations

import click

from slime_core import hookimpl

slime_api = 1


@hookimpl
def slime_command() -> click.Group:
    """Our own words, and those of installed trainers."""
    from slime_convert.command import command

    return command
