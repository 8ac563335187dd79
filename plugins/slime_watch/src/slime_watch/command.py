"""`slime watch RUN`: serves the live page, shows the terminal's view, or prints lines where there is no terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slime_core.report.text import safe_text, say

if TYPE_CHECKING:
    from slime_core.report.rundir import RunDir

EPILOG = """\b
Examples:
  slime watch runs/arithmetic-0                a page for a browser; Ctrl-C ends it, the run continues
  slime watch runs/arithmetic-0 --terminal     curves in this terminal, such as one over ssh; q leaves
From another machine: ssh -L 8000:127.0.0.1:PORT HOST, then the printed URL with port 8000."""


@click.command("watch", epilog=EPILOG)
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("-t", "--terminal", is_flag=True, help="Curves in this terminal; lines where it is none.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
def watch(run: Path, terminal: bool, port: int) -> None:
    """Watch a run, running or ended, by its run directory: a live page on 127.0.0.1, or --terminal.

    The run is not changed, and no lock of it is kept. stdout gets the page's URL, with its token.
    """
    from slime_core.report.rundir import RunDir

    run_dir = RunDir.open(run)
    if not terminal:
        return serve_page(run_dir, port)
    if sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from slime_watch.terminal import WatchTerminal

        view = WatchTerminal(run_dir)
        view.run()
        if view.failure is not None:
            raise view.failure
        return None
    from slime_core.report.following import follow

    return follow(run_dir, lambda text: click.echo(safe_text(text)))


def serve_page(run_dir: RunDir, port: int) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: CFG04 the port cannot be had.
    """
    from slime_watch.server import serve

    def started(url: str) -> None:
        click.echo(url)
        say("Ctrl-C ends the page; the run continues")

    serve(run_dir, port, started)
