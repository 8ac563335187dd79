"""Strict parsing of one JSON line; an error knows file, line, column and byte.

Stricter than the standard library: NaN, Infinity and numbers beyond float64 are refused, as are duplicate keys, NUL
bytes and anything nested deeper than :data:`MAX_DEPTH`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from shlex import quote
from typing import Any

from slime_core.errors import DataError

MAX_DEPTH = 100
MAX_DIGITS = 4000
HINT = "correct the line, or skip unreadable rows with data.max_bad_rows"


def converted(command: str, file: str | Path, mark: str) -> str:
    """A shell command that writes its result next to ``file``, never over it.

    Example: converted("gunzip -c <", "a.jsonl", "unpacked") begins with "gunzip -c < a.jsonl > a.unpacked.jsonl"
    """
    source = Path(file)
    target = source.with_name(f"{source.stem}.{mark}.jsonl")
    return f"{command} {quote(str(source))} > {quote(str(target))}   then name {target.name} in its place"


class _Refused(ValueError):
    """What is no JSON; ``place`` are the keys and numbers that lead to it, innermost first."""

    def __init__(self, code: str, what: str, why: str = "", fix: str = HINT) -> None:
        super().__init__(what)
        self.code, self.why, self.fix = code, why, fix
        self.place: list[str] = []


def parse_line(raw: bytes, *, file: str, line: int, offset: int) -> dict[str, Any]:
    """The object of a line that begins at byte ``offset`` of ``file``; ``line`` counts from 1.

    Raises:
        DataError: DAT19 no JSON, DAT20 no UTF-8, DAT24 no object, DAT31 NaN or a key twice, DAT32 nested too deeply,
            DAT35 a number of too many digits.
    """
    where = f"{file}:{line}"
    text = _decode(raw, file, where, offset)
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_int)
    except json.JSONDecodeError as error:
        raise DataError(
            f"line {line} is not JSON: {error.msg}", code="DAT19", where=f"{where}:{error.colno}", fix=HINT
        ) from error
    except _Refused as error:
        raise DataError(str(error), code=error.code, where=where, fix=error.fix) from error
    except RecursionError as error:
        raise too_deep(where) from error
    if not isinstance(value, dict):
        raise DataError(
            f"line {line} is a JSON {_json_name(value)}, not an object", code="DAT24", where=where, fix=HINT
        )
    check_value(value, where)
    return value


def check_value(value: Any, where: str) -> None:
    """Refuse what JSON cannot say, whatever reader it came through; the error names the value's place in the row.

    Raises:
        DataError: DAT24 a type that JSON lacks, DAT31 a number that is not finite, DAT32 nested too deeply.
    """
    try:
        _look(value, 0)
    except _Refused as error:
        place = "".join(reversed(error.place)).removeprefix(".")
        raise DataError(
            str(error), code=error.code, where=f"{where}: {place}" if place else where, why=error.why, fix=error.fix
        ) from None
    except RecursionError as error:
        raise too_deep(where) from error


def _look(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise _Refused("DAT24", f"a key is a {type(key).__name__}, not a string", fix="")
            try:
                _look(item, depth + 1)
            except _Refused as error:
                error.place.append(f".{key}" if isinstance(value, dict) else f"[{key}]")
                raise
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise _Refused("DAT31", f"a value is {value}", "NaN, Infinity and numbers beyond float64 are not JSON")
    elif value is not None and not isinstance(value, (str, int)):
        fix = "keep strings, numbers, booleans, lists and objects in the columns that are read"
        raise _Refused("DAT24", f"a value is a {type(value).__name__}, which JSON has no word for", fix=fix)


def too_deep(where: str) -> DataError:
    """DAT32."""
    return DataError(
        f"a value is nested deeper than {MAX_DEPTH} levels",
        code="DAT32",
        where=where,
        fix="flatten it, or skip unreadable rows with data.max_bad_rows",
    )


def _decode(raw: bytes, file: str, where: str, offset: int) -> str:
    nul = raw.find(b"\0")
    if nul >= 0:
        wide = raw.count(b"\0") * 4 > len(raw)  # ASCII in UTF-16 is zeros every other byte
        order = "LE" if (offset + nul) % 2 else "BE"
        raise DataError(
            f"there is a NUL byte at byte {offset + nul}",
            code="DAT20",
            where=f"{where}, byte {offset + nul}",
            why="the file is UTF-16" if wide else "the line is not text",
            fix=converted(f"iconv -f UTF-16{order} -t UTF-8", file, "utf8") if wide else HINT,
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        place = offset + error.start
        raise DataError(
            f"byte {place} (0x{raw[error.start]:02x}) is not UTF-8",
            code="DAT20",
            where=f"{where}, byte {place}",
            why=error.reason,
            fix=converted("iconv -f LATIN1 -t UTF-8", file, "utf8"),
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names: set[str] = set()
        twice = next(key for key, _ in pairs if key in names or names.add(key))  # type: ignore[func-returns-value]
        raise _Refused("DAT31", f"the key {twice!r} occurs twice in an object")
    return fields


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise _Refused("DAT35", f"a number has {len(text)} digits, more than {MAX_DIGITS}: write it as a string")
    return int(text)


def _json_name(value: Any) -> str:
    names: dict[type, str] = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
