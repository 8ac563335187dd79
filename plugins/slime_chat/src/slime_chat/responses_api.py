"""OpenAI's `POST /v1/responses`: its requests as chat completions, and replies in its form.

    instructions, input items       ->  messages with tool_calls, messages of role tool
    message, reasoning, tool calls  ->  items message, reasoning, function_call; one JSON object, or a stream's events

Items that one answer made (reasoning, message, function_call) are one assistant's message again when they come back.
`previous_response_id` puts a response of this session, with the input that led to it, before the input; as in OpenAI's
API it brings no instructions along.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slime_chat.answers import as_sent
from slime_chat.messages import bad, content_of, listed, text_of
from slime_chat.reply import ChatReply
from slime_chat.request import check_names, number
from slime_compat.handlers import NamedEvents
from slime_core.types import Message

SERVED = frozenset(
    {"model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "stream"}
    | {"temperature", "top_p", "max_output_tokens", "include"}
)
WITHOUT_EFFECT = frozenset(
    {"store", "metadata", "client_metadata", "user", "service_tier", "safety_identifier", "stream_options"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "background": (False,),
        "text": ({"format": {"type": "text"}}, {}),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
    }
)
TEXTS = MappingProxyType({"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"})
REASONING = MappingProxyType({"reasoning_text": "text", "summary_text": "text"})
ROLES = ("user", "system", "developer", "assistant")
ENCRYPTED = "reasoning.encrypted_content"  # accepted, and never there: reasoning comes back as it is
PLAIN = ("model", "stream", "temperature", "top_p", "tool_choice", "parallel_tool_calls")
Item = Mapping[str, Any]


def to_chat(fields: Mapping[str, Any], history: Sequence[Message]) -> dict[str, Any]:
    """The same request as a chat completion; ``history`` are the messages up to the previous response.

    Raises:
        HttpError: 400, with the parameter's name.
    """
    check_names(fields, SERVED, WITHOUT_EFFECT, NEUTRAL)
    if any(name != ENCRYPTED for name in listed(fields.get("include", []), "include")):
        raise bad(f"only {ENCRYPTED} is served", "include")
    chat = {name: fields[name] for name in PLAIN if name in fields}
    chat["max_completion_tokens"] = number(fields, "max_output_tokens", None, int, 1, 2**31)
    if tools := fields.get("tools"):
        chat["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(listed(tools, "tools"))]
    instructions = fields.get("instructions")
    if not isinstance(instructions, str | None):
        raise bad("send a text", "instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return chat | {"messages": [*system, *history, *_messages(fields.get("input"))]}


def history_of(messages: Sequence[Message], reply: ChatReply, instructions: bool) -> list[Message]:
    """What a response leaves for a request that names it: its messages without instructions, and the answer."""
    return [*messages[int(instructions) :], as_sent(reply.nodes[0].message)]


def completion(reply: ChatReply, fields: Mapping[str, Any]) -> Any:
    """The answer to a request of these ``fields``."""
    (node,) = reply.nodes
    cut = node.done is not None and node.done.finish == "length"
    status = "incomplete" if cut else "completed"
    prompt, tokens = reply.prompt_tokens, reply.tokens
    response = {
        "id": f"resp_{reply.name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": reply.ask.model,
        "output": list(_items(node.message, reply.name, status)),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + tokens,
        },
        "instructions": fields.get("instructions"),
        "metadata": fields.get("metadata", {}),
        "parallel_tool_calls": not reply.ask.one_call,
        "previous_response_id": fields.get("previous_response_id"),
        "temperature": reply.ask.params.temperature,
        "top_p": reply.ask.params.top_p,
        "tool_choice": fields.get("tool_choice", "auto"),
        "tools": fields.get("tools", []),
    }
    return NamedEvents(_events(response)) if reply.ask.stream else response


def _messages(raw: Any) -> list[Message]:
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if not isinstance(raw, list):
        raise bad("send a text or a list of items", "input")
    messages: list[Message] = []
    answer: Message | None = None  # that the last items belong to
    for place, item in enumerate(raw):
        where = f"input[{place}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else item
        role = item.get("role") if kind == "message" else None
        if kind in ("reasoning", "function_call") or role == "assistant":
            if answer is None or _begins(kind, answer):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            _add(item, kind, answer, where)
            continue
        answer = None
        if kind == "function_call_output":
            content = content_of(item.get("output"), where, TEXTS)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif role in ROLES:
            messages.append({"role": role, "content": content_of(item.get("content"), where, TEXTS)})
        elif kind == "message":
            raise bad(f"{role!r} is not a role; roles are {', '.join(ROLES)}", where)
        else:
            raise bad(f"an item of type {kind!r} is not served", where)
    return messages


def _begins(kind: str, answer: Message) -> bool:
    """Whether an item of that kind can only be the first of another answer."""
    if kind == "reasoning":
        return bool(answer["content"] or answer.get("tool_calls"))
    return kind == "message" and bool(answer["content"] or answer.get("tool_calls"))


def _add(item: Item, kind: str, answer: Message, where: str) -> None:
    if kind == "reasoning":
        content = item.get("content") or item.get("summary") or ""
        answer["reasoning_content"] = text_of(content, where, REASONING)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        answer["tool_calls"] = [*answer.get("tool_calls", ()), call]
    else:
        answer["content"] = text_of(item.get("content"), where, TEXTS)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else tool
    if kind != "function":
        raise bad(f"a tool of type {kind!r} is not served; functions are", where)
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _items(message: Message, name: str, status: str) -> Iterator[dict[str, Any]]:
    calls = as_sent(message).get("tool_calls", ())
    if "reasoning_content" in message:
        content = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        yield {"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content, "status": status}
    if message["content"] or not calls:
        content = [{"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}]
        yield {"id": f"msg_{name}", "type": "message", "role": "assistant", "content": content, "status": status}
    for call in calls:
        function = call["function"]
        yield {
            "id": f"fc_{call['id']}",
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
            "status": status,
        }


def _events(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    running = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": running} for name in ("created", "in_progress")
    ]
    for index, item in enumerate(response["output"]):
        events += ({**event, "output_index": index} for event in _item_events(item))
    events.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _item_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    running = {**item, "status": "in_progress"}
    about = {"item_id": item["id"]}
    if item["type"] == "function_call":
        yield {"type": "response.output_item.added", "item": {**running, "arguments": ""}}
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **about, "delta": item["arguments"]}
        yield {"type": f"{kind}.done", **about, "name": item["name"], "arguments": item["arguments"]}
    else:
        yield {"type": "response.output_item.added", "item": {**running, "content": []}}
        (part,) = item["content"]
        about["content_index"] = 0
        yield {"type": "response.content_part.added", **about, "part": {**part, "text": ""}}
        kind = f"response.{part['type']}"
        more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": f"{kind}.delta", **about, "delta": part["text"], **more}
        yield {"type": f"{kind}.done", **about, "text": part["text"], **more}
        yield {"type": "response.content_part.done", **about, "part": part}
    yield {"type": "response.output_item.done", "item": item}
