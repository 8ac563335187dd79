"""How click hands over what it does not know: flags that are keys of the config, in the order they were typed."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

PASSING: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
"""Context settings of a command whose arguments go on to `slime_core.config`."""


class KeyCommand(click.Command):
    """A command that takes every key of the config as a flag; a shell completes them."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Its own options, then the keys."""
        items = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("--"):
            flags = {f"--{row['key'].rpartition('.')[2].replace('_', '-')}": row["text"] for row in _rows()}
            items += [CompletionItem(flag, help=text) for flag, text in flags.items() if flag.startswith(incomplete)]
        return items


class KeyWords(click.types.UnprocessedParamType):
    """The words of a recipe and of keys; a shell completes plugins, the values of a key, and files."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Values of the flag before, where it has a list of them; otherwise files."""
        values = _values((ctx.params.get(param.name or "") or ("",))[-1])
        items = [CompletionItem(value) for value in values if value.startswith(incomplete)]
        return items or [CompletionItem(incomplete, type="file")]


KEY_WORDS = KeyWords()


def _values(flag: str) -> list[str]:
    """What may follow a flag: installed plugins, or the values of a key that has a few."""
    if flag == "--plugin":
        from slime_core.plugins import available

        return sorted({info.name for info in available()})
    key = flag.removeprefix("--").replace("-", "_")
    types = [row["type"] for row in _rows() if row["key"].rpartition(".")[2] == key] if flag.startswith("--") else []
    return [value for text in types if text.startswith("one of ") for value in text[7:].split(", ")]


def _rows() -> list[dict[str, str]]:
    from slime_cli.config import core_rows

    return core_rows()
