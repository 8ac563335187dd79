"""A Config as TOML that loads to the same Config, as a redacted copy, or as a fingerprint."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


def to_toml(config: BaseModel) -> str:
    """The whole config, defaults included; loading the text gives an equal Config.

    Raises:
        ConfigError: CFG02 a plugin table holds a value that TOML has no form for.
    """
    return table_to_toml(config.model_dump())


def redacted(config: M, secrets: Collection[str] = ()) -> M:
    """The same config with everything that looks like a secret, and every one of ``secrets``, replaced."""
    return config.model_validate(redact(config.model_dump(), secrets))


def fingerprint(config: BaseModel) -> str:
    """16 hex digits over every key that can change what is trained (not ``name`` and ``[report]``)."""
    data = config.model_dump(mode="json", exclude={"name", "report"})
    text = json.dumps(data, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def table_to_toml(data: Mapping[str, Any]) -> str:
    """Nested tables as TOML: plain keys first, then tables, then arrays of tables."""
    lines: list[str] = []
    _table(data, (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(data: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    tables = {key: value for key, value in data.items() if isinstance(value, Mapping)}
    arrays = {key: value for key, value in data.items() if _is_table_array(value)}
    for key, value in data.items():
        if key not in tables and key not in arrays:
            lines.append(f"{_key(key)} = {value_to_toml(value, '.'.join((*path, str(key))))}")
    for key, value in tables.items():
        lines += ["", f"[{_path((*path, key))}]"]
        _table(value, (*path, key), lines)
    for key, items in arrays.items():
        for item in items:
            lines += ["", f"[[{_path((*path, key))}]]"]
            _table(item, (*path, key), lines)


def _is_table_array(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def value_to_toml(value: Any, where: str = "") -> str:
    """One value on one line; ``${`` in a string is written ``$${`` so that it stays text.

    Raises:
        ConfigError: CFG02 TOML has no form for it.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value.replace("${", "$${"))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(value_to_toml(item, where) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {value_to_toml(item, where)}" for key, item in value.items()) + "}"
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    raise ConfigError(
        f"{where or 'a value'} cannot be written as TOML: {value!r}",
        code="CFG02",
        where=where,
        fix="use strings, numbers, booleans, arrays and tables",
    )


def _string(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(char, _control(char)) for char in text) + '"'


def _control(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F else char


def _key(name: object) -> str:
    text = str(name)
    return text if _BARE.fullmatch(text) else _string(text)


def _path(names: tuple[str, ...]) -> str:
    return ".".join(_key(name) for name in names)


REDACTED = "[redacted]"

_NAMES = re.compile(
    r"(^|[_-])(api[_-]?key|secret([_-]?key)?|password|passwd|(access|auth|api|hf|bearer|refresh)[_-]?token|credentials?|"
    r"private[_-]?key)$|^token$",
    re.IGNORECASE,
)
_VALUES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}"
    r"|\bglpat-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}|\bwandb_v1_[A-Za-z0-9_]{20,}"
    r"|\bAIza[0-9A-Za-z_-]{35}|-----BEGIN [A-Z ]*PRIVATE KEY-----|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def is_secret(key: str, value: object) -> bool:
    """Whether ``value`` under ``key`` looks like a password, an access key or a token."""
    if not isinstance(value, str) or not value or value == REDACTED:
        return False
    return bool(_NAMES.search(key) or _VALUES.search(value))


def texts_in(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """``(dotted key, text)`` of every string in nested tables."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from texts_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            yield from texts_in(value, f"{path}[{index}]")
    elif isinstance(data, str):
        yield path, data


def secrets_in(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """``(dotted key, value)`` of everything in nested tables that looks like a secret."""
    for key, text in texts_in(data, path):
        if is_secret(re.sub(r"\[\d+\]$", "", key.rpartition(".")[2]), text):
            yield key, text


def redact(data: Any, secrets: Collection[str] = (), key: str = "") -> Any:
    """A copy of nested tables with every secret replaced, and every occurrence of ``secrets``."""
    if isinstance(data, Mapping):
        return {name: redact(value, secrets, str(name)) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(redact(value, secrets, key) for value in data)
    if not isinstance(data, str):
        return data
    return REDACTED if data and _NAMES.search(key) else scrub(data, secrets)


def scrub(text: str, secrets: Collection[str] = ()) -> str:
    """Text without anything that looks like a secret, and without ``secrets``."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, REDACTED)
    return _VALUES.sub(REDACTED, text)
