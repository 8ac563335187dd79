"""Validation of tables: pydantic's findings in the words and codes of our errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slime_core.config.fields import core_keys
from slime_core.config.problems import KeyPath, Origins, Problem, dotted, raise_all
from slime_core.config.schema import Config
from slime_core.config.values import (
    bounds,
    choices,
    describe,
    element,
    hint,
    is_model,
    kind_of,
    show,
    unwrap,
)
from slime_core.errors import closest, nearest

M = TypeVar("M", bound=BaseModel)
ModelsOf = Callable[[Sequence[str]], Mapping[str, "type[BaseModel] | None"]]
"""Options models of plugins by name; None where a plugin has no options."""

ABSENT = {
    "peft": "adapters are trained where train.lora_rank is above 0",
    "vllm": "vLLM is not supported: rollout.rollout_engine is local or sglang",
    "deepspeed": "DeepSpeed is not supported: train.train_backend is fsdp or megatron",
    **dict.fromkeys(
        ("mlflow", "prometheus", "tensorboard", "trackio", "wandb"),
        "trackers are keys of [plugin.trackers], such as --use-wandb; slime-trackers brings them",
    ),
}
"""What others have and the core has not, by a word of a key's name."""

_RANGE = (
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "multiple_of",
    "literal_error",
    "enum",
    "string_pattern_mismatch",
    "string_too_short",
    "string_too_long",
    "too_short",
    "too_long",
)


def check_model(model: type[M], data: Mapping[str, Any]) -> M | list[Problem]:
    """``data`` as ``model``, or every problem it has."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        return problems_of(error, model, data)


def problems_of(
    error: ValidationError, model: type[BaseModel], data: Mapping[str, Any], prefix: KeyPath = ()
) -> list[Problem]:
    """A validation error's findings; ``prefix`` stands before every key."""
    return [_problem(detail, model, data, prefix) for detail in error.errors(include_url=False)]


def _problem(detail: ErrorDetails, model: type[BaseModel], data: Mapping[str, Any], prefix: KeyPath) -> Problem:
    path = _within(data, detail["loc"])
    kind, value = detail["type"], detail["input"]
    annotation, info = _field_at(model, path)
    full = (*prefix, *path)
    if kind == "extra_forbidden":
        return unknown(full, _siblings(model, path))
    if kind == "missing":
        expected = f": {describe(info.annotation)}" if info else ""
        return Problem(
            code="CFG02", what=f"{dotted(full)} is missing", keys=(full,), fix=f"set {dotted(full)}{expected}"
        )
    name = dotted(full)
    if kind in ("value_error", "assertion_error"):
        return _refused(name, full, detail)
    shown = show(value, str(path[-1]) if path else "")
    if kind == "finite_number":
        return Problem(
            code="CFG15",
            what=f"{name} = {shown} is not a finite number",
            keys=(full,),
            fix=f"give {name} a finite number",
        )
    expected = " ".join([describe(annotation), *(bounds(info) if info else [])]) if annotation else detail["msg"]
    if kind in _RANGE and not (kind == "literal_error" and not isinstance(value, str)):
        near = nearest(value, choices(annotation)) if isinstance(value, str) else ""
        fix = near or f"set {name} to {expected}"
        return Problem(
            code="CFG03", what=f"{name} = {shown} is out of range", keys=(full,), why=f"it must be {expected}", fix=fix
        )
    reason = f"it is {kind_of(value)}, and {name} takes {expected}" if annotation else detail["msg"]
    fix = hint(value, annotation) if annotation else f"fix {name}"
    return Problem(code="CFG02", what=f"{name} = {shown} has the wrong type", keys=(full,), why=reason, fix=fix)


def _refused(name: str, full: KeyPath, detail: ErrorDetails) -> Problem:
    """What a validator of the model's own says, such as that keys contradict each other."""
    message = str(detail.get("ctx", {}).get("error", detail["msg"]))
    problem, _, reason = message.partition("; ")
    return Problem(
        code="CFG04", what=f"{name}: {problem}", keys=(full,), why=reason, fix=f"change what it names in [{name}]"
    )


def unknown(path: KeyPath, siblings: Sequence[str]) -> Problem:
    """An unknown key, with the nearest known one or the section where the name lives."""
    name = str(path[-1])
    keys = core_keys()
    at_home = keys.get(name)
    if at_home is not None and path[0] != "plugin" and (len(path) == 1 or path[0] in Config.model_fields):
        fix = (
            f"it is {at_home.path}: put it under [{at_home.section}]" if at_home.section else f"put {name} at the top"
        )
        return Problem(
            code="CFG01",
            what=f"unknown key '{dotted(path)}'",
            keys=(path,),
            why="it is in the wrong table",
            fix=fix,
        )
    parent = dotted(path[:-1])
    near, core = ("", "") if absent(name) else (closest(name, list(siblings)), closest(name, list(keys)))
    meant = dotted((*path[:-1], near)) if near else keys[core].path if core else ""
    section = str(path[0]) if len(path) > 1 else ""
    every = f"all keys: slime config keys {section}".rstrip()
    if section == "plugin":
        every = f"keys of this plugin: {', '.join(siblings) or 'none'}"
    return Problem(
        code="CFG01",
        what=f"unknown key '{dotted(path)}'",
        keys=(path,),
        why=absent(name) or (f"[{parent}] has no such key" if parent else "there is no such key or table"),
        fix="\n".join(filter(None, [f"did you mean '{meant}'?" if meant else "", every])),
    )


def _within(data: Any, loc: tuple[int | str, ...]) -> KeyPath:
    """The part of pydantic's location that is keys and indices of the data, without its names of union members."""
    path: list[int | str] = []
    for part in loc:
        if isinstance(data, Mapping) and (part in data or not path or len(path) + 1 == len(loc)):
            path.append(part)
            data = data.get(part)  # type: ignore[arg-type]
        elif isinstance(data, (list, tuple)) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
    return tuple(path)


def _field_at(model: type[BaseModel], path: KeyPath) -> tuple[Any, FieldInfo | None]:
    """The type that a path leads to and its field: nothing below open tables, no field for elements of arrays."""
    current: Any = model
    info: FieldInfo | None = None
    for part in path:
        if isinstance(part, int):
            current, info = element(current), None
        elif is_model(current) and part in unwrap(current).model_fields:
            info = unwrap(current).model_fields[part]
            current = info.annotation
        else:
            return None, None
    return current, info


def _siblings(model: type[BaseModel], path: KeyPath) -> list[str]:
    parent, _ = _field_at(model, path[:-1])
    return list(unwrap(parent).model_fields) if is_model(parent) else []


def validate_options(
    name: str, model: type[BaseModel] | None, table: Mapping[str, Any], origins: Origins | None = None
) -> BaseModel | None:
    """``[plugin.NAME]`` as the plugin's model, with the same errors as core keys.

    Raises:
        ConfigError: CFG01 unknown key, 02 wrong type, 03 out of range, 15 not finite; every problem at once.
    """
    options = check_table(("plugin", name), model, table)
    if isinstance(options, list):
        origins = origins or Origins()
        raise_all([origins.place(problem) for problem in options])
        return None
    return options


def check_table(
    prefix: KeyPath, model: type[BaseModel] | None, table: Mapping[str, Any]
) -> BaseModel | list[Problem] | None:
    """The table at ``prefix`` as ``model``, None where there is no model, or every problem of the table."""
    names = list(model.model_fields) if model is not None else []
    open_table = model is not None and model.model_config.get("extra") == "allow"
    problems = [unknown((*prefix, key), names) for key in table if key not in names and not open_table]
    problems += list(not_finite(dict(table), prefix))
    if model is None or any(problem.code == "CFG15" for problem in problems):
        return problems or None
    values = {key: value for key, value in table.items() if key in names or open_table}
    try:
        filled = model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        return [*problems, *problems_of(error, model, values, prefix)]
    return problems or filled


def plain_options(options: BaseModel | None) -> dict[str, Any]:
    """A filled model as a TOML table; keys without a value are left out."""
    return options.model_dump(mode="json", exclude_none=True) if options is not None else {}


def not_finite(data: Any, path: KeyPath = ()) -> Iterator[Problem]:
    """A problem for every ``nan``, ``inf`` or number too large for 64 bits of float."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from not_finite(value, (*path, key))
    elif isinstance(data, (list, tuple)):
        for index, value in enumerate(data):
            yield from not_finite(value, (*path, index))
    elif isinstance(data, float) and not math.isfinite(data):
        yield Problem(
            code="CFG15",
            what=f"{dotted(path)} = {data} is not a finite number",
            keys=(path,),
            why="nan, inf and numbers beyond 1.8e308 are refused",
            fix=f"give {dotted(path)} a finite number",
        )


def absent(name: str) -> str:
    """That slime does not have what a key is named after; empty for other names."""
    words = name.lower().split("_")
    return next((text for word, text in ABSENT.items() if word in words), "")
