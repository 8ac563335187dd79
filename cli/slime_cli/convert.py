"""`slime convert`: the FSDP trainer's checkpoints to model folders, and the words that other trainers bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slime_core.plugins import backends
from slime_core.weights.convert_command import FOLDER, ORIGIN, convert, folder_of, options


class Words(click.Group):
    """Our own word, then those of installed trainers, which are imported when one is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them, for the help."""
        return sorted({*self.commands, *backends.converters()})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Find the one that was named."""
        return self.commands.get(name) or backends.converter(name)


@click.group("convert", cls=Words)
def command() -> None:
    """Convert checkpoints, tensor by tensor, whatever their size (docs/conversion.md).

    Interrupted conversions go on when the same command is given again; DST appears when it is complete.
    """


@command.command("fsdp-to-hf")
@click.argument("checkpoint", metavar="CHECKPOINT", type=FOLDER)
@click.argument("target", metavar="DST", type=FOLDER)
@ORIGIN
@options(to_hf=True)
def fsdp_to_hf_command(checkpoint: Path, target: Path, origin: Path | None, **rest: Any) -> None:
    """A checkpoint of the FSDP trainer (checkpoints/step-N, or a run directory) to a Hugging Face folder DST."""
    from slime_core.trainers.fsdp.exporting import fsdp_to_hf

    convert(rest, lambda how: fsdp_to_hf(checkpoint, target, folder_of(origin) if origin else None, how))
