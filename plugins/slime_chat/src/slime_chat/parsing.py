"""Visible content and tool calls of an answer, by the format that a model was trained on.

    hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>                     Hermes, Qwen2.5, Qwen3
    qwen_xml   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>       Qwen3-Coder
    none       everything is content

A text whose calls are not all well formed is content, whole: nothing of it is dropped or repaired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Calls = list[tuple[str, Any]]
"""Name and arguments, a JSON value, of each call."""
Parser = Callable[[str], tuple[str, Calls]]

BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^<>\s]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def hermes(text: str) -> tuple[str, Calls]:
    """See the module.

    Example: hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') == ("", [("add", {"a": 1})])
    """
    return _blocks(text, _json)


def qwen_xml(text: str) -> tuple[str, Calls]:
    """See the module. A value that is JSON becomes its value, another one a text."""
    return _blocks(text, _xml)


def none(text: str) -> tuple[str, Calls]:
    """See the module."""
    return text, []


PARSERS: dict[str, Parser] = {"hermes": hermes, "qwen_xml": qwen_xml, "none": none}


def _blocks(text: str, read: Callable[[str], tuple[str, Any] | None]) -> tuple[str, Calls]:
    results = [read(block) for block in BLOCK.findall(text)]
    calls = [call for call in results if call is not None]
    if not calls or len(calls) < text.count("<tool_call>"):
        return text, []
    return BLOCK.sub("", text).strip(), calls


def _json(block: str) -> tuple[str, Any] | None:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    return value["name"], value.get("arguments", {})


def _xml(block: str) -> tuple[str, Any] | None:
    whole = FUNCTION.fullmatch(block)
    if whole is None:
        return None
    pairs: Sequence[tuple[str, str]] = PARAMETER.findall(whole[2])
    if PARAMETER.sub("", whole[2]).strip():
        return None
    return whole[1], {name: _value(text) for name, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
