"""Replies as chat completions: one JSON object, or the chunks of a stream.

An engine returns a response whole. So a stream begins when it is complete, and sends it in a few chunks: role,
reasoning, content, tool calls, the finish reason, and the usage if requested.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_compat.handlers import Events
from slime_core.data.chat import decode
from slime_core.types import Completion, Message

if TYPE_CHECKING:
    from slime_chat.reply import ChatReply
    from slime_chat.tree import Node

BROKEN = "\ufffd"  # half of a character


def completion(reply: ChatReply, tokenizer: Any) -> Any:
    """The answer to a request: its ``n`` nodes as choices."""
    ask = reply.ask
    choices = [
        {
            "index": index,
            "message": as_sent(node.message),
            "logprobs": _log_probs(node.done, tokenizer) if ask.log_probs and node.done else None,
            "finish_reason": _reason(node),
        }
        for index, node in enumerate(reply.nodes)
    ]
    version = max((version for node in reply.nodes if node.done for version in node.done.versions), default=-1)
    head = {
        "id": f"chatcmpl-{reply.name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ask.model,
        "system_fingerprint": f"version-{version}",
    }
    prompt, tokens = reply.prompt_tokens, reply.tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    if ask.stream:
        return Events(_chunks(head | {"object": "chat.completion.chunk"}, choices, usage if ask.usage else None))
    return {**head, "choices": choices, "usage": usage}


def model(name: str) -> dict[str, Any]:
    """The answer to `GET /v1/models/NAME`."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "slime"}


def as_sent(message: Message) -> dict[str, Any]:
    """A message as clients read it: arguments of tool calls as JSON texts, no content beside calls as null."""
    calls = message.get("tool_calls")
    sent = {**message, "content": message["content"] or (None if calls else ""), "refusal": None}
    if calls:
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _reason(node: Node) -> str:
    if node.message.get("tool_calls"):
        return "tool_calls"
    return "length" if node.done is not None and node.done.finish == "length" else "stop"


def _log_probs(done: Completion, tokenizer: Any) -> dict[str, Any]:
    """Of each token under the distribution that it was drawn from."""
    content = []
    for token, value in zip(done.tokens, done.log_probs, strict=True):
        text = decode(tokenizer, [token])
        raw = None if BROKEN in text else list(text.encode())
        content.append({"token": text, "logprob": value, "bytes": raw, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _chunks(
    head: Mapping[str, Any], choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int] | None
) -> list[dict[str, Any]]:
    chunks = []
    for choice in choices:
        message, index = choice["message"], choice["index"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if "reasoning_content" in message:
            deltas.append({"reasoning_content": message["reasoning_content"]})
        if message["content"]:
            deltas.append({"content": message["content"]})
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})
        ends = [None] * len(deltas) + [choice["finish_reason"]]
        for delta, end in zip([*deltas, {}], ends, strict=True):
            chunks.append(
                {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": end}]}
            )
        if choice["logprobs"]:
            chunks[-1]["choices"][0]["logprobs"] = choice["logprobs"]
    if usage is not None:
        chunks.append({**head, "choices": [], "usage": dict(usage)})
    return chunks
