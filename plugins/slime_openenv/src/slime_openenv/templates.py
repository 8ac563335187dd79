"""Observations and first messages as texts, by Jinja templates in an immutable sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slime_core import ConfigError


@cache
def compiled(text: str) -> Template:
    """The template of a text.

    Raises:
        ValueError: it is no Jinja template.
    """
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["tojson"] = to_json  # Jinja's own escapes for HTML
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"no Jinja template: {error}") from None


def rendered(key: str, text: str, values: Mapping[str, Any]) -> str:
    """The text of a template, which is the config's ``key``, with its values.

    Raises:
        ConfigError: the template asks for what is not there.
    """
    try:
        return compiled(text).render(values)
    except Exception as error:  # the template is the user's code: it may raise anything
        raise ConfigError(
            f"{key} cannot be rendered: {error}",
            where=f"plugin.openenv.{key}",
            why=f"it may use: {', '.join(sorted(values))}",
            fix="correct the template, or set observation_path to a function",
        ) from error


def plain(observation: Mapping[str, Any]) -> str:
    """An observation's one text field, or all of it as JSON where it has other fields, or several.

    Example: plain({"hint": "up"}) == "up" and plain({"row": [1, 0]}) == '{"row": [1, 0]}'
    """
    match list(observation.values()):
        case [str() as text]:
            return text
    return to_json(observation)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON for a model to read."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
