"""Anthropic's `POST /v1/messages`: its requests as chat completions, and replies in its form.

    system, messages of blocks      ->  messages with tool_calls, messages of role tool
    message, reasoning, tool calls  ->  blocks text, thinking, tool_use; one JSON object, or the events of a stream

Consecutive messages of one role are one turn, as Anthropic's API reads them. What `tool_result` says is the tool's
message; ``is_error`` and ``cache_control`` change nothing. An answer whose tool calls have other arguments than JSON
objects is text, since `tool_use` has no place for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from slime_chat.messages import bad, content_of, joined, listed, text_of
from slime_chat.reply import ChatReply
from slime_chat.request import check_names, number, stops
from slime_compat.handlers import HttpError, NamedEvents
from slime_core.types import Message

SERVED = frozenset(
    {"model", "messages", "system", "tools", "tool_choice", "stream", "temperature", "top_p", "top_k"}
    | {"max_tokens", "stop_sequences", "thinking"}
)
WITHOUT_EFFECT = frozenset({"metadata", "service_tier", "inference_geo"})
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType({"container": ({},), "mcp_servers": ([],)})
TEXTS = MappingProxyType({"text": "text"})
THINKING = ("enabled", "adaptive", "disabled")
SIGNATURE = "slime"  # of thinking blocks, which nobody verifies
REASONS = {"stop": "end_turn", "length": "max_tokens"}
OVERFLOW = "context_length_exceeded"
PLAIN = ("model", "stream", "temperature", "top_p", "top_k")
Block = Mapping[str, Any]


def to_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same request as a chat completion.

    Raises:
        HttpError: 400, with the parameter's name.
    """
    check_names(fields, SERVED, WITHOUT_EFFECT, NEUTRAL)
    thinking = fields.get("thinking", {"type": "adaptive"})
    if not isinstance(thinking, Mapping) or thinking.get("type") not in THINKING:
        raise bad(f"its type is one of {', '.join(THINKING)}", "thinking")
    chat = {name: fields[name] for name in PLAIN if name in fields}
    chat |= {"messages": _messages(fields), "stop": stops(fields, "stop_sequences")}
    chat["max_tokens"] = number(fields, "max_tokens", None, int, 1, 2**31)
    if tools := fields.get("tools"):
        chat["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(listed(tools, "tools"))]
    if choice := fields.get("tool_choice"):
        chat |= _choice(choice)
    return chat


def completion(reply: ChatReply) -> Any:
    """The answer to a request."""
    (node,) = reply.nodes
    blocks = list(_blocks(node.message))
    reason = "stop_sequence" if node.stop else REASONS.get(node.done.finish if node.done else "stop", "end_turn")
    usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.tokens}
    message = {
        "id": f"msg_{reply.name}",
        "type": "message",
        "role": "assistant",
        "model": reply.ask.model,
        "content": blocks,
        "stop_reason": "tool_use" if node.message.get("tool_calls") else reason,
        "stop_sequence": node.stop or None,
        "usage": {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
    }
    return NamedEvents(_events(message)) if reply.ask.stream else message


def refusal(error: HttpError) -> HttpError:
    """The same refusal in Anthropic's words: agents compact their context when they read them."""
    if error.fields.get("code") != OVERFLOW:
        return error
    return HttpError(error.status, f"prompt is too long: {error}", **error.fields)


def _messages(fields: Mapping[str, Any]) -> list[Message]:
    system = fields.get("system") or ""
    messages = [{"role": "system", "content": text_of(system, "system", TEXTS)}] if system else []
    for place, raw in enumerate(listed(fields.get("messages"), "messages")):
        where = f"messages[{place}]"
        role = raw.get("role") if isinstance(raw, Mapping) else raw
        if role not in ("user", "assistant"):
            raise bad(f"{role!r} is not a role; roles are user and assistant", where)
        content = raw.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else listed(content, where)
        if not all(isinstance(block, Mapping) for block in blocks):
            raise bad("a content block is an object with a type", where)
        turn = [_assistant(blocks, where)] if role == "assistant" else _user(blocks, where)
        if turn and messages and messages[-1]["role"] == turn[0]["role"] != "tool":
            turn[0] = _joined(messages.pop(), turn[0])
        messages += turn
    return messages


def _user(blocks: Sequence[Block], where: str) -> list[Message]:
    turn: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = content_of(block.get("content") or "", where, TEXTS)
            turn.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
            continue
        message = {"role": "user", "content": content_of([block], where, TEXTS)}
        after_text = turn and turn[-1]["role"] == "user"
        turn.append(_joined(turn.pop(), message) if after_text else message)
    return turn


def _assistant(blocks: Sequence[Block], where: str) -> Message:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(block)
    message: Message = {"role": "assistant", "content": text_of(texts, where, TEXTS)}
    return (
        message
        | ({"tool_calls": calls} if calls else {})
        | ({"reasoning_content": "\n".join(reasoning)} if reasoning else {})
    )


def _joined(first: Message, second: Message) -> Message:
    """Two messages of one role as one."""
    message = {**first, **second, "content": joined([c for c in (first["content"], second["content"]) if c])}
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {})


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in ("custom", None):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise bad(f"a tool of type {kind!r} is not served; tools with a name and an input_schema are", where)
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: Any) -> dict[str, Any]:
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in ("auto", "none"):
        raise bad("only the types 'auto' and 'none' are served: a policy cannot be made to call", "tool_choice")
    return {"tool_choice": kind, "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}


def _blocks(message: Message) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls", ())
    if "reasoning_content" in message:
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": SIGNATURE}
    if message["content"] or not calls:
        yield {"type": "text", "text": message["content"]}
    for call in calls:
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": call["function"]["arguments"],
        }


def _events(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begin: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**message["usage"], "output_tokens": 0},
    }
    yield {"type": "message_start", "message": {**message, **begin}}
    for index, block in enumerate(message["content"]):
        start, deltas = _parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": message["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def _parts(block: Block) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How a block begins, and the deltas that complete it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {"type": "thinking", "thinking": "", "signature": ""}, deltas
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
