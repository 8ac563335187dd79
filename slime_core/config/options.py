"""A plugin's own table, `[plugin.NAME]`: its pydantic model and the table in, the filled model or our errors out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from slime_core.config.problems import KeyPath, Origins, Problem, raise_all
from slime_core.config.recipe import not_finite
from slime_core.config.validate import problems_of, unknown

ModelsOf = Callable[[Sequence[str]], Mapping[str, "type[BaseModel] | None"]]
"""Plugin names in, the options model of each out; None where a plugin has no options."""


def validate_options(
    name: str, model: type[BaseModel] | None, table: Mapping[str, Any], origins: Origins | None = None
) -> BaseModel | None:
    """``[plugin.NAME]`` as the plugin's model, with the same errors as core keys.

    Raises:
        ConfigError: CFG01 unknown key, 02 wrong type, 03 out of range, 15 not finite; every problem at once.
    """
    found = check_options(name, model, table)
    if isinstance(found, list):
        origins = origins or Origins()
        raise_all([origins.place(problem) for problem in found])
        return None
    return found


def check_options(
    name: str, model: type[BaseModel] | None, table: Mapping[str, Any]
) -> BaseModel | list[Problem] | None:
    """The filled model, None where the plugin has no options, or every problem of the table."""
    return check_table(("plugin", name), model, table)


def check_table(
    prefix: KeyPath, model: type[BaseModel] | None, table: Mapping[str, Any]
) -> BaseModel | list[Problem] | None:
    """:func:`check_options` of the table that stands at ``prefix``."""
    known = list(model.model_fields) if model is not None else []
    open_table = model is not None and model.model_config.get("extra") == "allow"
    problems = [unknown((*prefix, key), known) for key in table if key not in known and not open_table]
    problems += list(not_finite(dict(table), prefix))
    if model is None:
        return problems or None
    wanted = {key: value for key, value in table.items() if key in known or open_table}
    if problems and any(p.code == "CFG15" for p in problems):
        return problems
    try:
        filled = model.model_validate_json(json.dumps(wanted, default=str), strict=True)
    except ValidationError as error:
        return [*problems, *problems_of(error, model, wanted, prefix)]
    return problems or filled


def plain_options(options: BaseModel | None) -> dict[str, Any]:
    """A filled model as a TOML table; keys without a value are left out."""
    return options.model_dump(mode="json", exclude_none=True) if options is not None else {}
