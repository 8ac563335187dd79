"""`slime compat`: what of a launch script of slime's runs here, and slime's flags."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from slime_compat.launch.check import ScriptCheck, check_launch
from slime_compat.launch.flags import flag_rows
from slime_compat.launch.script import read_script
from slime_core.errors import SlimeError

PASSING: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: slime compat check run-qwen3-4B.sh"
)
def compat() -> None:
    """Launch scripts and flags of THUDM/slime."""


@compat.command(
    "check", context_settings=PASSING, epilog="Example: slime compat check run-qwen3-4B.sh --hf-checkpoint ./Qwen3-4B"
)
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--FLAG VALUE]...")
@click.pass_context
def check(context: click.Context, script: Path, words: tuple[str, ...], as_json: bool) -> int:
    """Say what of a launch script runs here, and as which `slime run`; it starts nothing.

    Its commands are read, not run; the files of the functions that it names are imported.

    Flags after the script follow its own, such as --plugin NAME or --hf-checkpoint DIR. Variables that the script does
    not set are those of the environment.
    """
    as_json = as_json or "--json" in words
    result = check_launch(read_script(script, os.environ), [word for word in words if word != "--json"])
    click.echo(json.dumps(_facts(result), indent=1)) if as_json else _print(result)
    return result.exit_code


@compat.command("flags", epilog="Example: slime compat flags")
@click.option("--markdown", is_flag=True, help="As the table of docs/slime_flags.md.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def flags(markdown: bool, as_json: bool) -> None:
    """Every flag of slime's: the same, under another name, not needed, or refused with what replaces it."""
    rows = flag_rows()
    if as_json:
        click.echo(json.dumps([dict(zip(("flag", "here", "note"), row, strict=True)) for row in rows], indent=1))
    elif markdown:
        lines = [f"| {' | '.join(row)} |" for row in (("flag of slime", "here", "note"), ("---",) * 3)]
        click.echo("\n".join([*lines, *(f"| `{flag}` | {role} | {note} |" for flag, role, note in rows)]))
    else:
        _table(rows)


def _facts(result: ScriptCheck) -> dict[str, Any]:
    """The answer of `slime compat check --json`."""
    return {
        "script": str(result.launch.script),
        "line": result.launch.line,
        "starts": result.launch.door,
        "sources": [str(path) for path in result.launch.sources],
        "flags": [
            {
                "flag": use.name,
                "values": list(use.values),
                "here": use.kind,
                "words": list(use.words),
                "note": use.note,
            }
            for use in result.translation.uses
        ],
        "unknown": [use.name for use in result.unknown],
        "left_out": result.left_out,
        "functions": [{"flag": f.flag, "path": f.path, "error": _text(f.error)} for f in result.functions],
        "errors": [_text(error) for error in result.errors],
        "missing": result.missing,
        "differences": result.differences,
        "model": result.model,
        "verdict": result.verdict,
        "command": " ".join(["slime run", *result.words]),
        "exit_code": result.exit_code,
    }


def _text(error: SlimeError | None) -> str:
    return "" if error is None else str(error)


def _print(result: ScriptCheck) -> None:
    launch, uses = result.launch, result.translation.uses
    click.echo(f"{launch.script}:{launch.line} starts {launch.door}")
    for path in launch.sources:
        click.echo(f"  with {path}")
    click.echo()
    for kind in ("refused", "needs its data", "not needed", "translated", "slime's default"):
        rows = [[use.name, " ".join(use.words) or " ".join(use.values), use.note] for use in uses if use.kind == kind]
        _section(f"flags: {kind}", rows)
    _section("flags: value not known before it runs", [[use.name, " ".join(use.values)] for use in result.unknown])
    _section("left out: empty, or more flags", [[word] for word in result.left_out])
    same = [use.name for use in uses if use.kind == "same"]
    click.echo(f"flags: the same ({len(same)})\n  {' '.join(same)}\n")
    _section(
        "functions", [[use.flag, use.path, "loads" if use.error is None else "fails"] for use in result.functions]
    )
    _section("files that are not on this machine", [[text] for text in result.missing])
    _section("differs", [[text] for text in result.differences])
    click.echo(f"model: {result.model}\n")
    for error in [*result.errors, *(use.error for use in result.functions if use.error)]:
        click.echo(f"{error}\n")
    click.echo(f"{launch.script.name} {result.verdict}\n")
    for name in result.translation.environment:
        click.echo(f"export {name}=...")
    click.echo(_command(result.words))


def _command(words: Sequence[str]) -> str:
    """The command in lines of at most 100 columns, where its words allow that."""
    lines = ["slime run"]
    for word in words:
        if len(lines[-1]) + len(word) < 100:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)


def _section(title: str, rows: Sequence[Sequence[str]]) -> None:
    if rows:
        click.echo(f"{title} ({len(rows)})")
        _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [min(60, max(len(row[at]) for row in rows)) for at in range(len(rows[0]))]
    for row in rows:
        click.echo("  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
    click.echo()
