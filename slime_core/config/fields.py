"""The schema, seen as a flat table: section, type, bounds, default and text of each key."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.schema import SECTIONS, Config

TOP_KEYS = ("schema_version", "name", "seed", "plugins")


@dataclass(slots=True, frozen=True)
class ConfigKey:
    """One core key.

    Example:
        core_keys()["lr"].path == "train.lr"
    """

    name: str
    section: str  # empty at the top
    info: FieldInfo

    @property
    def path(self) -> str:
        """Section and name, dotted."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def kind(self) -> str:
        """Its type and bounds in words."""
        return " ".join([describe(self.info.annotation), *bounds(self.info)])


def core_keys() -> dict[str, ConfigKey]:
    """Every core key by its name, which is unique over all sections."""
    keys = {name: ConfigKey(name, "", Config.model_fields[name]) for name in TOP_KEYS}
    for section in SECTIONS:
        model = section_model(section)
        keys |= {name: ConfigKey(name, section, info) for name, info in model.model_fields.items()}
    return keys


def section_model(section: str) -> type[BaseModel]:
    """The pydantic model of a core section."""
    model: type[BaseModel] = unwrap(Config.model_fields[section].annotation)
    return model


def sections_of_keys() -> dict[str, str]:
    """Key name to section, for the keys that have one."""
    return {name: key.section for name, key in core_keys().items() if key.section}


def changed(section: BaseModel, names: Iterable[str]) -> list[str]:
    """Those of a section's keys that differ from their defaults."""
    fields = type(section).model_fields
    return [name for name in names if getattr(section, name) != fields[name].default]


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
}


def describe(annotation: Any) -> str:
    """A type in words."""
    kind = unwrap(annotation)
    if kind in NAMES:
        return NAMES[kind]
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(arg) for arg in typing.get_args(kind))
    if origin in (tuple, list, set, frozenset):
        inner = element(kind)
        plural = {int: "integers", float: "numbers", str: "strings", bool: "booleans"}.get(unwrap(inner))
        return f"an array of {plural or ('tables' if is_model(inner) else 'values')}"
    if origin is dict or is_model(kind):
        return "a table"
    return getattr(kind, "__name__", str(kind)).lower()


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
