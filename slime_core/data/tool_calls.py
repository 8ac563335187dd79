"""Parsing of tool calls in a model's text, by the format that its chat template writes.

    hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>                    Hermes, Qwen2.5, Qwen3
    qwen_xml   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>  Qwen3-Coder, Qwen3.5
    glm        <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value></tool_call>                 GLM-4.5
    llama      {"name": ..., "parameters": {...}}, <|python_tag|> before it, or <|python_tag|>NAME.call(KEY=VALUE)
    mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...}
    deepseek   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME ```json {...} ```     V3, R1, V3.1
    none       everything is content

Nothing is repaired: a text whose calls are not all well formed is an error that says what is wrong with it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.data.chat import render
from slime_core.errors import DataError
from slime_core.types import Message

Calls = list[tuple[str, Any]]
"""Name and arguments, a JSON value, of each call."""
Tools = Sequence[Mapping[str, Any]]
"""Definitions ``{"type": "function", "function": {"name", "description", "parameters"}}``."""
Parser = Callable[[str, Tools], tuple[str, Calls]]
"""A text and the tools offered, to content and calls. It raises ValueError where calls begin but are not well formed.

Formats that write values without quotes read the type of a value from the tools.
"""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MISTRAL = "[TOOL_CALLS]"
MISTRAL_CALL = re.compile(r"\s*([^\[\]\s]+?)\s*(?:\[CALL_ID\][^\[\]]*)?\[ARGS\](.*)", re.DOTALL)
DEEPSEEK, CALL, CALL_END, SEPARATOR = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "call▁end", "sep")
)
FENCE = "```"

USER: Message = {"role": "user", "content": "x"}
MARK = "Qturnq"
PROBE: Mapping[str, Any] = {"name": "probe_tool", "arguments": {"text": "x y", "count": 3}}


def hermes(text: str, tools: Tools = ()) -> tuple[str, Calls]:
    """See the module.

    Example: hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') == ("", [("add", {"a": 1})])
    """
    return _blocks(text, lambda block: _object(block, "arguments"))


def qwen_xml(text: str, tools: Tools = ()) -> tuple[str, Calls]:
    """See the module."""

    def read(block: str) -> tuple[str, Any]:
        head, named, rest = block.strip().removesuffix("</function>").partition(">")
        if not named or not head.startswith("<function=") or not block.rstrip().endswith("</function>"):
            raise ValueError("a call is not <function=NAME>, its parameters, and </function>")
        pairs = _pairs(rest, "<parameter=", ">", "</parameter>")
        name = head.removeprefix("<function=")
        return name, _typed(name, [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs], tools)

    return _blocks(text, read)


def glm(text: str, tools: Tools = ()) -> tuple[str, Calls]:
    """See the module."""

    def read(block: str) -> tuple[str, Any]:
        name, key, rest = block.partition("<arg_key>")
        if not name.strip() or "<" in name:
            raise ValueError("a call is not a name, then pairs of <arg_key> and <arg_value>")
        pairs = _pairs(key + rest, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
        return name.strip(), _typed(name.strip(), pairs, tools)

    return _blocks(text, read)


def llama(text: str, tools: Tools = ()) -> tuple[str, Calls]:
    """See the module. Several calls have ``;`` between them."""
    content, tag, rest = text.partition(PYTHON_TAG)
    if not tag:
        content, rest = "", text
        if not re.match(r'\s*\{\s*"(name|type)"', text):
            return text, []
    rest = rest.strip().removesuffix(";")
    if rest.startswith("{"):
        calls = [_named(value, "parameters") for value in _values(rest)]
    else:
        calls = _python_calls(rest)
    return content.strip(), calls


def mistral(text: str, tools: Tools = ()) -> tuple[str, Calls]:
    """See the module."""
    content, *parts = text.split(MISTRAL)
    calls: Calls = []
    for part in parts:
        if part.lstrip().startswith("["):
            values = _json(part)
            if not isinstance(values, list):
                raise ValueError("calls are not a JSON list")
            calls += [_named(value, "arguments") for value in values]
        else:
            named = MISTRAL_CALL.fullmatch(part)
            if named is None:
                raise ValueError("a call is not NAME[ARGS] and a JSON object")
            calls.append((named[1], _json(named[2])))
    return (content.strip(), calls) if parts else (text, [])


def deepseek(text: str, tools: Tools = ()) -> tuple[str, Calls]:
    """See the module. Marks that end a call may be missing, since some tokenizers drop them with other specials."""
    content, begin, rest = text.partition(DEEPSEEK)
    if not begin:
        return text, []
    calls: Calls = []
    for part in rest.split(CALL)[1:]:
        head, separator, tail = part.partition(CALL_END)[0].partition(SEPARATOR)
        name, arguments = head, tail
        if head.strip() == "function" and FENCE in tail:  # as V3 and R1 write it
            name, _, block = tail.partition(FENCE)
            arguments = block.strip().removesuffix(FENCE).removeprefix("json")
        if not separator or not name.strip():
            raise ValueError(f"a call is not function{SEPARATOR}NAME and a block of JSON")
        calls.append((name.strip(), _json(arguments)))
    if not calls:
        raise ValueError(f"there is no {CALL} after {DEEPSEEK}")
    return content.strip(), calls


def none(text: str, tools: Tools = ()) -> tuple[str, Calls]:
    """See the module."""
    return text, []


PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "qwen_xml": qwen_xml,
    "glm": glm,
    "llama": llama,
    "mistral": mistral,
    "deepseek": deepseek,
    "none": none,
}


def parser_of(chosen: str | Callable[[str], tuple[str, Calls]]) -> Parser:
    """A parser by name, or a function of the text alone.

    Raises:
        ValueError: an unknown name.
    """
    if callable(chosen):
        function = chosen
        return lambda text, tools: function(text)
    if chosen not in PARSERS:
        raise ValueError(f"tool_parser is {chosen!r}; known are {', '.join(PARSERS)}, or give a function")
    return PARSERS[chosen]


@dataclass(slots=True, frozen=True, kw_only=True)
class TemplateTools:
    """What a chat template does with tools."""

    describes: bool  # it writes definitions of tools into the prompt
    parser: (
        str  # the name of the parser of the calls that it writes; empty where it writes none, or none that is known
    )
    example: str  # its text of a call of PROBE


def template_tools(tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> TemplateTools:
    """Try a tokenizer's chat template: whether it describes tools, and which parser reads a call that it renders."""
    try:
        definition = {"name": PROBE["name"], "description": "x", "parameters": _schema()}
        text = _render(tokenizer, [USER], kwargs, tools=[{"type": "function", "function": definition}])
        describes = PROBE["name"] in text
    except DataError:
        describes = False
    for content, arguments in (("", PROBE["arguments"]), (None, json.dumps(PROBE["arguments"]))):
        call = {"id": "probe0000", "type": "function", "function": {"name": PROBE["name"], "arguments": arguments}}
        try:
            text = _call_text(tokenizer, {"role": "assistant", "content": content, "tool_calls": [call]}, kwargs)
        except DataError:
            continue
        for name, parser in PARSERS.items():
            try:
                if parser(text, ()) == ("", [(PROBE["name"], PROBE["arguments"])]):
                    return TemplateTools(describes=describes, parser=name, example=text)
            except ValueError:
                continue
    return TemplateTools(describes=describes, parser="", example="")


def _call_text(tokenizer: Any, message: Message, kwargs: Mapping[str, Any] | None) -> str:
    """The text of an assistant's message alone: what differs from one that says MARK."""
    marked = _render(tokenizer, [USER, {"role": "assistant", "content": MARK}], kwargs)
    text = _render(tokenizer, [USER, message], kwargs)
    start = next((place for place, pair in enumerate(zip(marked, text, strict=False)) if len({*pair}) == 2), len(text))
    return text[start:].removesuffix(marked[marked.find(MARK) + len(MARK) :]).strip()


def _render(tokenizer: Any, messages: list[Message], kwargs: Mapping[str, Any] | None, **more: Any) -> str:
    kwargs = {**(kwargs or {}), "add_generation_prompt": False}
    return render(messages, tokenizer, template=True, where="a trial of tools", kwargs=kwargs, **more)


def _schema() -> dict[str, Any]:
    types = {"text": {"type": "string", "description": "x"}, "count": {"type": "integer", "description": "x"}}
    return {"type": "object", "properties": types, "required": ["text"]}


def _blocks(text: str, read: Callable[[str], tuple[str, Any]]) -> tuple[str, Calls]:
    content, *parts = text.split(OPEN)
    contents, calls = [content], Calls()
    for part in parts:
        block, closed, after = part.partition(CLOSE)
        if not closed:
            raise ValueError(f"a {OPEN} has no {CLOSE}")
        calls.append(read(block))
        contents.append(after)
    return ("".join(contents).strip(), calls) if calls else (text, [])


def _pairs(text: str, *marks: str) -> list[tuple[str, str]]:
    """What stands between the first two of several marks, and before the last one, again and again."""
    pairs = []
    while text := text.strip():
        parts = []
        for mark in marks:
            before, mark_read, text = text.partition(mark)
            if not mark_read:
                raise ValueError(f"a call's arguments have no {mark} where one belongs")
            parts.append(before)
        head, key, *between, value = parts
        if head or "".join(between).strip():
            raise ValueError(f"there is text between a call's arguments: {(head or between[0])[:40]!r}")
        pairs.append((key, value))
    return pairs


def _object(text: str, key: str) -> tuple[str, Any]:
    return _named(_json(text), key)


def _named(value: Any, key: str) -> tuple[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f'a call is not a JSON object with "name" and "{key}"')
    value["name"].encode()  # a ValueError for half of a surrogate pair, which JSON can say and no tokenizer reads
    return value["name"], value.get(key, {})


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON of a call is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"the JSON of a call is not valid: {error}") from error


def _values(text: str) -> list[Any]:
    """JSON values with semicolons between them."""
    values, decoder, end = [], json.JSONDecoder(), 0
    while True:
        try:
            value, end = decoder.raw_decode(text, end)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON of a call is not valid: {error}") from error
        values.append(value)
        rest = text[end:].lstrip()
        if not rest:
            return values
        if not rest.startswith(";"):
            raise ValueError("there is text after a call")
        end = len(text) - len(rest[1:].lstrip())


def _python_calls(text: str) -> Calls:
    """``NAME.call(KEY=VALUE)``, which Llama 3 writes for its built-in tools."""
    calls = Calls()
    try:
        for statement in ast.parse(text).body:
            match statement:
                case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "call"), [], words)):
                    calls.append((name, {str(word.arg): ast.literal_eval(word.value) for word in words}))
                case _:
                    raise ValueError
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"after {PYTHON_TAG} there is no JSON object and no NAME.call(KEY=VALUE)") from None
    return calls


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> dict[str, Any]:
    """Values that are written without quotes: as text where the tool says so, else as JSON, else as text."""
    functions = [tool.get("function") or {} for tool in tools]
    schemas = [f.get("parameters") or {} for f in functions if f.get("name") == name]
    properties: Mapping[str, Any] = schemas[0].get("properties") or {} if schemas else {}
    return {key: _value(text, properties.get(key)) for key, text in pairs}


def _value(text: str, schema: Any) -> Any:
    options = schema.get("anyOf", [schema]) if isinstance(schema, Mapping) else []
    types = [option.get("type") for option in options if isinstance(option, Mapping)]
    if types == ["string"] or (text != "null" and types in (["string", "null"], [["string", "null"]])):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
