"""`slime attach [RUN]`: follow a run's output until it ends, by run directory or name of a detached run."""

from __future__ import annotations

import json
from typing import Any

import click

from slime_cli.failure import INTERRUPTED
from slime_cli.following import follow, named, plain, reached, target_of
from slime_cli.tables import print_table
from slime_core.report.text import say


@click.command("attach", epilog="Example: slime attach runs/demo-0")
@click.argument("run", required=False)
@click.option("--address", default="", help="Ray cluster of a detached run; default: its own, or RAY_ADDRESS.")
@click.option("--json", "as_json", is_flag=True, help="The list as JSON.")
def command(run: str | None, address: str, as_json: bool) -> int:
    """Follow RUN (a run directory, or a detached run's name) and end with its exit code; without one, list them.

    Ctrl-C leaves it running.
    """
    if run is None:
        rows = listed(address)
        if as_json:
            click.echo(json.dumps(rows, indent=1, sort_keys=True))
        elif rows:
            print_table(["run", "state", "host", "run directory"], [list(row.values())[:4] for row in rows])
        else:
            say("no detached run is on this cluster")
        return 0
    target = named(run, address)
    try:
        return follow(target, address)
    except KeyboardInterrupt:
        say(f"\ndetached: the run continues; slime attach {target.path} follows it, slime stop {target.path} ends it")
        return INTERRUPTED


def listed(address: str) -> list[dict[str, Any]]:
    """A row a detached run."""
    rows = []
    with reached(address) as drivers:
        for name in drivers.names():
            entry = drivers.find(name)
            if entry is None:
                continue  # it ended meanwhile
            about, path = entry.about, str(entry.about.get("run_dir", ""))
            version = last_version(path) if path else 0
            rows.append(
                {
                    "name": plain(name),
                    "state": entry.state,
                    "host": about.get("host", ""),
                    "run_dir": path,
                    "actor": name,
                    "pid": about.get("pid", 0),
                    "version": version,
                }
            )
    return rows


def last_version(path: str) -> int:
    """Number of steps in its metrics."""
    from pathlib import Path

    from slime_core.report import history

    steps = history.steps_of(target_of(Path(path)).run_dir)
    return steps[-1]["version"] if steps else 0
