"""`slime doctor`: named checks of this machine and installation, each ok, warn or fail with its fix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import click

from slime_cli.backend_checks import backend_checks
from slime_cli.checks import own_checks
from slime_cli.tables import heading, print_pairs
from slime_core.errors import SlimeError
from slime_core.protocols import Check, CheckResult

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command("doctor", epilog="Example: slime doctor -v --plugin sandbox")
@click.option("--plugin", "named", multiple=True, help="Only this plugin's checks beside our own; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Details below the rows, such as each layer of the sandbox.")
def command(named: tuple[str, ...], as_json: bool, verbose: bool) -> int:
    """Check this machine, this installation and the installed plugins. Exit code 1 where a check fails."""
    checks = [*own_checks(), *backend_checks(), *plugin_checks(named)]
    rows = [(check.name, run_check(check)) for check in checks]
    failed = sum(result.status == "fail" for _, result in rows)
    warned = sum(result.status == "warn" for _, result in rows)
    if as_json:
        table = [{"name": name} | asdict(result) for name, result in rows]
        click.echo(json.dumps({"ok": not failed, "checks": table}, indent=1, sort_keys=True))
    else:
        _print(rows, verbose)
        click.echo(f"{len(rows)} checks, {warned} warnings, {failed} failed")
    return 1 if failed else 0


def run_check(check: Check) -> CheckResult:
    """One check; an exception in it is a failed check, not a failed doctor."""
    try:
        result = check.run()
    except SlimeError as error:
        return CheckResult(status="fail", found=error.what, fix=error.fix)
    except Exception as error:
        return CheckResult(
            status="fail",
            found=f"the check itself failed: {type(error).__name__}: {error}",
            fix="report it to its author",
        )
    if not isinstance(result, CheckResult) or result.status not in MARKS:
        return CheckResult(status="fail", found=f"the check answered {result!r}, not a CheckResult")
    return result


def plugin_checks(named: tuple[str, ...]) -> Iterator[Check]:
    """Checks that plugins add by `slime_checks`; a plugin that does not load gets a row."""
    from slime_core.plugins import available, load_plugin
    from slime_core.plugins.boundary import call_now

    for name in named or dict.fromkeys(info.name for info in available()):
        try:
            loaded = load_plugin(name)
            declared = loaded.hooks.get("slime_checks")
            checks = call_now(declared, {}, about="its checks") if declared is not None else []
            plugin_own = [Check(name=f"{name}: {check.name}", run=check.run) for check in checks]
        except Exception as error:
            yield Check(name=f"plugin {name}", run=_broken(error, name, bool(named)))
            continue
        result = CheckResult(status="ok", found=f"{loaded.provider.origin} loads")
        yield Check(name=f"plugin {name}", run=lambda result=result: result)  # type: ignore[misc]
        yield from plugin_own


def _broken(error: Exception, name: str, required: bool) -> _Answer:
    message = error.what if isinstance(error, SlimeError) else f"{type(error).__name__}: {error}"
    fix = error.fix if isinstance(error, SlimeError) and error.fix else f"slime plugins check {name}"
    return _Answer(CheckResult(status="fail" if required else "warn", found=message, fix=fix))


class _Answer:
    def __init__(self, result: CheckResult) -> None:
        self._result = result

    def __call__(self) -> CheckResult:
        return self._result


def _print(rows: list[tuple[str, CheckResult]], verbose: bool) -> None:
    import os
    import sys

    paint = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    heading("slime doctor")
    table = {}
    for name, result in rows:
        mark, colour = MARKS[result.status]
        fix = [f"fix: {result.fix}"] if result.fix and result.status != "ok" else []
        table[f"{mark} {name}"] = "\n".join([result.found, *(result.details if verbose else ()), *fix])
    if not paint:
        print_pairs(table)
        return
    width = max(len(name) for name in table)
    for name, text in table.items():
        colour = next(colour for mark, colour in MARKS.values() if name.startswith(mark))
        first, *rest = text.splitlines() or [""]
        click.echo(f"  {click.style(name.ljust(width), fg=colour)}  {first}")
        for line in rest:
            click.echo(f"  {'':<{width}}  {line}")
    click.echo()
