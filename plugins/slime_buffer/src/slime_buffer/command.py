"""`slime buffer`: serve a rollout buffer, look at one, generate for one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import click

from slime_core.report.text import say

TOKEN_ENV = "SLIME_BUFFER_TOKEN"


@click.group("buffer", epilog="Example: slime buffer serve ./buffer --port 8889")
def buffer() -> None:
    """A rollout buffer: rollouts made elsewhere, kept until they are trained on (docs/rollout_buffer.md)."""


@buffer.command("serve", epilog="Example: slime buffer serve ./buffer --port 8889")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Another than the loopback needs --token-file.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Default: DIR/token, made where it is missing.")
@click.option("--max-unread", default=4096, show_default=True, type=click.IntRange(1), help="Ended groups a run.")
@click.option("--max-open", default=65536, show_default=True, type=click.IntRange(1), help="Open groups a run.")
@click.option("--max-body-mib", default=16, show_default=True, type=click.IntRange(1, 1024), help="Of a request.")
@click.option("--max-tokens", default=131072, show_default=True, type=click.IntRange(1, 1 << 20), help="A sequence.")
def serve_command(
    folder: Path,
    host: str,
    port: int,
    token_file: Path | None,
    max_unread: int,
    max_open: int,
    max_body_mib: int,
    max_tokens: int,
) -> None:
    """Serve the buffer in DIR until SIGTERM. stdout gets one line: the address."""
    from slime_buffer.service.serve import BufferSettings, serve
    from slime_buffer.service.tables import BufferLimits

    def started(url: str, path: Path | None) -> None:
        say(f"token in {path}" if path else f"token from {TOKEN_ENV}")
        click.echo(url)

    serve(
        BufferSettings(
            folder=folder,
            host=host,
            port=port,
            token_file=token_file,
            max_body=max_body_mib << 20,
            max_tokens=max_tokens,
            limits=BufferLimits(unread=max_unread, open=max_open),
        ),
        started,
    )
    say("ended in order")


@buffer.command("stats", epilog="Example: slime buffer stats http://127.0.0.1:8889")
@click.argument("url")
@click.option("--token-file", type=click.Path(path_type=Path), help=f"Default: the token in {TOKEN_ENV}.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def stats_command(url: str, token_file: Path | None, as_json: bool) -> None:
    """Counts, queues and rates of the buffer at URL."""
    stats = asyncio.run(_stats(url, _token(token_file)))
    if as_json:
        click.echo(json.dumps(stats, indent=1, sort_keys=True))
        return
    rows = [
        [part, name, str(count)]
        for part in stats
        if isinstance(stats[part], dict)
        for name, count in stats[part].items()
    ]
    rows.insert(0, ["part", "name", "count"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    click.echo()
    law = "issued = read + dropped + pending"
    say(f"{law} holds" if stats["conserved"] else f"{law} DOES NOT HOLD")


async def _stats(url: str, token: str) -> dict[str, Any]:
    from slime_buffer.client import BufferClient

    async with BufferClient(url, token, deadline=10) as client:
        return (await client.stats()).model_dump(mode="json")


@buffer.command("generate", epilog="Example: slime buffer generate http://127.0.0.1:8889 --function play.py:generate")
@click.argument("url")
@click.option("--function", "path", required=True, help="async generate(task): file.py:function, or module:function.")
@click.option("--token-file", type=click.Path(path_type=Path), help=f"Default: the token in {TOKEN_ENV}.")
@click.option("--concurrency", default=8, show_default=True, type=click.IntRange(1, 512), help="Groups at once.")
@click.option("--run", "run_name", help="Only this run's work.")
@click.option("--task", help="Only this task's.")
@click.option("--groups", default=0, type=click.IntRange(0), help="Stop after so many; 0: never.")
@click.option("--lease-seconds", default=60.0, show_default=True, type=click.FloatRange(1, 3600))
@click.option("--patience", default=300.0, show_default=True, type=click.FloatRange(0), help="The buffer may be away.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def generate_command(
    url: str,
    path: str,
    token_file: Path | None,
    concurrency: int,
    run_name: str | None,
    task: str | None,
    groups: int,
    lease_seconds: float,
    patience: float,
    as_json: bool,
) -> None:
    """Make rollouts for the buffer at URL by a function of yours, until SIGTERM."""
    from slime_core.plugins.locate import locate

    function = locate(path, "--function")
    counts = asyncio.run(
        _generate(
            url,
            _token(token_file),
            function,
            concurrency=concurrency,
            run=run_name,
            task=task,
            groups=groups,
            lease_seconds=lease_seconds,
            patience=patience,
        )
    )
    click.echo(json.dumps(counts, sort_keys=True) if as_json else f"{counts.get('groups', 0)} groups")


async def _generate(url: str, token: str, function: Any, **options: Any) -> dict[str, int]:
    from slime_buffer.generator import serve

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return dict(await serve(url, token, function, stop=stop, note=say, **options))


def _token(path: Path | None) -> str:
    from slime_core.errors import ConfigError

    if path is not None:
        try:
            return path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token cannot be read: {error}", code="CFG05", where=str(path)) from error
    token = os.environ.get(TOKEN_ENV, "")
    if not token:
        raise ConfigError(
            f"{TOKEN_ENV} is not set",
            code="CFG09",
            where="environment",
            fix=f"export {TOKEN_ENV}=$(cat DIR/token)   or --token-file DIR/token",
        )
    return token
