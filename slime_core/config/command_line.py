"""Parsing of the command line: a recipe and overrides, each with the full key that it means.

    slime run recipe.toml --lr 1e-6 --no-colocate --rollout-stop "a" "b" train.clip_grad=0.5 --plugin rm_math

A bare name is a core key, else an option of a named plugin, else one of a trainer such as Megatron; two candidates in
the last two are an error that names both full keys. ``--sglang-NAME`` is an option of that engine,
``--sglang-router-NAME`` one of its table ``router``; which there are is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from slime_core.config.backend_tables import BackendTables
from slime_core.config.fields import ConfigKey, core_keys, describe, element, is_model, is_sequence, unwrap
from slime_core.config.problems import KeyPath, Problem, dotted
from slime_core.config.schema import SECTIONS
from slime_core.config.validate import absent
from slime_core.config.values import typed
from slime_core.errors import ConfigError, nearest

ALIASES = {"plugin": "plugins", "cluster": "cluster_backend"}
_DOTTED = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)

Models = Mapping[str, "type[BaseModel] | None"]


@dataclass(slots=True, frozen=True)
class Word:
    """One override as it was typed."""

    name: str  # underscores; dotted where it was
    values: tuple[str, ...]  # none for a bare --flag or --no-flag
    shown: str  # for messages: "--lr", "train.lr=..."
    negated: bool = False


@dataclass(slots=True)
class CommandLine:
    """A split command line."""

    recipe: str | None = None
    overrides: list[Word] = field(default_factory=list)
    tables: BackendTables = field(default_factory=BackendTables)

    @property
    def plugins(self) -> list[str]:
        """Names given with --plugin, in order."""
        return [value for word in self.overrides if word.name == "plugins" for value in word.values if word.shown]

    def repeated(self) -> list[tuple[Word, Word]]:
        """Each key that is given again with another value: the word before, and the word that holds."""
        last: dict[str, Word] = {}
        pairs = []
        for word in self.overrides:
            head, _, rest = word.name.partition(".")
            name = rest if head in SECTIONS or rest in self.tables.bare else word.name
            earlier = last.get(name, word)
            if name != "plugins" and written(earlier) != written(word):
                pairs.append((earlier, word))
            last[name] = word
        return pairs


@dataclass(slots=True, frozen=True)
class Override:
    """One override with its full key and typed value."""

    path: KeyPath
    value: Any
    place: str  # "command line: --lr"


def split(tokens: Sequence[str], tables: BackendTables | None = None) -> CommandLine:
    """Take apart what stands after `slime run`.

    Raises:
        ConfigError: CFG01 a second recipe, CFG02 a flag without its value.
    """
    words, keys, at = CommandLine(tables=tables or BackendTables()), core_keys(), 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token[2:].partition("=")
            word, at = _flag(name, value if equals else None, tokens, at, keys, words.tables)
            words.overrides.append(word)
        elif match := _DOTTED.fullmatch(token):
            words.overrides.append(Word(_name(match[1]), (match[2],), match[1]))
        elif words.recipe is None and not token.startswith("-"):
            words.recipe = token
        else:
            raise ConfigError(
                f"what is '{token}'?",
                code="CFG01",
                where=f"command line: {token}",
                why=f"the recipe is {words.recipe} already" if words.recipe else "flags start with two dashes",
                fix="write keys as --key VALUE or section.key=VALUE",
            )
    return words


def _flag(
    name: str,
    value: str | None,
    tokens: Sequence[str],
    at: int,
    keys: Mapping[str, ConfigKey],
    tables: BackendTables,
) -> tuple[Word, int]:
    plain = _name(name)
    plain = ALIASES.get(plain, plain)
    shown = f"--{name}"
    is_key = plain in keys or "." in plain or plain.removeprefix("no_") in keys
    option = None if is_key else tables.prefixed(plain.removeprefix("no_"))
    if option and value is None:
        return _prefixed_flag(option, shown, tokens, at, negated=plain.startswith("no_"))
    if not is_key and (flag := _bare_flag(plain, shown, value, tokens, at, tables)):
        return flag
    head, dot, last = plain.rpartition(".")
    key = keys.get(last) if not dot or head in SECTIONS else None
    if key is None and value is None and plain.startswith("no_"):
        following = at < len(tokens) and not _is_key(tokens[at])
        if plain[3:] in keys or not following:
            return Word(plain[3:], (), shown, negated=True), at
    if value is not None:
        return Word(".".join(option) if option and not plain.startswith("no_") else plain, (value,), shown), at
    annotation = key.info.annotation if key else None
    if key and unwrap(annotation) is bool:
        if at < len(tokens) and tokens[at].lower() in ("true", "false"):
            return Word(plain, (tokens[at],), shown), at + 1
        return Word(plain, (), shown), at
    if key and is_sequence(annotation) and plain != "plugins":
        end = at
        while end < len(tokens) and not _is_key(tokens[end]):
            end += 1
        if end > at:
            return Word(plain, tuple(tokens[at:end]), shown), end
    elif at < len(tokens) and not tokens[at].startswith("--"):
        return Word(plain, (tokens[at],), shown), at + 1
    if key:
        raise ConfigError(
            f"{shown} needs a value",
            code="CFG02",
            where=f"command line: {shown}",
            why=f"{key.path} takes {key.kind}",
            fix=f"{shown} VALUE",
        )
    return Word(plain, (), shown), at


def _prefixed_flag(
    option: tuple[str, ...], shown: str, tokens: Sequence[str], at: int, *, negated: bool
) -> tuple[Word, int]:
    """An option of an engine with what follows: nothing (true), a value, or several: only the first may be a path.

    Which options are flags is known to the engine alone, so a recipe stands before them.
    """
    end = at
    while not negated and end < len(tokens) and not _is_key(tokens[end]) and (end == at or "/" not in tokens[end]):
        end += 1
    return Word(".".join(option), tuple(tokens[at:end]), shown, negated=negated), end


def _bare_flag(
    plain: str, shown: str, value: str | None, tokens: Sequence[str], at: int, tables: BackendTables
) -> tuple[Word, int] | None:
    """An option of a trainer with the words that are its value; None for any other name, and after ``=``."""
    if value is not None:
        return None
    options = tables.bare
    if plain not in options:
        return (Word(plain[3:], (), shown, negated=True), at) if plain[3:] in options and plain[:3] == "no_" else None
    table, kind = options[plain]
    end = at
    if kind is bool:
        end += at < len(tokens) and tokens[at].lower() in ("true", "false")
        return Word(plain, tuple(tokens[at:end]), shown), end
    while end < len(tokens) and not _is_key(tokens[end]) and (end == at or kind is list):
        end += 1
    if end > at:
        return Word(plain, tuple(tokens[at:end]), shown), end
    raise ConfigError(
        f"{shown} needs a value",
        code="CFG02",
        where=f"command line: {shown}",
        why=f"{table}.{plain} takes {describe(kind) if kind is not list else 'values'}",
        fix=f"{shown} VALUE",
    )


def _is_key(token: str) -> bool:
    return token.startswith("--") or bool(_DOTTED.fullmatch(token)) or token.endswith(".toml")


def _name(text: str) -> str:
    head, dot, rest = text.partition(".")
    if dot and head not in SECTIONS and head != "stage":
        middle, dot2, tail = rest.rpartition(".")
        return f"{head}.{middle}{dot2}{tail.replace('-', '_')}"
    return text.replace("-", "_")


def resolve(words: CommandLine, models: Models) -> tuple[list[Override], list[Problem]]:
    """Every override with its full key and typed value, and what is wrong with the others."""
    keys, overrides, problems = core_keys(), [], []
    for word in words.overrides:
        place = f"command line: {word.shown}"
        location = _locate(word, keys, models, words.tables, place)
        if isinstance(location, Problem):
            problems.append(location)
            continue
        path, annotation = location
        value = _value(word, path, annotation, place)
        if isinstance(value, Problem):
            problems.append(value)
        elif path == ("plugins",) and word.shown == "--plugin":
            overrides.append(Override(("plugins", "+"), value[0] if isinstance(value, list) else value, place))
        else:
            overrides.append(Override(path, value, place))
    return overrides, problems


def _locate(
    word: Word, keys: Mapping[str, ConfigKey], models: Models, tables: BackendTables, place: str
) -> tuple[KeyPath, Any] | Problem:
    parts = word.name.split(".")
    if len(parts) == 1:
        return _bare(word, keys, models, tables, place)
    head, last = parts[0], parts[-1]
    if head in SECTIONS and len(parts) == 2:
        key = keys.get(last)
        return ((head, last), key.info.annotation if key and key.section == head else Any)
    if head == "plugin" and len(parts) >= 3:
        name = ".".join(parts[1:-1])
        model = models.get(name)
        info = model.model_fields.get(last) if model is not None else None
        return ("plugin", name, last), info.annotation if info else Any
    if head == "stage" and len(parts) == 3:
        return ("stage", parts[1], last), keys[last].info.annotation if last in keys else Any
    if head not in SECTIONS and tables.is_table(head):
        return (head, *parts[1:]), tables.kind(head, *parts[1:])
    near = nearest(head, [*SECTIONS, *tables.names(), "plugin", "stage"])
    return Problem(
        code="CFG01",
        what=f"unknown key '{word.name}'",
        where=place,
        fix="\n".join(filter(None, [near, "all keys: slime config keys"])),
    )


def _bare(
    word: Word, keys: Mapping[str, ConfigKey], models: Models, tables: BackendTables, place: str
) -> tuple[KeyPath, Any] | Problem:
    name = ALIASES.get(word.name, word.name) if not word.shown.startswith("-") else word.name
    if name in keys:
        key = keys[name]
        return ((key.section, name) if key.section else (name,)), key.info.annotation
    if option := tables.prefixed(name) if word.shown.startswith("--") else None:
        return option, tables.kind(*option)
    paths: list[tuple[KeyPath, Any]] = [
        (("plugin", plugin, name), model.model_fields[name].annotation)
        for plugin, model in models.items()
        if model is not None and name in model.model_fields
    ]
    bare = tables.bare
    if name in bare:
        table, kind = bare[name]
        paths.append(((table, name), Any if kind is list else kind))
    if len(paths) == 1:
        return paths[0]
    if paths:
        full = [dotted(path) for path, _ in paths]
        return Problem(
            code="CFG01",
            what=f"{word.shown} can mean {' or '.join(full)}",
            where=place,
            why="a bare name must be one key",
            fix="write the one that you mean: " + "   or   ".join(f"{key}={written(word)}" for key in full),
        )
    options = {
        key: f"plugin.{plugin}.{key}" for plugin, model in models.items() if model for key in model.model_fields
    }
    near = "" if absent(name) else nearest(name, [*keys, *options, *bare])
    nearest_name = near.split("'")[1] if near else ""
    full_name = (
        keys[nearest_name].path
        if nearest_name in keys
        else options.get(nearest_name) or f"{bare[nearest_name][0] if near else ''}.{nearest_name}"
    )
    flag = f"--{nearest_name.replace('_', '-')}"
    reason, fix = tables.misspelt(name)
    fix = f"did you mean {flag}? ({full_name})" if near else fix
    return Problem(
        code="CFG01",
        what=f"unknown key '{name}'",
        where=place,
        why=absent(name) or reason or "no core key, option of a named plugin or of a trainer has this name",
        fix="\n".join(filter(None, [fix, "all keys: slime config keys"])),
    )


def _value(word: Word, path: KeyPath, annotation: Any, place: str) -> Any:
    name = dotted(path)
    if not word.values:
        if unwrap(annotation) in (bool, Any):
            return not word.negated
        return Problem(
            code="CFG02",
            what=f"{word.shown} needs a value" if not word.negated else f"{word.shown}: {name} is not a yes-or-no key",
            where=place,
            why=f"{name} takes {describe(annotation)}",
            fix=f"--{path[-1]} VALUE".replace("_", "-"),
        )
    if is_sequence(annotation) and not is_model(element(annotation)) and len(word.values) > 1:
        return [typed(value, element(annotation)) for value in word.values]
    if len(word.values) > 1:
        return [typed(value, annotation) for value in word.values]
    return typed(word.values[0], annotation)


def written(word: Word) -> str:
    """The value of a word, as it was typed."""
    return " ".join(word.values) or str(not word.negated).lower()
