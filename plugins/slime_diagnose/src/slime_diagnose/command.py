"""`slime diagnose RUN`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from slime_core.report.text import safe_text
from slime_diagnose.diagnosis import SEVERITIES


@click.command("diagnose", epilog="Example: slime diagnose runs/demo-0 --json")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="The findings as a JSON list.")
@click.option("--fail-on", type=click.Choice(SEVERITIES), help="Exit with 1 on a finding this severe, or worse.")
def diagnose(run: Path, as_json: bool, fail_on: str | None) -> None:
    """Say why a run does not learn, with the evidence and the key to change.

    The run may still be going on. Example: slime diagnose runs/demo-0 --fail-on warning
    """
    from slime_diagnose.rules import diagnose as find

    findings = find(run)
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in findings], indent=1))
    else:
        lines = [line for finding in findings for line in (*finding.lines(), "")]
        click.echo(safe_text("\n".join(lines or ["nothing stands out"])))
    if fail_on and any(SEVERITIES.index(finding.severity) >= SEVERITIES.index(fail_on) for finding in findings):
        raise click.exceptions.Exit(1)
