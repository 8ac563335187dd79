"""Parsing of `POST /v1/chat/completions` to a :class:`ChatRequest`, or a refusal in OpenAI's words.

The other APIs' requests are translated to this one's first.

Three kinds of parameters: those that are served, those that change nothing (``user``, ``store``), and all others,
which are refused unless they have the value that changes nothing. So no request of a client is silently left
out.

In training a draw must come from the run's own policy. Another ``temperature`` is honoured, since the trainer divides
by each sample's own; another ``top_p`` or ``top_k``, or temperature 0, cuts the distribution and is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from slime_chat.messages import Key, bad, check_characters, key_of, normal
from slime_core.types import Message, SamplingParams

SERVED = frozenset(
    {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "temperature", "top_p", "top_k"}
    | {"max_tokens", "max_completion_tokens", "stop", "seed", "n", "logprobs", "parallel_tool_calls"}
)
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "min_p": (0,),
        "logit_bias": ({},),
        "top_logprobs": (0,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "functions": ([],),
    }
)
"""Values, other than ``null``, at which a parameter changes nothing."""
MOST = 128
"""Answers to one request."""
POLICY = "policy"
"""Name of the model that makes a session's sample."""
OF_RUN = "run/"
"""Prefix of the name of a model that names a role: ``run/reviewer``."""
ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(slots=True, frozen=True, kw_only=True)
class ChatRequest:
    """What a client wants."""

    model: str
    role: str  # that the agent plays; empty for the sample's own
    messages: list[Message]
    keys: list[Key]  # of the messages
    tools: list[Any] | None
    tools_key: str  # equal for equal tools
    calls: bool  # whether responses are parsed for tool calls
    one_call: bool  # whether a response with several is text
    object_arguments: bool  # whether a response whose calls have other arguments than JSON objects is text
    params: SamplingParams
    n: int
    seed: int | None
    stream: bool
    usage: bool  # whether a stream reports it
    log_probs: bool


def read(
    fields: Mapping[str, Any],
    defaults: SamplingParams,
    *,
    training: bool,
    role: str = "",
    object_arguments: bool = False,
) -> ChatRequest:
    """See the module; ``defaults`` are the run's sampling parameters, ``role`` is one named beside the request.

    Raises:
        HttpError: 400, with the parameter's name.
    """
    check_names(fields, SERVED, WITHOUT_EFFECT, NEUTRAL)
    messages, tools = _messages(fields), _tools(fields)
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise bad("only 'auto' and 'none' are served: a policy cannot be made to call", "tool_choice")
    options = fields.get("stream_options", {})
    if not isinstance(options, Mapping):
        raise bad('send an object, such as {"include_usage": true}', "stream_options")
    model = str(fields.get("model", POLICY))
    return ChatRequest(
        model=model,
        role=_role(role or (model.removeprefix(OF_RUN) if model.startswith(OF_RUN) else "")),
        messages=messages,
        keys=[key_of(message) for message in messages],
        tools=tools,
        tools_key=json.dumps(tools, sort_keys=True) if tools else "",
        calls=tools is not None and choice == "auto",
        one_call=not _flag(fields, "parallel_tool_calls", True),
        object_arguments=object_arguments,
        params=_params(fields, defaults, training),
        n=number(fields, "n", 1, int, 1, MOST),
        seed=number(fields, "seed", None, int, -(2**63), 2**63 - 1),
        stream=_flag(fields, "stream"),
        usage=bool(options.get("include_usage")),
        log_probs=_flag(fields, "logprobs"),
    )


def check_names(
    fields: Mapping[str, Any],
    served: Collection[str],
    without_effect: Collection[str],
    neutral: Mapping[str, Collection[Any]],
) -> None:
    """Refuse parameters that are not served; ``neutral`` has the values at which they may stand.

    Raises:
        HttpError: 400, with the parameter's name.
    """
    for name, value in fields.items():
        if name not in served and name not in without_effect and value not in neutral.get(name, ()):
            allowed = f"; it may be {json.dumps(next(iter(neutral[name])))}" if name in neutral else ""
            raise bad(f"{json.dumps(value)[:80]} is not served{allowed}", name, "unsupported_parameter")


def _role(name: str) -> str:
    if name and not ROLE.fullmatch(name):
        raise bad(f"{name[:80]!r} is not a role: 1 to 64 letters, digits and _.-", "model")
    return name


def _messages(fields: Mapping[str, Any]) -> list[Message]:
    raw = fields.get("messages")
    if not isinstance(raw, list) or not raw:
        raise bad("send a list of messages", "messages")
    messages = [normal(message, f"messages[{place}]") for place, message in enumerate(raw)]
    if messages[-1]["role"] == "assistant":
        raise bad("the last message is the assistant's own, and an answer is not continued", "messages")
    return messages


def _tools(fields: Mapping[str, Any]) -> list[Any] | None:
    tools = fields.get("tools") or None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise bad("tools are a list of functions, each with a name", "tools")
    check_characters(tools, "tools")
    return tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _params(fields: Mapping[str, Any], defaults: SamplingParams, training: bool) -> SamplingParams:
    temperature = number(fields, "temperature", defaults.temperature, float, 0, 2)
    top_p = number(fields, "top_p", defaults.top_p, float, 1e-9, 1)
    top_k = max(0, number(fields, "top_k", defaults.top_k, int, -1, 2**31))
    for name, value, default in (("top_p", top_p, defaults.top_p), ("top_k", top_k, defaults.top_k)):
        if training and value != default:
            raise bad(_biased(name, value, default), name, "unsupported_value")
    if training and not temperature and defaults.temperature:
        raise bad(_biased("temperature", temperature, defaults.temperature), "temperature", "unsupported_value")
    return replace(
        defaults,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_new_tokens=min(_limit(fields), defaults.max_new_tokens),
        stop=tuple(dict.fromkeys((*defaults.stop, *stops(fields)))),
    )


def _biased(name: str, value: float, default: float) -> str:
    return (
        f"{value:g} would draw from another distribution than the one that is trained ({default:g}); send that or "
        f"nothing, or let the task leave it out: leave_out=('{name}',)"
    )


def _limit(fields: Mapping[str, Any]) -> int:
    limits = [number(fields, name, 2**31, int, 1, 2**31) for name in ("max_tokens", "max_completion_tokens")]
    return int(min(limits))


def stops(fields: Mapping[str, Any], name: str = "stop") -> list[str]:
    """The texts that end an answer.

    Raises:
        HttpError: 400.
    """
    stop = fields.get(name, [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(item, str) and item for item in texts):
        raise bad("send a text, or a list of texts", name)
    check_characters(texts, name)
    return texts


def number(fields: Mapping[str, Any], name: str, default: Any, kind: type, low: float, high: float) -> Any:
    """A parameter's value as ``kind``.

    Raises:
        HttpError: 400.
    """
    value = fields.get(name)
    if value is None:
        return default
    valid = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high  # not of NaN
    if not valid or (kind is int and value != int(value)):
        raise bad(f"{value!r} is not {'a number' if kind is float else 'an integer'} from {low:g} to {high:g}", name)
    return kind(value)


def _flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise bad(f"{value!r} is neither true nor false", name)
    return value
