"""Messages of clients as templates read them, and the keys by which they are compared.

An assistant's message is known again by what a client may not lose: its text (without reasoning, outer white space
aside) and its tool calls (names and arguments as JSON values). Reasoning, ids of calls, ``null`` against ``""`` and
the order of keys may change on the way. Every other message is compared literally.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from slime_compat.handlers import HttpError
from slime_core.data.turns import split_reasoning
from slime_core.types import Message

Key = tuple[Any, ...]
"""What a message is compared by; hashable."""
Content = str | list[dict[str, Any]]
"""Of a message: a text, or parts of type text and image."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KEPT = ("name", "tool_call_id")
PICTURES = ("image", "image_url", "input_image")
TEXTS: Mapping[str, str] = MappingProxyType({"text": "text", "refusal": "refusal"})
"""Parts of a message's content by type, with the key of their text."""


def normal(raw: Any, where: str) -> Message:
    """A client's message as templates read it: arguments of calls as values, content a text, or parts with pictures.

    Raises:
        HttpError: 400, it is no message, or has content of another kind.
    """
    role = raw.get("role") if isinstance(raw, Mapping) else raw
    if not isinstance(raw, Mapping) or not isinstance(role, str) or role not in ROLES:
        raise bad(f"{role!r} is not a role; roles are {', '.join(ROLES)}", where)
    role = ROLES[role]
    calls = raw.get("tool_calls") or ()
    content = raw.get("content")
    message: Message = {
        "role": role,
        "content": "" if content is None and role == "assistant" else content_of(content, where),
    }
    for name in KEPT:
        if raw.get(name) is not None:
            message[name] = str(raw[name])
    for text in message.values():
        check_characters(text, where)
    if role == "assistant":
        if isinstance(message["content"], list):
            raise bad("an assistant's message has a picture", where)
        if raw.get("function_call"):
            raise bad("function_call is not served; use tool_calls", where)
        if calls:
            message["tool_calls"] = [_call(call, where) for call in calls]
        if reasoning := raw.get("reasoning_content") or raw.get("reasoning"):
            message["reasoning_content"] = str(reasoning)
    elif calls:
        raise bad(f"a {role} message has tool_calls", where)
    return message


def content_of(content: Any, where: str, kinds: Mapping[str, str] = TEXTS) -> Content:
    """A content as one text: itself, or its parts' texts as lines; a list of parts where it has pictures.

    ``kinds`` maps a part's type to the text's key. A picture is ``{"type": "image", "image": ADDRESS}``.

    Raises:
        HttpError: 400, a part of another type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise bad(f"content is {type(content).__name__}; send a text or a list of parts", where)
    return joined([_part(part, where, kinds) for part in content])


def joined(contents: Sequence[Content]) -> Content:
    """Contents end to end: texts beside each other become lines of one."""
    parts: list[dict[str, Any]] = []
    for content in contents:
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text" and parts and parts[-1]["type"] == "text":
                part = {"type": "text", "text": f"{parts.pop()['text']}\n{part['text']}"}
            parts.append(part)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return [part for part in parts if part["type"] != "text" or part["text"]]


def text_of(content: Any, where: str, kinds: Mapping[str, str] = TEXTS) -> str:
    """A content without pictures as one text; raises as :func:`content_of`."""
    text = content_of(content, where, kinds)
    if not isinstance(text, str):
        raise bad("a picture is not served here; send it in a message of the user or as a tool's result", where)
    return text


def _part(part: Mapping[str, Any], where: str, kinds: Mapping[str, str]) -> Content:
    kind = part.get("type")
    if isinstance(kind, str) and kind in PICTURES:
        return [{"type": "image", "image": _picture(part, where)}]
    if not isinstance(kind, str) or kind not in kinds:
        raise bad(f"a content part of type {kind!r} is not served; {' and '.join(kinds)} and pictures are", where)
    if not isinstance(part.get(kinds[kind]), str):
        raise bad(f"a content part of type {kind!r} has no text under '{kinds[kind]}'", where)
    return str(part[kinds[kind]])


def _picture(part: Mapping[str, Any], where: str) -> str:
    """The address of a picture in OpenAI's form, or in Anthropic's."""
    value = next((part[name] for name in ("image_url", "image", "source") if part.get(name)), None)
    if isinstance(value, Mapping):
        data, kind = value.get("data"), value.get("media_type", "image/png")
        value = f"data:{kind};base64,{data}" if isinstance(data, str) else value.get("url")
    if not isinstance(value, str) or not value:
        raise bad("a picture has no address; send data:image/png;base64,...", where)
    return value


def check_characters(value: Any, where: str) -> None:
    """Refuse halves of surrogate pairs, which JSON can say and no tokenizer reads.

    Raises:
        HttpError: 400.
    """
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = f" at character {error.start}" if text is value else ""
        raise bad(f"half of a surrogate pair{at}, which has no token", where) from error


def key_of(message: Message) -> Key:
    """What a normal message is compared by.

    Example: key_of({"role": "assistant", "content": " 4 "}) == ("assistant", "4", ())
    """
    if message["role"] != "assistant":
        content = message["content"]
        parts = content if isinstance(content, str) else tuple(tuple(part.values()) for part in content)
        return (message["role"], parts, *(message.get(name) for name in KEPT))
    calls = tuple((call["function"]["name"], _canonical(call["function"]["arguments"])) for call in _calls(message))
    return ("assistant", split_reasoning(message["content"])[1].strip(), calls)


def sameness(message: Message, reply: Message) -> int:
    """How alike two messages of one key are: 0 to 2, a point each for the very text and the very ids of calls."""
    ids = [[call.get("id") for call in _calls(one)] for one in (message, reply)]
    return int(message["content"] == reply["content"]) + int(ids[0] == ids[1])


def bad(message: str, param: str | None = None, code: str | None = None) -> HttpError:
    """The refusal of a request that cannot be served."""
    return HttpError(400, f"{param}: {message}" if param else message, param=param, code=code)


def listed(value: Any, where: str) -> list[Any]:
    """A value that is a list.

    Raises:
        HttpError: 400.
    """
    if not isinstance(value, list):
        raise bad(f"send a list, not {type(value).__name__}", where)
    return value


def call_of(name: str, arguments: Any, id_: Any) -> dict[str, Any]:
    """A tool call as templates read it: arguments are a JSON object, or a text where they are none.

    Example: call_of("add", '{"a": 1}', "c1")["function"] == {"name": "add", "arguments": {"a": 1}}
    """
    text = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    value: Any = {} if not text.strip() else text
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
    arguments = value if isinstance(value, dict) else text
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad("a tool call has no function with a name", where)
    return call_of(function["name"], function.get("arguments"), call.get("id"))


def _calls(message: Message) -> Sequence[Any]:
    calls: Sequence[Any] = message.get("tool_calls") or ()
    return calls


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
