"""Tables as aligned text on stdout. Wide cells are cut to the terminal; pipes and files get all of it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

import click

from slime_core.report.text import safe_text


def heading(text: str) -> None:
    """A line above a table, bold on a terminal."""
    bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    click.echo(click.style(safe_text(text), bold=True) if bold else safe_text(text))


def print_pairs(pairs: Mapping[str, object]) -> None:
    """Two columns: a name, and a value that may have several lines."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        lines = safe_text(str(value)).splitlines() or [""]
        for i, line in enumerate(lines):
            click.echo(f"  {name if i == 0 else '':<{width}}  {_fit(line, width + 4)}".rstrip())
    click.echo()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table; numbers stand to the right."""
    cells = [[safe_text(cell(value)).replace("\n", " ") for value in row] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells)]
    right = [all(isinstance(row[i], (int, float)) for row in rows) and bool(rows) for i in range(len(columns))]
    for row in [list(columns), *cells]:
        parts = [text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right)]
        click.echo(_fit("  " + "  ".join(parts), 0).rstrip())
    click.echo()


def cell(value: object) -> str:
    """A value in few characters."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _fit(line: str, used: int) -> str:
    if not sys.stdout.isatty():
        return line
    room = max(20, shutil.get_terminal_size().columns - used)
    return line if len(line) <= room else line[: room - 3] + "..."
