"""`slime stop RUN`: end a run, in order or at once, by run directory or name of a detached run."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import click

from slime_cli.detaching import actor_name
from slime_cli.failure import INTERRUPTED
from slime_cli.following import RunTarget, follow, named, reached_of, target_of
from slime_core.errors import ConfigError
from slime_core.report.following import POLL
from slime_core.report.text import say

NOW = 20.0  # seconds after the second signal until a process is killed


@click.command("stop", epilog="Example: slime stop runs/demo-0")
@click.argument("run")
@click.option("--now", is_flag=True, help="At once, without a checkpoint; what was recorded can be resumed.")
@click.option("--address", default="", help="Ray cluster of a detached run; default: its own, or RAY_ADDRESS.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def command(run: str, now: bool, address: str, as_json: bool) -> int:
    """End RUN in order, with a checkpoint, and wait for it; --now: at once.

    Ctrl-C does not take the request back.
    """
    target = named(run, address)
    lines: list[str] = []
    try:
        code = stop_detached(target, now, address, lines) if target.detached else stop_process(target, now, lines)
    except KeyboardInterrupt:
        say(f"\nit was asked to end and has not ended yet; slime attach {target.path} follows it")
        return INTERRUPTED
    for line in lines[-3:]:
        say(line)
    if as_json:
        click.echo(json.dumps({"run_dir": str(target.path), "exit_code": code}, indent=1, sort_keys=True))
    else:
        say(f"ended with exit code {code}: {target.path}")
    return 0


def stop_detached(target: RunTarget, now: bool, address: str, lines: list[str]) -> int:
    """Ask its actor, and follow it to its end."""
    with reached_of(target, address) as drivers:
        while target_of(target.path).detached and not drivers.stop(actor_name(target.path), now=now):
            time.sleep(POLL)
    return follow(target_of(target.path), address, lines.append)


def stop_process(target: RunTarget, now: bool, lines: list[str]) -> int:
    """Signal the process that holds the run, which must be on this machine.

    Raises:
        ConfigError: CFG05 none holds it, or it is elsewhere.
    """
    holder = target.run_dir.holder()
    if holder is None:
        raise ConfigError(
            "no process runs in this run directory",
            code="CFG05",
            where=str(target.path),
            why=f"its last one ended with exit code {target.code}",
            fix=f"slime show {target.path}   says how",
        )
    pid, host = holder.get("pid"), holder.get("host")
    if host != socket.gethostname() or not isinstance(pid, int):
        raise ConfigError(
            f"the run's process is on another machine, {host}",
            code="CFG05",
            where=str(target.path),
            why="only detached runs can be stopped from elsewhere",
            fix=f"on {host}: slime stop {target.path}   or kill -TERM {pid}",
        )
    end_process(target, pid, now=now)
    return follow(target_of(target.path), "", lines.append)


def end_process(target: RunTarget, pid: int, *, now: bool) -> None:
    """Send SIGTERM once; or wait until it has ended, with SIGKILL as the last resort."""
    end = time.monotonic() + NOW
    number = signal.SIGTERM
    while True:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        if not now or number == signal.SIGKILL:
            return
        time.sleep(POLL)
        holder = target.run_dir.holder()
        if holder is None or holder.get("pid") != pid or not Path(f"/proc/{pid}").exists():
            return
        if time.monotonic() > end:
            number = signal.SIGKILL
