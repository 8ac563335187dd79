"""One sample's dialogue: the model's answers, and the results of the tools that it calls, which do not train.

prompt  [answer: text, calls]  results  [answer: calls]  results  [answer: text]
        mask 1                 mask 0   mask 1           mask 0   mask 1
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slime_core.data.chat import decode
from slime_core.data.tool_calls import Parser
from slime_core.data.turns import Speech, split_reasoning
from slime_core.errors import DataError, EngineError
from slime_core.media.references import inputs_of
from slime_core.types import Message, Prompt, Sample, Status
from slime_mcp.options import Options
from slime_mcp.servers import McpServers, ServerLost, Tool, ToolResult

if TYPE_CHECKING:
    from slime_core.context import Context

MCP = "mcp"
"""Key of a sample's metadata."""
ERRORS = ("unparsed", "unknown", "invalid", "refused", "failed", "timeout", "crash")


@dataclass(slots=True, frozen=True, kw_only=True)
class Talk:
    """What dialogues of one run have in common: how calls are read, and results written, in its model's template."""

    speech: Speech
    parser: Parser
    plain: bool  # results are a user's message, since the template knows no tools

    def messages(self, calls: Sequence[tuple[str, ToolResult]]) -> list[Message]:
        """The results of an answer's calls; pictures are parts of them."""
        if not self.plain:
            return [
                {"role": "tool", "name": name, "tool_call_id": f"call{number:05}", "content": _content(result)}
                for number, (name, result) in enumerate(calls)
            ]
        texts = [f"<tool_response>\n{result.text}\n</tool_response>" for _, result in calls]
        if not any(result.parts for _, result in calls):
            return [{"role": "user", "content": "\n".join(texts)}]
        parts: list[dict[str, Any]] = []
        for _, result in calls:
            inside = result.parts or ({"type": "text", "text": result.text},)
            parts += [{"type": "text", "text": "<tool_response>\n"}, *inside]
            parts.append({"type": "text", "text": "\n</tool_response>\n"})
        return [{"role": "user", "content": parts}]

    def results(self, calls: Sequence[tuple[str, ToolResult]], answer: Sequence[int]) -> list[int]:
        """Ids of the results that follow an answer."""
        return self.speech.between(self.messages(calls), answer)


async def converse(
    sample: Sample,
    prompt: Prompt,
    ctx: Context,
    servers: McpServers,
    tools: Mapping[str, Tool],
    talk: Talk | None,
    options: Options,
) -> None:
    """Fill a pending sample: answers and results until an answer without calls, or a limit. Without tools, one answer.

    A sample that the run stopped goes on where it was; with servers of its own it begins again, since their state is
    gone. ``metadata["mcp"]`` has its counts and, of a finished one, ``answer``, the text of the last answer.
    """
    stateful = any(tool.server.per == "sample" for tool in tools.values())
    if stateful and sample.status is Status.ABORTED:
        _begin_again(sample)
        await _keep_pictures(sample, len((prompt.multimodal_inputs or {}).get("images", ())), ctx)
    state: dict[str, Any] = sample.metadata.setdefault(MCP, {"turns": 0, "calls": 0, **dict.fromkeys(ERRORS, 0)})
    try:
        await _turns(sample, ctx, servers, tools, talk, options, state)
    except ServerLost as error:
        sample.status, state["infra"] = Status.FAILED, f"an MCP server {error}"
    finally:
        if stateful:
            await servers.release(sample.id)
    errors = {f"mcp/errors/{kind}": state[kind] for kind in ERRORS}
    metrics = sample.metadata.get("metrics")
    sample.metadata["metrics"] = {
        **(metrics if isinstance(metrics, dict) else {}),
        "mcp/turns": state["turns"],
        "mcp/calls": state["calls"],
        "mcp/errors": sum(errors.values()),
        **errors,
    }


async def _turns(
    sample: Sample,
    ctx: Context,
    servers: McpServers,
    tools: Mapping[str, Tool],
    talk: Talk | None,
    options: Options,
    state: dict[str, Any],
) -> None:
    while True:
        begin = state.setdefault("begin", len(sample.tokens))
        try:
            done = await ctx.generate(sample)
        except EngineError as error:
            if not error.ends_dialogue or not sample.response_length:
                raise
            sample.status = Status.TRUNCATED
            await _drop_unread(sample, state.get("pictures", 0), ctx)
            return
        if done.finish == "abort":
            return
        del state["begin"]
        state["turns"] += 1
        if done.finish == "length" or talk is None:
            return
        answer = sample.tokens[begin:]
        calls, content = _read(answer, talk, tools)
        if not calls:
            state["answer"] = content
            return
        if state["turns"] >= options.max_turns:
            sample.status = Status.TRUNCATED
            return
        work = [_result(call, number, sample, servers, tools, options) for number, call in enumerate(calls)]
        results = [await _visible(result, ctx) for result in await asyncio.gather(*work)]
        state["calls"] += len(calls)
        for result in results:
            if result.error:
                state[result.error] += 1
        named = [(call.name, result) for call, result in zip(calls, results, strict=True)]
        ids = talk.results(named, answer)
        state["pictures"] = len((sample.multimodal_inputs or {}).get("images", ()))
        sample.append_response(ids, mask=0, text=decode(ctx.tokenizer, ids))
        await ctx.append_media(sample, talk.messages(named))


@dataclass(slots=True, frozen=True, kw_only=True)
class _ToolCall:
    name: str
    arguments: Any = None
    broken: str = ""  # why the answer's calls cannot be read


def _read(answer: Sequence[int], talk: Talk, tools: Mapping[str, Tool]) -> tuple[list[_ToolCall], str]:
    """The calls of an answer, and its text without them; calls that cannot be read are one broken call."""
    text = talk.speech.text(answer)
    _, text = split_reasoning(text, open_=talk.speech.reasoning_open)
    try:
        content, calls = talk.parser(text, [tool.definition for tool in tools.values()])
    except ValueError as error:
        return [_ToolCall(name="error", broken=str(error))], text
    return [_ToolCall(name=name, arguments=arguments) for name, arguments in calls], content


async def _result(
    call: _ToolCall, number: int, sample: Sample, servers: McpServers, tools: Mapping[str, Tool], options: Options
) -> ToolResult:
    if call.broken:
        return ToolResult(
            text=f"Error: the call could not be read: {call.broken}. No tool was called.", error="unparsed"
        )
    if number >= options.max_calls:
        return ToolResult(text=f"Error: not called; an answer may call {options.max_calls} tools.", error="refused")
    tool = tools.get(call.name)
    if tool is None:
        names = ", ".join(tools)
        return ToolResult(text=f"Error: there is no tool '{call.name[:80]}'. Tools are: {names}.", error="unknown")
    if problem := tool.problem(call.arguments):
        return ToolResult(text=f"Error: {problem}. The tool was not called.", error="invalid")
    return await servers.call(sample.id, tool, call.arguments)


def _content(result: ToolResult) -> str | list[dict[str, Any]]:
    return list(result.parts) or result.text


async def _visible(result: ToolResult, ctx: Context) -> ToolResult:
    """The result as the model of this run reads it: without pictures, or with those that can be read."""
    if not result.parts:
        return result
    if ctx.media is None:
        return replace(result, parts=())
    try:
        await asyncio.to_thread(ctx.media.open, inputs_of([{"content": list(result.parts)}]), "a tool's result")
    except DataError as error:
        return ToolResult(text=f"Error: {error.what}: {error.why}", error="failed")
    return result


async def _keep_pictures(sample: Sample, count: int, ctx: Context) -> None:
    """Leave a sample its first pictures: those whose placeholders it still has."""
    inputs = sample.multimodal_inputs or {}
    images = inputs.get("images", [])
    if len(images) > count:
        remaining = {**inputs, "images": images[:count]}
        sample.multimodal_inputs = {kind: items for kind, items in remaining.items() if items} or None
        sample.multimodal_train_inputs = None
        await ctx.prepare_media([sample])


async def _drop_unread(sample: Sample, pictures: int, ctx: Context) -> None:
    """Remove the results at a sample's end: with them it is longer than the context, which a trainer may not hold.

    ``pictures`` are those before the results. There are no results after an answer that the run stopped.
    """
    mask = sample.loss_mask or []
    count = next((number for number, trains in enumerate(reversed(mask)) if trains), len(mask))
    if not count:
        return
    text = decode(ctx.tokenizer, sample.tokens[len(sample.tokens) - count :])
    sample.truncate_response(sample.response_length - count, sample.response.removesuffix(text))
    await _keep_pictures(sample, pictures, ctx)


def _begin_again(sample: Sample) -> None:
    sample.tokens = sample.tokens[: sample.prompt_length]
    sample.response_length, sample.response = 0, ""
    sample.loss_mask = sample.rollout_log_probs = None
    sample.weight_versions = []
    sample.metadata.pop(MCP, None)
