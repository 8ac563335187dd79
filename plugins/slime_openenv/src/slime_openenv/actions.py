"""An answer's text as an action: one field of it, JSON, calls of tools, or what a user's function makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.data.tool_calls import Parser, Tools
from slime_openenv.session import InvalidAction

DECODER = json.JSONDecoder()
NUMBERS: dict[str, Callable[[str], Any]] = {"integer": int, "number": float}
BOOLEANS = {"true": True, "false": False}
BASE = "metadata"
"""The field that every OpenEnv action has, for what is no part of it."""


def to_action(text: str, schema: Mapping[str, Any], field: str = "") -> dict[str, Any]:
    """The action that an answer is: a field's value, or the last JSON object in the text.

    Without ``field`` the schema decides: where an action has a single field, an answer is its value.

    Raises:
        InvalidAction: no JSON object, or no value of the field's type.

    Example: to_action("up ", {"properties": {"move": {"type": "string"}}}) == {"move": "up"}
    """
    properties = {name: value for name, value in schema.get("properties", {}).items() if name != BASE}
    if not field and len(properties) == 1:
        field = next(iter(properties))
    if field:
        kind = properties.get(field, {}).get("type", "string")
        return {field: _value(text.strip(), field, kind)}
    return _last_object(text)


def to_calls(text: str, parser: Parser, tools: Tools) -> list[dict[str, Any]]:
    """The actions that an answer's tool calls are; none where it calls no tool.

    Raises:
        InvalidAction: a call that is not well formed.
    """
    try:
        _, calls = parser(text, tools)
    except ValueError as error:
        raise InvalidAction(str(error)) from None
    return [{"type": "call_tool", "tool_name": name, "arguments": arguments} for name, arguments in calls]


def _value(text: str, field: str, kind: Any) -> Any:
    try:
        if kind == "boolean":
            return BOOLEANS[text.lower()]
        return NUMBERS[kind](text) if kind in NUMBERS else text
    except (ValueError, KeyError):
        raise InvalidAction(f"{field} is {kind}; answer with it alone") from None


def _last_object(text: str) -> dict[str, Any]:
    action, start = None, text.find("{")
    while start >= 0:
        try:
            value, end = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start + 1
        else:
            action = value
        start = text.find("{", end)
    if action is None:
        raise InvalidAction("the answer has no JSON object; write the action as one")
    return dict(action)
