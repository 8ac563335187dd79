"""`slime report RUN...`: writes the page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slime_core.report.text import say

if TYPE_CHECKING:
    from collections.abc import Iterable

NAME = "report.html"
LIMIT = 38 << 20
"""Bytes that samples may take in the file, about; with the rest it stays under 50 MB."""


@click.command("report", epilog="Example: slime report runs/arithmetic-0 runs/arithmetic-1 --output both.html")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help=f"The file; default RUN/{NAME}, of several runs {NAME}."
)
def report(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write one HTML file that shows runs: curves, times, samples with their tokens, settings, differences.

    It needs no network and no server, and opens from the disk. A running run is shown as far as it is.
    """
    from slime_core.report.rundir import RunDir
    from slime_report.data import overview
    from slime_report.page import render
    from slime_report.samples import SampleBook, sample_blocks

    paths = dict.fromkeys(run.expanduser().absolute() for run in runs)
    run_dirs = [RunDir.open(path) for path in paths]
    facts = overview(run_dirs)
    books = [SampleBook(run_dir) for run_dir in run_dirs]
    target = output or (run_dirs[0].path / NAME if len(run_dirs) == 1 else Path(NAME))
    blocks = (block for run, book in enumerate(books) for block in sample_blocks(book, run, LIMIT // len(books)))
    write(target, render(facts, blocks))
    for run, book in zip(facts["runs"], books, strict=True):
        for notice in (*run["notices"], *book.notices()):
            say(f"{run['name']}: {notice}")
    click.echo(str(target))


def write(target: Path, pieces: Iterable[str]) -> None:
    """Replace the file as a whole.

    Raises:
        StorageError: STO109 the disk is full, STO110 it is not writable, STO121 the device failed.
    """
    from slime_core.durable import storage_error

    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8", errors="replace") as file:
            file.writelines(pieces)
        aside.replace(target)
    except OSError as error:
        aside.unlink(missing_ok=True)
        failure = storage_error(error, target, "the report cannot be written")
        failure.fix = "choose another file: --output FILE"
        raise failure from error
