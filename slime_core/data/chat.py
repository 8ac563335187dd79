"""Encoding of messages and text to token ids, and back. The only place that encodes text.

Templates are rendered by transformers in Jinja's immutable sandbox. Responses never pass here: they are token ids from
the engine, and nothing encodes them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from slime_core.errors import DataError
from slime_core.media.placing import checked_parts
from slime_core.media.references import Access
from slime_core.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
MARK = "Qtextq"
EXPECTED = 'a string, or a list of messages like [{"role": "user", "content": "..."}]'


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text without special tokens."""
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of ids, special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def raw_prompt_notices(tokenizer: Any) -> list[str]:
    """What prompts lack that are read as they are, without the chat template: sentences for people."""
    notices = []
    if getattr(tokenizer, "chat_template", None):
        notices.append(
            "prompts are read without the tokenizer's chat template; data.apply_chat_template=true applies it"
        )
    begin = getattr(tokenizer, "bos_token", None)
    if begin and [tokenizer.bos_token_id] == list(tokenizer.encode("a"))[:1]:
        notices.append(
            f"prompts are read without {begin}, with which the tokenizer begins a text; rows may contain it"
        )
    return notices


def require_template(tokenizer: Any) -> None:
    """Check, before any row is read, that a chat template can be applied.

    Raises:
        DataError: TOK41.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template, but data.apply_chat_template needs one",
            code="TOK41",
            where="data.apply_chat_template",
            fix="set data.apply_chat_template=false, or put chat_template.jinja into the model folder",
        )


def render(
    prompt: str | list[Message],
    tokenizer: Any,
    *,
    template: bool,
    where: str,
    kwargs: Mapping[str, Any] | None = None,
    tools: list[Any] | None = None,
) -> str:
    """The text that the model reads: the prompt itself, or its messages through the tokenizer's chat template.

    With ``template`` a plain string becomes one user message.

    Raises:
        DataError: DAT24 messages without a template, DAT25 messages that the template refuses, TOK41 no template.
    """
    if not template:
        if isinstance(prompt, str):
            return prompt
        raise DataError(
            "the prompt is a list of messages and no chat template is applied",
            code="DAT24",
            where=where,
            fix="set data.apply_chat_template=true, or make the prompt a string"
            if getattr(tokenizer, "chat_template", None)
            else "make the prompt a string, or put chat_template.jinja into the model folder: it has none",
        )
    require_template(tokenizer)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if reads_parts_alone(tokenizer, str(tokenizer.chat_template)):
        messages = [_in_parts(message) for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, **{"add_generation_prompt": True, **(kwargs or {})}
        )
    except Exception as error:  # the template is the model's code: it may raise anything
        raise DataError(
            f"the chat template refuses these messages: {error}",
            code="DAT25",
            where=where,
            why=f"roles are {', '.join(str(m.get('role')) for m in messages[:8])}",
            fix="fix the row's messages, data.apply_chat_template_kwargs, or the model's template",
        ) from error
    return str(text)


@lru_cache(maxsize=16)
def reads_parts_alone(tokenizer: Any, template: str) -> bool:
    """Whether a chat template writes nothing of a content that is a text: it expects a list of parts (SmolVLM).

    ``template`` is the tokenizer's, which may be replaced.
    """

    def writes(content: Any) -> bool:
        try:
            return MARK in str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
        except Exception:  # the template is the model's code
            return False

    return not writes(MARK) and writes([{"type": "text", "text": MARK}])


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def check_prompt(value: Any, where: str, key: str, access: Access) -> str | list[Message]:
    """A row's prompt: a text, or messages whose roles, contents, tool calls and media references are sound.

    Arguments of tool calls that are JSON texts, as in OpenAI's format, become values, as chat templates read them;
    references to media become absolute.

    Raises:
        DataError: DAT24 another type, DAT25 a message without role or content, or a malformed tool call, DAT33 media
            outside the data's folder, DAT36 a text that no tokenizer can take.
    """
    if isinstance(value, str):
        check_text(value, where)
        return value
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        kind = "null" if value is None else "an empty list" if value == [] else type(value).__name__
        kind = "a list with items that are not messages" if isinstance(value, list) and value else kind
        raise DataError(
            f"the prompt is {kind}",
            code="DAT24",
            where=f"{where}: {key}",
            why=f"expected {EXPECTED}",
            fix="fix the row, or set data.input_key to the column that holds the prompt",
        )
    return [_checked_message(message, f"{where}: {key}[{number}]", access) for number, message in enumerate(value)]


def check_text(text: str, where: str) -> None:
    """Refuse half of a surrogate pair, which JSON can carry and UTF-8 cannot.

    Raises:
        DataError: DAT36.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"the prompt has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            code="DAT36",
            where=where,
            why="it is half of a character and has no token",
            fix="fix the row, or skip unreadable rows with data.max_bad_rows",
        ) from error


def _checked_message(message: Message, where: str, access: Access) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        message_error = (
            "a message has no role" if "role" not in message else f"a message has the unknown role {role!r}"
        )
        raise DataError(message_error, code="DAT25", where=where, fix=f"roles are {', '.join(ROLES)}")
    speaks = isinstance(content, str) or (isinstance(content, list) and all(isinstance(p, dict) for p in content))
    if not speaks and not (content is None and message.get("tool_calls")):
        message_error = "has no content" if content is None else f"has content of type {type(content).__name__}"
        raise DataError(
            f"a {role} message {message_error}",
            code="DAT25",
            where=where,
            fix='content is a string, or a list of parts like [{"type": "text", "text": "..."}]',
        )
    for text in _texts(content):
        check_text(text, where)
    if isinstance(content, list):
        message = {**message, "content": checked_parts(content, where, access)}
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_checked_call(call, where) for call in calls]} if calls else message


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    problem = "is not an object with a function and its name"
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        arguments = function.get("arguments", {})
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else arguments
            problem = "" if isinstance(values, dict) else "has arguments that are no JSON object"
        except ValueError as error:
            problem = f"has arguments that are no JSON: {error}"
        if not problem:
            parsed = {**function, "arguments": values} if "arguments" in function else function
            return {**call, "function": parsed} if "function" in call else parsed
    raise DataError(
        f"a tool call {problem}",
        code="DAT25",
        where=where,
        fix='a call is {"type": "function", "function": {"name": "...", "arguments": {...}}}',
    )


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part.get("text"), str)]
