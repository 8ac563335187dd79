"""`slime kernelbench serve` with stand-in workers, as a process: `python stand_in_server.py FOLDER WORKERS GRACE`."""

import sys
from pathlib import Path

import click

from slime_kernelbench.service.serve import JudgeSettings, serve

if __name__ == "__main__":
    folder, workers, grace = sys.argv[1:]
    command = (sys.executable, str(Path(__file__).with_name("stand_in_worker.py")), folder)
    settings = JudgeSettings(folder=Path(folder), workers=int(workers), grace=float(grace), command=command)
    serve(settings, lambda url, path: click.echo(url))
