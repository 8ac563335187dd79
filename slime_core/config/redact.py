"""Secrets: found by the name of a key or by the look of a value, and kept out of every sink and message."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

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


def redact(data: Any, known: Collection[str] = (), key: str = "") -> Any:
    """A copy of nested tables with every secret replaced, and every occurrence of the ``known`` ones."""
    if isinstance(data, Mapping):
        return {name: redact(value, known, str(name)) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(redact(value, known, key) for value in data)
    if not isinstance(data, str):
        return data
    return REDACTED if data and _NAMES.search(key) else scrub(data, known)


def scrub(text: str, known: Collection[str] = ()) -> str:
    """Text without anything that looks like a secret, and without the ``known`` ones."""
    for secret in known:
        if secret:
            text = text.replace(secret, REDACTED)
    return _VALUES.sub(REDACTED, text)
