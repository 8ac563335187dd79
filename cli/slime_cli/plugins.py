"""`slime plugins`: list, show, check and make plugins. Listing reads metadata; what loads one does so elsewhere."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import click

from slime_cli.tables import heading, print_pairs, print_table
from slime_core.errors import PluginError
from slime_core.plugins import PluginInfo, available, find

AS_JSON = click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
BROKEN = PluginError.exit_code


@click.group("plugins", epilog="Example: slime plugins new mine")
def plugins() -> None:
    """List, show, check and make plugins."""


@plugins.command("list", epilog="Example: slime plugins list")
@click.option("--hooks", is_flag=True, help="Load each in a separate process and show its hooks, or why it fails.")
@AS_JSON
def list_(hooks: bool, as_json: bool) -> None:
    """Installed plugins, from the metadata of distributions; none is imported."""
    rows = [(info, _looked_at(info) if hooks else {}) for info in available()]
    if as_json:
        click.echo(json.dumps({"plugins": [info.as_dict() | more for info, more in rows]}, indent=1, sort_keys=True))
        return
    if not rows:
        click.echo("no plugin is installed   (slime plugins new NAME makes one)")
        return
    columns = ["Name", "Version", "Distribution", "Target", *(["Hooks"] if hooks else [])]
    print_table(columns, [_cells(info, more) for info, more in rows])
    for info, more in rows:
        if "error" in more:
            click.echo(f"  {info.name} is broken. Why: slime plugins check {info.name}")
    for info, _ in rows:
        if info.conflicts:
            click.echo(
                f"  '{info.name}' is declared by {info.distribution} and {', '.join(info.conflicts)}; neither runs"
            )


def _looked_at(info: PluginInfo) -> dict[str, Any]:
    from slime_cli.plugin_probe import probe

    result = probe(info.name)
    return {key: result[key] for key in ("hooks", "error") if key in result}


def _cells(info: PluginInfo, more: dict[str, Any]) -> list[object]:
    hooks = [" ".join(more["hooks"]) if "hooks" in more else f"broken: {more['error']['what']}"] if more else []
    return [info.name, info.version, info.distribution, info.target, *hooks]


@plugins.command("show", epilog="Example: slime plugins show rm_math")
@click.argument("name")
@AS_JSON
def show(name: str, as_json: bool) -> None:
    """One plugin: where it comes from, its hooks, options and recipes, or why it does not load."""
    from slime_cli.plugin_probe import probe

    info = find(name)
    facts: dict[str, Any] = info.as_dict() | probe(name)
    if as_json:
        click.echo(json.dumps(facts, indent=1, sort_keys=True))
    else:
        heading(f"{info.name} {info.version}")
        pairs: dict[str, object] = {"distribution": info.requirement, "target": info.target}
        if "error" in facts:
            error = facts["error"]
            pairs |= {"broken": f"{error['code']} {error['what']}", "fix": error["fix"]}
        else:
            recipes = [f"{recipe}  {path}" for recipe, path in facts["recipes"].items()]
            pairs |= {"code": facts["home"], "hooks": "\n".join(facts["hooks"]) or "none"}
            pairs |= {"recipes": "\n".join(recipes) or "none"}
        print_pairs(pairs)
        if facts.get("options"):
            rows = [[option[key] for key in ("key", "type", "default", "description")] for option in facts["options"]]
            print_table(["Key", "Type", "Default", "Meaning"], rows)
    if "error" in facts:
        click.get_current_context().exit(BROKEN)


@plugins.command("check", epilog="Example: slime plugins check ./mine.py")
@click.argument("name")
@AS_JSON
def check(name: str, as_json: bool) -> None:
    """Run the contract suite on one plugin, in a separate process. Exit code 4 if a check fails."""
    from slime_cli.plugin_probe import in_process

    info = find(name)
    result = in_process("slime_core.testing.plugins", name, timeout=600)
    findings = [_finding(result["error"])] if isinstance(result, dict) else result
    broken = [finding for finding in findings if finding["status"] == "fail"]
    if as_json:
        answer = {"plugin": info.as_dict(), "ok": not broken, "findings": findings}
        click.echo(json.dumps(answer, indent=1, sort_keys=True))
    else:
        heading(f"{info.name} {info.requirement}")
        print_pairs({f"{finding['status']:<4}  {finding['name']}": _sentence(finding) for finding in findings})
        warned = sum(finding["status"] == "warn" for finding in findings)
        more = f", {warned} warning{'s' * (warned > 1)}" if warned else ""
        click.echo((f"  {len(broken)} broken" if broken else "  all promises kept") + more)
    if broken:
        click.get_current_context().exit(BROKEN)


def _finding(error: dict[str, str]) -> dict[str, str]:
    text = f"{error['code']} {error['what']}" + (f"\n{error['why']}" if error["why"] else "")
    return {"name": "import", "status": "fail", "found": text, "where": error["where"], "fix": error["fix"]}


def _sentence(finding: dict[str, str]) -> str:
    lines = [finding["found"], finding["where"], f"fix: {finding['fix']}" if finding["fix"] else ""]
    return "\n".join(line for line in lines if line)


@plugins.command("hooks", epilog="Example: slime plugins hooks slime_reward")
@click.argument("hook", required=False)
@click.option("--markdown", is_flag=True, help="As docs/plugins.md has them.")
@AS_JSON
def hooks_(hook: str | None, markdown: bool, as_json: bool) -> None:
    """Every hook that a plugin may implement; HOOK alone with its example."""
    rows = hook_rows(hook)
    if as_json:
        click.echo(json.dumps({"hooks": rows}, indent=1, sort_keys=True))
    elif markdown:
        click.echo("\n\n".join(_hook_section(row) for row in rows))
    elif hook is None:
        print_table(["Hook", "Kind", "Async", "Replaces"], [_hook_cells(row) for row in rows])
        click.echo("  One with its example: slime plugins hooks NAME")
    else:
        (row,) = rows
        heading(row["signature"])
        click.echo(f"{row['kind']}; {'may be async' if row['may_await'] else 'not async'}\n\n{row['text']}")


def hook_rows(hook: str | None = None) -> list[dict[str, Any]]:
    """What the hook specs say, with stable keys; all of them, or one.

    Raises:
        PluginError: PLG54 there is no such hook.
    """
    import inspect

    from slime_core import hookspecs
    from slime_core.errors import nearest
    from slime_core.hookspecs import signature_of

    if hook is not None and hook not in hookspecs.HOOKS:
        near = nearest(hook, set(hookspecs.HOOKS)) or nearest(f"slime_{hook}", set(hookspecs.HOOKS))
        raise PluginError(
            f"there is no hook '{hook}'", code="PLG54", fix="\n".join(filter(None, [near, "slime plugins hooks"]))
        )
    return [
        {
            "name": name,
            "signature": signature_of(name),
            "kind": info.kind,
            "may_await": info.may_await,
            "replaces": [f"--{flag}" for flag in info.replaces],
            "text": inspect.getdoc(getattr(hookspecs, name)),
        }
        for name, info in hookspecs.HOOKS.items()
        if hook in (None, name)
    ]


def _hook_section(row: dict[str, Any]) -> str:
    """A heading, the kind, the sentence, and the example as a block of code."""
    sentence, _, example = row["text"].partition("\n\n")
    kind = ", ".join([row["kind"], *(["may be async"] if row["may_await"] else [])])
    replaces = f" In place of slime's `{'`, `'.join(row['replaces'])}`." if row["replaces"] else ""
    text = textwrap.fill(f"*{kind}.* {sentence}{replaces}", 120, break_long_words=False, break_on_hyphens=False)
    return f"### `{row['signature']}`\n\n{text}\n\n```python\n{example.rstrip()}\n```"


def _hook_cells(row: dict[str, Any]) -> list[object]:
    return [row["signature"], row["kind"], "may be" if row["may_await"] else "", " ".join(row["replaces"])]


@plugins.command("new", epilog="Example: slime plugins new mine --dir plugins")
@click.argument("name")
@click.option("--dir", "parent", type=click.Path(path_type=Path), default=Path(), help="Where its folder goes.")
@click.option("--kind", type=click.Choice(["engine", "trainer"]), help="A backend, with its contract suite.")
@AS_JSON
def new(name: str, parent: Path, kind: str | None, as_json: bool) -> None:
    """Write a complete plugin package: code, a recipe that trains on a CPU, tests, metadata."""
    from slime_cli.plugin_template import write_plugin

    package = write_plugin(name, parent, kind or "plugin")
    train = {
        "engine": f"--plugin rm_math --rollout-engine {name}",
        "trainer": f"--plugin rm_math --train-backend {name}",
    }
    if as_json:
        click.echo(json.dumps(package, indent=1, sort_keys=True))
        return
    click.echo(package["folder"])
    heading("next")
    print_pairs(
        {
            "install": f"pip install -e {package['folder']}",
            "look": f"slime plugins check {name}",
            "train": f"slime run {train[kind] if kind else f'--plugin {name}'}",
            "test": f"pytest {package['folder']}",
        }
    )
