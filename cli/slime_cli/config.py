"""`slime config show | keys | check`: the resolved config, the list of keys or a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from slime_cli.failure import CliSession
from slime_cli.tables import heading, print_table
from slime_cli.words import KEY_WORDS, PASSING, KeyCommand
from slime_core.report.text import say

if TYPE_CHECKING:
    from slime_core.backends import Backend
    from slime_core.config.schema import Config


@click.group("config", epilog="Example: slime config keys rollout")
def command() -> None:
    """Show, list and check keys."""


@command.command(
    "show", epilog="Example: slime config show --plugin rm_math --lr 1e-5", cls=KeyCommand, context_settings=PASSING
)
@click.argument("words", nargs=-1, type=KEY_WORDS, metavar="[RECIPE] [--KEY VALUE]...")
@click.option("--stage", help="One stage, resolved.")
@click.option("--card", "as_card", is_flag=True, help="The algorithm's card as comments first, and settled values.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.pass_obj
def show(session: CliSession, words: tuple[str, ...], stage: str | None, as_card: bool, as_json: bool) -> None:
    """Print the resolved config as TOML: flag over recipe over plugin default over core default.

    With --card, or an --advantage-estimator on the command line, the algorithm's card stands before it, and keys that
    are left to the algorithm show its values.
    """
    from slime_cli.settings import load_words
    from slime_core.config.dump import redacted, to_toml
    from slime_core.config.load import split, stage_name, stages
    from slime_core.errors import ConfigError

    selection = split(words)
    loaded = load_words(selection, session)
    config = loaded.config
    if stage is not None:
        parts = {stage_name(part): part for part in stages(config)}
        if stage not in parts:
            raise ConfigError(
                f"there is no stage '{stage}'",
                code="CFG01",
                where="command line: --stage",
                fix=f"use one of: {', '.join(parts)}",
            )
        config = parts[stage]
    config = redacted(config, loaded.secrets)
    if as_json:
        click.echo(json.dumps(config.model_dump(mode="json"), indent=1, sort_keys=True, default=str))
        return
    if as_card or any(word.name.rpartition(".")[2] == "advantage_estimator" for word in selection.overrides):
        click.echo(card_comments(config), nl=False)
        config = config if config.stage else stages(config)[0]
    click.echo(to_toml(config), nl=False)


def card_comments(config: Config) -> str:
    """The cards of a config's algorithms as TOML comments, with the keys' values as each stage settles them."""
    from slime_cli.cards import card, card_text
    from slime_core.config.load import stage_name, stages

    lines: list[str] = []
    parts = stages(config)
    for part in [one for one in parts if not one.train.offline] or parts:
        name = part.train.estimator
        card_of = card(name)
        text = card_text(card_of, part) if card_of else f"{name}: of a plugin, which has no card here\n"
        lines += [f"stage {stage_name(part)}", ""] if len(config.stage) > 1 else []
        lines += [*text.splitlines(), ""]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"


@command.command("keys", epilog="Example: slime config keys eps_clip")
@click.argument("prefix", default="", metavar="[SECTION or part of a name]")
@click.option("--plugin", "plugins", multiple=True, help="Also the options of this plugin; repeatable.")
@click.option("--backend", help="Only the options of this engine, trainer or cluster: keys of its table.")
@click.option(
    "--sglang", "backend", flag_value="sglang", help="--backend sglang: the options of the SGLang that is here."
)
@click.option("--megatron", "backend", flag_value="megatron", help="--backend megatron: names of [megatron].")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option("--markdown", is_flag=True, help="As the tables of docs/config.md, or docs/megatron.md.")
def keys(prefix: str, plugins: tuple[str, ...], backend: str | None, as_json: bool, markdown: bool) -> None:
    """List keys with type, default and meaning. Every key is a flag: rollout_batch_size is --rollout-batch-size."""
    from slime_core.config.validate import absent
    from slime_core.errors import ConfigError, nearest

    tables: Callable[[list[dict[str, str]]], str] = markdown_tables
    if backend is not None:
        listing = with_options(backend)
        assert listing.options is not None
        rows, tables = listing.options(), listing.markdown or markdown_tables
    else:
        rows = [*core_rows(), *(plugin_rows(plugins) if plugins else [])]
    chosen = [row for row in rows if _matches(row["key"], prefix)]
    if not chosen:
        raise ConfigError(
            f"no key has '{prefix}' in its name",
            code="CFG01",
            where=f"command line: {prefix}",
            why=absent(prefix),
            fix="\n".join(
                filter(
                    None,
                    [
                        "" if absent(prefix) else nearest(prefix, [r["key"].rpartition(".")[2] for r in rows]),
                        "slime config keys",
                    ],
                )
            ),
        )
    if as_json:
        click.echo(json.dumps(chosen, indent=1, sort_keys=True))
        return
    if markdown:
        click.echo(tables(chosen), nl=False)
        return
    for section in dict.fromkeys(row["section"] for row in chosen):
        heading(f"[{section}]" if section else "top")
        print_table(
            ["key", "type", "default", "meaning"],
            [
                [row["key"].removeprefix(f"{section}."), row["type"], row["default"], row["text"]]
                for row in chosen
                if row["section"] == section
            ],
        )


@command.command(
    "check", epilog="Example: slime config check recipe.toml --lr 1e-5", cls=KeyCommand, context_settings=PASSING
)
@click.argument("words", nargs=-1, type=KEY_WORDS, metavar="[RECIPE] [--KEY VALUE]...")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.pass_obj
def check(session: CliSession, words: tuple[str, ...], as_json: bool) -> None:
    """Check keys, values, files, rules between keys, plugins and their routes; the exit code says where it failed."""
    from slime_cli.settings import load_settings, plans
    from slime_core.config.dump import fingerprint
    from slime_core.config.load import stage_name, stages

    settings = load_settings(words, session)
    settings.plugins.close()
    servers = plans(settings).get("servers")
    recipe = settings.loaded.recipe
    answer: dict[str, Any] = {
        "ok": True,
        "recipe": str(recipe) if recipe else None,
        "stages": [stage_name(part) for part in stages(settings.config)],
        "plugins": list(settings.plugins.names),
        "notices": list(settings.loaded.notices),
        "fingerprint": fingerprint(settings.config),
        **({"servers": servers.facts} if servers else {}),
    }
    if as_json:
        click.echo(json.dumps(answer, indent=1, sort_keys=True))
    else:
        click.echo(f"ok  {answer['recipe'] or 'flags'}: stages {', '.join(answer['stages'])}")
        say("what it would do: slime run --dry-run ...")


def core_rows() -> list[dict[str, str]]:
    """Every core key: ``section key flag type default text``."""
    from slime_core.config.fields import core_keys
    from slime_core.config.values import show

    return [
        {
            "section": key.section,
            "key": key.path,
            "flag": f"--{name.replace('_', '-')}",
            "type": key.kind,
            "default": "auto" if key.info.default is None else show(key.info.default),
            "text": key.info.description or "",
        }
        for name, key in core_keys().items()
    ]


def markdown_tables(rows: list[dict[str, str]]) -> str:
    """A heading and a table a section."""
    lines = []
    for section in dict.fromkeys(row["section"] for row in rows):
        lines += [f"### [{section}]" if section else "### Top of the file", ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for row in rows:
            if row["section"] == section:
                cells = (f"`{row['key']}`", row["type"], f"`{row['default']}`", row["text"])
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def plugin_rows(names: tuple[str, ...]) -> list[dict[str, str]]:
    """Every option of these plugins."""
    from slime_core.config.values import bounds, describe, show
    from slime_core.plugins import option_models

    return [
        {
            "section": f"plugin.{plugin}",
            "key": f"plugin.{plugin}.{name}",
            "flag": f"--{name.replace('_', '-')}",
            "type": " ".join([describe(info.annotation), *bounds(info)]),
            "default": "required" if info.is_required() else show(info.get_default(call_default_factory=True)),
            "text": info.description or "",
        }
        for plugin, model in option_models(names).items()
        if model is not None
        for name, info in model.model_fields.items()
    ]


def with_options(name: str) -> Backend:
    """The installed backend of that name whose options can be listed.

    Raises:
        ConfigError: CFG04 there is none.
    """
    from slime_core.errors import ConfigError, nearest
    from slime_core.plugins import backends

    for backend in backends.brought_by(name) if backends.is_installed(name) else ():
        if backend.options is not None:
            return backend
    if name in backends.BROUGHT_BY and not backends.is_installed(name):
        raise backends.absent(f"backend {name}", name, f"backend {name}")
    raise ConfigError(
        f"no installed backend called '{name}' lists its options",
        code="CFG04",
        where=f"backend {name}",
        why=f"known: {', '.join(backends.BROUGHT_BY)}",
        fix=nearest(name, list(backends.BROUGHT_BY)) or "slime plugins list",
    )


def _matches(key: str, prefix: str) -> bool:
    word = prefix.strip("-").replace("-", "_")
    section, _, name = key.rpartition(".")
    return not word or word in (section, section.rpartition(".")[2], key) or word in name
