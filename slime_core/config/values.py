"""Types and values of keys: in words, and read from words of the command line."""

from __future__ import annotations

import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.dump import REDACTED, is_secret, scrub, value_to_toml
from slime_core.errors import ConfigError

_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")


def typed(text: str, annotation: Any) -> Any:
    """The value that ``text`` stands for under a type; text that does not fit comes back as it is.

    Arrays and tables are written as in TOML or JSON, an array of named tables also as ``NAME,NAME``. Where the type is
    open, text that is no TOML value is a string.
    """
    kind = unwrap(annotation)
    if kind is str or typing.get_origin(kind) is Literal:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind is int:
        return int(text) if _INTEGER.fullmatch(text) and len(text) < 400 else text
    if kind is float:
        return _number(text)
    if is_sequence(kind):
        value = _parsed(text)
        if isinstance(value, list):
            return value
        names = is_model(element(kind)) and not isinstance(value, dict)
        return text.split(",") if names else [typed(text, element(kind))]
    if typing.get_origin(kind) is dict or kind in (Any, list):
        return _parsed(text)
    return _parsed(text) if text[:1] in "[{" else text


def _number(text: str) -> Any:
    try:
        return float(text) if text.strip() == text and "_" not in text else text
    except ValueError:
        return text


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"] if "\n" not in text else text
    except (ValueError, KeyError, RecursionError):
        pass
    try:
        return json.loads(text) if text[:1] in "[{" else text
    except (ValueError, RecursionError):
        return text


def show(value: Any, key: str = "") -> str:
    """A value for a message: as TOML, on one line, cut at 80 characters, secrets redacted."""
    if is_secret(key, value):
        return REDACTED
    try:
        text = value_to_toml(value).replace("$${", "${")
    except ConfigError:
        text = str(value) if isinstance(value, float) else repr(value)
    text = scrub(text)
    return text if len(text) <= 80 else text[:77] + "..."


def kind_of(value: Any) -> str:
    """The type of a value in words."""
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in ((int, "an integer"), (float, "a number"), (str, "a string"), (dict, "a table")):
        if isinstance(value, kind):
            return name
    return "an array" if isinstance(value, (list, tuple)) else type(value).__name__


def hint(value: Any, annotation: Any) -> str:
    """How to write a value of the wrong type, where that is plain."""
    kind = unwrap(annotation)
    if isinstance(value, str) and kind in (int, float, bool):
        plain = typed(value, kind)
        if not isinstance(plain, str) and (not isinstance(plain, float) or math.isfinite(plain)):
            return f"write it without quotes: {show(plain)}"
    if isinstance(value, bool) and kind in (int, float):
        return f"write {int(value)} if that is meant"
    if isinstance(value, int) and kind is bool and value in (0, 1):
        return f"write {'true' if value else 'false'}"
    if is_sequence(annotation) and not isinstance(value, (list, tuple, dict)):
        return f"put it in brackets: [{show(value)}]"
    return f"give {describe(annotation)}"


def unwrap(annotation: Any) -> Any:
    """The type inside ``Annotated`` and ``X | None``."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return unwrap(typing.get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return unwrap(inner[0]) if len(inner) == 1 else annotation
    return annotation


def is_sequence(annotation: Any) -> bool:
    """Whether the key takes an array."""
    return typing.get_origin(unwrap(annotation)) in (tuple, list, set, frozenset)


def is_model(annotation: Any) -> bool:
    """Whether the key takes a table of a fixed shape."""
    kind = unwrap(annotation)
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def element(annotation: Any) -> Any:
    """The type of an array's elements."""
    args = typing.get_args(unwrap(annotation))
    return args[0] if args else Any


NAMES: Mapping[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "values",
}


def describe(annotation: Any) -> str:
    """A type in words."""
    kind = unwrap(annotation)
    if kind is bool and annotation is not bool:
        return "true, false or auto"
    if kind in NAMES:
        return NAMES[kind]
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(choices(kind))
    if origin in (tuple, list, set, frozenset):
        inner = element(kind)
        plural = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}.get(unwrap(inner))
        return f"an array of {plural or ('tables' if is_model(inner) else 'values')}"
    if origin is dict or is_model(kind):
        return "a table"
    return getattr(kind, "__name__", str(kind)).lower()


def choices(annotation: Any) -> list[str]:
    """The values of a key that takes one of a few."""
    kind = unwrap(annotation)
    return [str(value) for value in typing.get_args(kind)] if typing.get_origin(kind) is Literal else []


def bounds(info: FieldInfo) -> list[str]:
    """``>= 0`` and the like."""
    bounds = []
    for item in info.metadata:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if getattr(item, name, None) is not None:
                bounds.append(f"{sign} {getattr(item, name)}")
        if getattr(item, "pattern", None):
            bounds.append(f"matching {item.pattern}")
    return bounds
