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
from slime_core.config.fields import core_keys
from slime_core.config.problems import KeyPath, Problem, dotted
from slime_core.config.schema import SECTIONS
from slime_core.config.validate import absent
from slime_core.config.values import describe, element, is_model, is_sequence, typed, unwrap
from slime_core.errors import ConfigError, closest, nearest

OPTION = object()
"""The type of an option of an engine, which only the engine knows."""
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

    @property
    def text(self) -> str:
        """The value as it was typed."""
        return " ".join(self.values) or str(not self.negated).lower()

    @property
    def place(self) -> str:
        """Its place, for messages."""
        return f"command line: {self.shown}"


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
            if name != "plugins" and earlier.text != word.text:
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
        ConfigError: CFG01 a second recipe.
    """
    words, rest = CommandLine(tables=tables or BackendTables()), list(tokens)
    while rest:
        token = rest.pop(0)
        if token.startswith("--") and len(token) > 2:
            words.overrides.append(_flag(token, rest, words.tables))
        elif match := _DOTTED.fullmatch(token):
            words.overrides.append(Word(_name(match[1]), (match[2],), match[1]))
        elif words.recipe is None and not token.startswith("-"):
            words.recipe = token
        else:
            raise unexpected(token, f"the recipe is {words.recipe}" if words.recipe else "flags start with two dashes")
    return words


def unexpected(token: str, why: str = "") -> ConfigError:
    """An error for an argument that is no flag, key or recipe."""
    fix = "write keys as --key VALUE or section.key=VALUE"
    return ConfigError(
        f"unexpected argument '{token}'", code="CFG01", where=f"command line: {token}", why=why, fix=fix
    )


def _flag(token: str, rest: list[str], tables: BackendTables) -> Word:
    """The flag ``token`` with the words that are its value, which are taken from ``rest``."""
    flag, equals, value = token[2:].partition("=")
    shown, keys, name = f"--{flag}", core_keys(), ALIASES.get(_name(flag), _name(flag))
    head, _, last = name.rpartition(".")
    key = keys.get(last) if head in ("", *SECTIONS) else None
    plain = name.removeprefix("no_")
    foreign = key is None and "." not in name and plain not in keys
    option = tables.prefixed(plain) if foreign else None
    bare = tables.bare if foreign and option is None and not equals else {}
    if option:
        plain, name = ".".join(option), ".".join(option) if plain == name else name
    if equals:
        return Word(name, (value,), shown)
    negated = key is None and name.startswith("no_") and name not in bare
    if negated and (option or plain in keys or plain in bare or not rest or _is_key(rest[0])):
        return Word(plain, (), shown, negated=True)
    if key is not None:
        return Word(name, _values(str if name == "plugins" else key.info.annotation, rest), shown)
    return Word(name, _values(OPTION if option else bare.get(name, ("", Any))[1], rest), shown)


def _values(kind: Any, rest: list[str]) -> tuple[str, ...]:
    """Take the words of a value of a type from the head of ``rest``.

    Which options of an engine are flags is known to it alone: theirs may be nothing (true), a value, or several, of
    which only the first may be a path; so a recipe stands before them.
    """
    end = 0
    if unwrap(kind) is bool:
        words = ("true", "false") if kind is bool else ("true", "false", "auto")
        end = int(rest[:1] != [] and rest[0].lower() in words)
    elif kind in (OPTION, list) or is_sequence(kind):
        while end < len(rest) and not _is_key(rest[end]) and (kind is not OPTION or end == 0 or "/" not in rest[end]):
            end += 1
    elif rest and not rest[0].startswith("--"):
        end = 1
    values, rest[:end] = tuple(rest[:end]), []
    return values


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
    overrides, problems = [], []
    for word in words.overrides:
        location = _locate(word, models, words.tables)
        if isinstance(location, Problem):
            problems.append(location)
            continue
        path, annotation = location
        value = _value(word, path, annotation)
        if isinstance(value, Problem):
            problems.append(value)
        elif path == ("plugins",) and word.shown == "--plugin":
            overrides.append(Override(("plugins", "+"), value[0] if isinstance(value, list) else value, word.place))
        else:
            overrides.append(Override(path, value, word.place))
    return overrides, problems


def _locate(word: Word, models: Models, tables: BackendTables) -> tuple[KeyPath, Any] | Problem:
    parts, keys = word.name.split("."), core_keys()
    if len(parts) == 1:
        return _bare(word, models, tables)
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
    return _unknown(word, "", nearest(head, [*SECTIONS, *tables.names(), "plugin", "stage"]))


def _unknown(word: Word, why: str, fix: str) -> Problem:
    fix = "\n".join(filter(None, [fix, "all keys: slime config keys"]))
    return Problem(code="CFG01", what=f"unknown key '{word.name}'", where=word.place, why=why, fix=fix)


def _bare(word: Word, models: Models, tables: BackendTables) -> tuple[KeyPath, Any] | Problem:
    keys = core_keys()
    name = ALIASES.get(word.name, word.name) if not word.shown.startswith("-") else word.name
    if name in keys:
        return tuple(keys[name].path.split(".")), keys[name].info.annotation
    if option := tables.prefixed(name) if word.shown.startswith("--") else None:
        return option, tables.kind(*option)
    places: dict[str, dict[KeyPath, Any]] = {}
    for plugin, model in models.items():
        for option_name, info in model.model_fields.items() if model else ():
            places.setdefault(option_name, {})["plugin", plugin, option_name] = info.annotation
    for option_name, (table, kind) in tables.bare.items():
        places.setdefault(option_name, {})[(*table.split("."), option_name)] = kind
    paths = places.get(name, {})
    if len(paths) == 1:
        return next(iter(paths.items()))
    if paths:
        full = [dotted(path) for path in paths]
        return Problem(
            code="CFG01",
            what=f"{word.shown} can mean {' or '.join(full)}",
            where=word.place,
            why="a bare name must be one key",
            fix="write the one that you mean: " + "   or   ".join(f"{key}={word.text}" for key in full),
        )
    reason, fix = tables.misspelt(name)
    if near := "" if absent(name) else closest(name, [*keys, *places]):
        path = keys[near].path if near in keys else dotted([*places[near]][-1])
        fix = f"did you mean --{near.replace('_', '-')}? ({path})"
    reason = absent(name) or reason or "no core key, option of a named plugin or of a trainer has this name"
    return _unknown(word, reason, fix)


def _value(word: Word, path: KeyPath, annotation: Any) -> Any:
    name = dotted(path)
    if not word.values:
        if unwrap(annotation) in (bool, Any):
            return not word.negated
        return Problem(
            code="CFG02",
            what=f"{word.shown} needs a value" if not word.negated else f"{word.shown}: {name} is not a yes-or-no key",
            where=word.place,
            why=f"{name} takes {describe(annotation)}",
            fix=f"--{path[-1]} VALUE".replace("_", "-"),
        )
    if len(word.values) == 1:
        return typed(word.values[0], annotation)
    if is_sequence(annotation) and is_model(element(annotation)):
        return [table for value in word.values for table in typed(value, annotation)]
    return [typed(value, element(annotation) if is_sequence(annotation) else annotation) for value in word.values]
