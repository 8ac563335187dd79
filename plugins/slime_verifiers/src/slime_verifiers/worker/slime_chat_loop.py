"""A harness of verifiers: the dialogue of its `null` harness, in the environment's own process.

`null` starts a program for every episode, in an environment that `uv` builds from a package index. Here the same loop
runs where the environment runs: ask the model, call the tools that it names, and again until it names none.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

FULL = "context_length_exceeded"


class ChatLoop(vf.Harness[vf.HarnessConfig]):
    """See the module."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Talk until an answer calls no tool, or the context is full."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        headers = {"authorization": f"Bearer {secret}"}
        body: dict[str, Any] = {"model": ctx.model, "messages": messages}
        async with AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            body |= {"tools": tools} if tools else {}
            while True:
                status, answer = await _post(f"{endpoint}/chat/completions", headers, body)
                if status == 400 and FULL in answer:
                    trace.stop("max_total_tokens")
                    break
                if status != 200:
                    raise RuntimeError(f"the model call failed with {status}: {answer[:2000]}")
                message = json.loads(answer)["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                for call in message.get("tool_calls") or ():
                    content = await _denied(tool_interception_url, headers, call)
                    if content is None:
                        content = await _result(call["function"], dispatch, connections)
                    reply = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
                    messages.append(bound_tool_message({**reply, "content": content}))
                if not message.get("tool_calls"):
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _denied(url: str | None, headers: dict[str, str], call: dict[str, Any]) -> Any:
    """What the task's own hooks say in place of a tool's result, None where they let it run."""
    if not url:
        return None
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = function["arguments"]
    body = {"tool_call_id": call["id"], "name": function["name"], "arguments": arguments}
    status, answer = await _post(url, headers, body)
    decision: dict[str, Any] = json.loads(answer) if status == 200 else {"action": "stop", "reason": answer}
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    return decision["message"]["content"] if decision["action"] == "deny" else None


async def _post(url: str, headers: dict[str, str], body: dict[str, Any]) -> tuple[int, str]:
    async with _client().post(url, json=body, headers=headers) as response:
        return response.status, await response.text()


@cache
def _client() -> aiohttp.ClientSession:
    """One of the process, whose calls may take as long as the run lets them."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))


async def _result(function: dict[str, Any], dispatch: dict[str, Any], connections: dict[str, Any]) -> Any:
    """What a tool returns; a call that cannot be made is told to the model."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        return f"error: tool arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
    if function["name"] not in dispatch:
        return f"error: unknown tool {function['name']!r}"
    return await call_mcp(connections, dispatch, function["name"], arguments)


__all__ = ["ChatLoop"]
