"""Tables of a recipe file, with the line of every key. What is wrong with the text itself ends here.

Byte order marks and CRLF are accepted. ``${NAME}`` in a string is the environment's NAME; ``$${NAME}`` stays text.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.config.dump import REDACTED, is_secret, scrub
from slime_core.config.positions import key_lines
from slime_core.config.problems import KeyPath, Origins, Problem, dotted, raise_all
from slime_core.config.schema import SCHEMA_VERSION
from slime_core.errors import UPDATE, ConfigError

MAX_BYTES = 1 << 20
"""A recipe is text that a person writes; anything longer is not one."""
MAX_PARTS = 64  # of a dotted key: parsing takes their square, and no key of ours has more than a few

_PART = r"""(?>[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = re.compile(rf"(?<![\w\"'-])(?:{_PART}[ \t]*\.[ \t]*)++{_PART}[ \t]*(?P<key>[=\]])?")
_ENV = re.compile(r"(\$\$\{)|\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")
_END = re.compile(r"\(at end of document\)")
_DUPLICATE = re.compile(r"[Cc]annot (overwrite|declare|mutate|redefine)|[Dd]uplicate|twice")


@dataclass(slots=True, kw_only=True)
class Recipe:
    """The tables of one file."""

    data: dict[str, Any]
    path: Path | None = None
    origins: Origins = field(default_factory=Origins)
    secrets: frozenset[str] = frozenset()  # values that came from the environment under a secret's name
    written: Mapping[str, Any] = field(default_factory=dict)  # as in the file, references not replaced


def read_recipe(path: Path) -> Recipe:
    """Read, check and position one TOML recipe.

    Raises:
        ConfigError: CFG05 no such file, 06 not TOML, 07 a key twice, 08 too large, 09 an unset variable, 11 another
            schema version.
    """
    shown = _short(path)
    text = _text(path, shown)
    written = _parse(text, shown)
    try:
        lines = key_lines(text)
    except (ValueError, IndexError, RecursionError):
        lines = {}
    origins = Origins({key: f"{shown}:{line}" for key, line in lines.items()} or {(): shown})
    check_version(written, origins)
    _move_trackers(written)
    if (path.parent / "run.json").is_file():
        written = without_slots_of_stages(written)
    data, problems, secrets = resolve_env(written, origins)
    raise_all(problems)
    return Recipe(data=data, path=path.absolute(), origins=origins, secrets=secrets, written=written)


def _move_trackers(data: dict[str, Any]) -> None:
    """Move keys of Weights & Biases from `report`, where earlier versions had them, to the table of slime-trackers."""
    report = data.get("report")
    if isinstance(report, dict):
        keys = {name: report.pop(name) for name in ("use_wandb", "wandb_project", "wandb_group") if name in report}
        if keys.get("use_wandb"):
            data.setdefault("plugin", {}).setdefault("trackers", {}).update(keys)


def without_slots_of_stages(data: Mapping[str, Any]) -> dict[str, Any]:
    """Tables without ``rollout_slots`` of stages, which runs of earlier versions saved and did not read."""
    tables, key = data.get("stage"), "rollout_slots"
    if not isinstance(tables, list | tuple):
        return dict(data)
    stages = [{name: value for name, value in table.items() if name != key} for table in tables]
    for stage in stages:
        if isinstance(stage.get("rollout"), dict):
            stage["rollout"] = {name: value for name, value in stage["rollout"].items() if name != key}
    return {**data, "stage": stages}


def check_version(data: Mapping[str, Any], origins: Origins) -> None:
    """Refuse a recipe of another schema version, before anything else of it is judged.

    Raises:
        ConfigError: CFG11.
    """
    version = data.get("schema_version", SCHEMA_VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or version == SCHEMA_VERSION:
        return  # a wrong type is reported with all other types
    newer = version > SCHEMA_VERSION
    raise ConfigError(
        f"the recipe has schema version {version}; this slime reads version {SCHEMA_VERSION}",
        code="CFG11",
        where=origins.of(("schema_version",)),
        why="a newer slime wrote it" if newer else f"version {version} was never released",
        fix=UPDATE
        if newer
        else f"compare its keys with `slime config keys`, set schema_version = {SCHEMA_VERSION}, "
        "then run `slime config check RECIPE`",
    )


def resolve_env(data: Mapping[str, Any], origins: Origins) -> tuple[dict[str, Any], list[Problem], frozenset[str]]:
    """Tables with ``${NAME}`` replaced, a problem for each unset NAME, and the values that are secrets by name."""
    problems: list[Problem] = []
    secrets: set[str] = set()

    def replaced(text: str, path: KeyPath) -> str:
        def one(match: re.Match[str]) -> str:
            escaped, name = match[1], match[2]
            if escaped:
                return "${"
            if _NAME.fullmatch(name) is None:
                problems.append(_bad_name(name, path))
                return ""
            if name not in os.environ:
                problems.append(_unset(name, path))
                return ""
            if _SECRET_NAME.search(name) and os.environ[name]:
                secrets.add(os.environ[name])
            return os.environ[name]

        return _ENV.sub(one, text)

    def walk(value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, (*path, index)) for index, item in enumerate(value)]
        return replaced(value, path) if isinstance(value, str) else value

    return walk(dict(data), ()), [origins.place(p) for p in problems], frozenset(secrets)


def _text(path: Path, shown: str) -> str:
    if not path.is_file():
        raise ConfigError(
            f"{'the recipe is a folder' if path.is_dir() else 'there is no recipe'}: {path}",
            code="CFG05",
            where=str(path.absolute()),
            why=f"the current folder is {Path.cwd()}",
            fix="give the path of a TOML file, or name a plugin to run its default recipe: slime run --plugin NAME",
        )
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the recipe cannot be read: {error.strerror}", code="CFG05", where=str(path.absolute())
        ) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"the recipe has more than {MAX_BYTES:,} bytes",
            code="CFG08",
            where=shown,
            why="a recipe holds keys, not data",
            fix="put rows into a file and name it: data.prompt_data",
        )
    return _decode(raw, shown)


def _decode(raw: bytes, shown: str) -> str:
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise ConfigError(
            "the recipe is UTF-16", code="CFG06", where=shown, why="TOML is UTF-8", fix="save it as UTF-8"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"the recipe is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            code="CFG06",
            where=f"{shown}:{line}",
            fix="save it as UTF-8",
        ) from None


def _parse(text: str, shown: str) -> dict[str, Any]:
    dotted_keys = (match for match in _DOTTED.finditer(text) if match["key"])
    if deep := next((match for match in dotted_keys if match[0].count(".") >= MAX_PARTS), None):
        line = text.count("\n", 0, deep.start()) + 1
        raise ConfigError(f"a key has more than {MAX_PARTS} parts", code="CFG08", where=f"{shown}:{line}")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError("the recipe is nested too deeply", code="CFG08", where=shown) from None
    except ValueError as error:
        message = str(error)
        match = _PLACE.search(message)
        lines = text.splitlines() or [""]
        line, column = (int(match[1]), int(match[2])) if match else (len(lines), len(lines[-1]) + 1)
        error_text = _END.sub("", _PLACE.sub("", message)).strip()
        duplicate = bool(_DUPLICATE.search(error_text))
        source = _source(lines[min(line, len(lines)) - 1].strip())
        raise ConfigError(
            f"a key or table is given twice: {error_text}"
            if duplicate
            else f"the recipe is not valid TOML: {error_text}",
            code="CFG07" if duplicate else "CFG06",
            where=f"{shown}:{line}:{column}",
            why=f"the line reads: {source}" if source else "the file ends there",
            fix="keep one of them" if duplicate else 'strings need quotes, tables a header: [train], key = "text"',
        ) from None


def _source(line: str) -> str:
    key, equals, _ = line.partition("=")
    if equals and is_secret(key.strip().strip("\"'"), "any"):
        return f"{key}= {REDACTED}"
    return scrub(line)[:80]


def _unset(name: str, path: KeyPath) -> Problem:
    return Problem(
        code="CFG09",
        what=f"the environment variable {name} is not set",
        keys=(path,),
        why=f"{dotted(path)} refers to it",
        fix=f"export {name}=...   (for the text itself write $${{{name}}})",
    )


def _bad_name(name: str, path: KeyPath) -> Problem:
    return Problem(
        code="CFG09",
        what=f"'${{{name}}}' is not a reference to an environment variable",
        keys=(path,),
        fix=f"write ${{NAME}} with letters, digits and _; for the text itself write $${{{name}}}",
    )


def _short(path: Path) -> str:
    absolute, cwd = path.absolute(), Path.cwd()
    return str(absolute.relative_to(cwd)) if absolute.is_relative_to(cwd) else str(path)
