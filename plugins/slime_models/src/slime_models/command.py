"""`slime models`: families and presets, what each becomes in Megatron, slime's flags for it. Nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from slime_convert.bridge import Bridge, BridgeRow, Given, holds
from slime_convert.bridges import find_bridge
from slime_core import ConfigError
from slime_core.errors import nearest
from slime_core.plugins.load import load_plugin
from slime_models.arguments import model_args, pattern
from slime_models.families import BRIDGES
from slime_models.presets import ParameterCounts, count, presets, short

AS_JSON = click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
KINDS = {"gqa": "grouped queries", "mla": "latent"}


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]}, epilog="Example: slime models show qwen3-4b --flags"
)
def models() -> None:
    """Families and published models that the Megatron trainer knows."""


@models.command("list", epilog="Example: slime models list")
@AS_JSON
def list_(as_json: bool) -> None:
    """Families, and presets with their numbers of parameters."""
    families = [_family(bridge) for bridge in BRIDGES.values()]
    rows = [_preset(name) for name in presets()]
    if as_json:
        _print_json({"families": families, "presets": rows})
        return
    _table(["Family", "Attention", "Experts", "Rows"], [list(row.values()) for row in families])
    shown = [list({**row, "total": short(row["total"]), "active": short(row["active"])}.values()) for row in rows]
    _table(["Preset", "Family", "Parameters", "Active", "Layers", "Hidden", "Heads", "Tied", "Published as"], shown)


@models.command("show", epilog="Example: slime models show qwen3-4b --flags")
@click.argument("name")
@click.option("--flags", is_flag=True, help="slime's MODEL_ARGS array alone, to source in a script.")
@click.option("--tensors", is_flag=True, help="The table of tensors too: Megatron's name, Hugging Face's, shapes.")
@AS_JSON
def show(name: str, flags: bool, tensors: bool, as_json: bool) -> None:
    """A preset, a family or a model folder: parameters, Megatron's fields, flags and the table of tensors."""
    if name in BRIDGES:
        _show_family(BRIDGES[name], as_json)
        return
    source, config = _find(name)
    bridge: Bridge = find_bridge([load_plugin("models")], config)
    fields, args, counts = bridge.megatron(config), model_args(bridge, config), count(bridge, config)
    if as_json:
        parts = {"parameters": asdict(counts), "megatron": fields, "flags": args, "tensors": _rows(bridge, config)}
        _print_json({"name": name, "family": bridge.family, "source": source, **parts})
    elif flags:
        click.echo("\n   ".join(["MODEL_ARGS=(", *args]) + "\n)")
    else:
        _pairs({"family": bridge.family, "from": source, **_count_rows(counts)})
        _pairs({field: pattern(value) if isinstance(value, list) else value for field, value in fields.items()})
        if tensors:
            _print_rows(_rows(bridge, config))


def _find(name: str) -> tuple[str, Any]:
    """Where a model comes from, and its config."""
    preset = presets().get(name.lower())
    if preset is not None:
        return preset.source, preset.config
    if (Path(name) / "config.json").is_file():
        from slime_core.weights.folder import read_config

        return str(Path(name)), read_config(Path(name))
    names = [*presets(), *BRIDGES]
    raise ConfigError(
        f"'{name}' is neither a preset, a family nor a folder with a config.json",
        code="CFG05",
        where=f"slime models show {name}",
        why=f"presets: {', '.join(presets())}; families: {', '.join(BRIDGES)}",
        fix=nearest(name.lower(), names) or "slime models list",
    )


def _family(bridge: Bridge) -> dict[str, Any]:
    return {
        "family": bridge.family,
        "attention": KINDS[bridge.attention] + (", sandwich norms" if bridge.sandwich else ""),
        "experts": "yes" if any("{expert}" in row.megatron for row in bridge.rows) else "no",
        "rows": len(bridge.rows),
    }


def _preset(name: str) -> dict[str, Any]:
    preset = presets()[name]
    bridge = BRIDGES[preset.config.model_type]
    counts, sizes = count(bridge, preset.config), bridge.sizes(preset.config)
    return {
        "name": name,
        "family": bridge.family,
        "total": counts.total,
        "active": counts.active,
        "layers": sizes.layers,
        "hidden": sizes.hidden,
        "heads": f"{sizes.heads}/{sizes.groups}",
        "tied": "yes" if sizes.tied else "no",
        "source": preset.source,
    }


def _count_rows(counts: ParameterCounts) -> dict[str, str]:
    names = {"parameters": counts.total, "active": counts.active, "beside embeddings": counts.beside_embeddings}
    return {name: f"{number:,} ({short(number)})" for name, number in names.items()}


def _rows(bridge: Bridge, config: Any) -> list[dict[str, Any]]:
    """The rows that this config has, with the Hugging Face shapes of the first tensors of each."""
    entries = replace(bridge, tower="").entries(config)
    shapes = {_numberless(entry.megatron): entry.shapes for entry in entries}
    return [
        {**_row(row), "shapes": [list(shape) for shape in shapes[_numberless(row.megatron)]]}
        for row in bridge.rows
        if holds(row.when, config, bridge.defaults) and _numberless(row.megatron) in shapes
    ]


def _numberless(name: str) -> str:
    return ".".join("N" if part.isdigit() or part in ("{layer}", "{expert}") else part for part in name.split("."))


def _row(row: BridgeRow) -> dict[str, Any]:
    return {"megatron": row.megatron, "hf": list(row.hf), "kind": row.kind, "on": row.on, "when": row.when}


def _show_family(bridge: Bridge, as_json: bool) -> None:
    rows = [{**_row(row), "shapes": row.shape.split(", ")} for row in bridge.rows]
    fields = {name: _source(source) for name, source in bridge.fields.items()}
    only = {name: list(values) for name, values in bridge.only.items()}
    if as_json:
        _print_json({"family": bridge.family, "megatron": fields, "only": only, "tensors": rows})
        return
    pairs = {f"only {name}": " or ".join(map(str, values)) for name, values in only.items()}
    _pairs({"family": bridge.family, **pairs})
    _pairs(fields)
    _print_rows(rows)


def _source(source: Any) -> str:
    if isinstance(source, Given):
        return f"= {source.value!r}"
    return source if isinstance(source, str) else f"by {getattr(source, '__name__', source).strip('_')}"


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        note = ", ".join(filter(None, [row["kind"], "" if row["on"] == "all" else row["on"], row["when"]]))
        click.echo(f"  {row['megatron']}   ({note})")
        shapes = row["shapes"] * len(row["hf"]) if len(row["shapes"]) == 1 else row["shapes"]
        for name, shape in zip(row["hf"], shapes):
            click.echo(f"      {name}   {shape}")
    click.echo()


def _print_json(answer: Any) -> None:
    click.echo(json.dumps(answer, indent=1, sort_keys=True))


def _pairs(pairs: dict[str, Any]) -> None:
    width = max(map(len, pairs))
    for name, value in pairs.items():
        click.echo(f"  {name:<{width}}  {value}")
    click.echo()


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, *rows]:
        click.echo("  " + "  ".join(f"{value!s:<{width}}" for value, width in zip(row, widths)).rstrip())
    click.echo()
