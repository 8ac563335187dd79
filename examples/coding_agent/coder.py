"""A coding agent as functions by path: `generate`, `reward`, `demonstrate` (the warm-up), `run_done`.

    task -> bash: cat shop/core.py -> "def rate(n, k): ..." -> edit -> "edited" -> done -> hidden tests -> reward

The agent calls the run's model over its session as any other program would; its tools run in the sandbox.
"""

from __future__ import annotations

import json
from typing import Any

from workspace import Broken, Workspace, Workspaces

from slime_chat import Session, converse
from slime_compat.handlers import HttpError
from slime_core import Context, Group, Reward, Sample, Status
from slime_core.data.chat import encode, render
from slime_core.data.turns import Speech

MOST = 8  # answers of the model
AGENT_SECONDS = 600.0
WORKSPACES = Workspaces()
OVERFLOW = "context_length_exceeded"
TEXT = {"type": "string"}
PARAMETERS = {"bash": ("command",), "edit": ("path", "old", "new")}
DESCRIPTIONS = {"bash": "Run a command in the package's folder.", "edit": "Replace a text that occurs once in a file."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": DESCRIPTIONS[name],
            "parameters": {"type": "object", "properties": dict.fromkeys(names, TEXT), "required": list(names)},
        },
    }
    for name, names in PARAMETERS.items()
]


async def generate(group: Group, ctx: Context) -> Group:
    """Let an agent work on every sample, each in a workspace of its own, and test what it leaves."""

    async def agent(session: Session) -> None:
        sample = session.sample
        async with WORKSPACES.open(sample.metadata, ctx) as workspace:
            await solve(session, workspace)
            files = await workspace.files()
        sample.metadata["solved"] = await WORKSPACES.verify(sample.metadata, files, ctx)

    return await converse(group, ctx, agent, tolerate=(Broken,), agent_timeout=AGENT_SECONDS)


async def solve(session: Session, workspace: Workspace) -> None:
    """One dialogue, until an answer without calls or a limit ends it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": session.sample.prompt}]
    for _ in range(MOST):
        try:
            answer = await session.complete({"messages": messages, "tools": TOOLS})
        except HttpError as error:
            if error.fields.get("code") != OVERFLOW:
                raise
            return
        message = answer["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls") or ():
            result = await workspace.call(call["function"]["name"], arguments_of(call))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if messages[-1] is message:
            return


def arguments_of(call: dict[str, Any]) -> Any:
    """A call's arguments; None where they are no JSON."""
    try:
        return json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        return None


def reward(group: Group, ctx: Context) -> list[Reward]:
    """What the hidden tests say about the package that the agent left."""
    return [Reward(value=sample.metadata.get("solved", 0.0)) for sample in group.samples]


def demonstrate(groups: list[Group], ctx: Context) -> list[Group]:
    """The warm-up's rollout (`rollout_function_path`): traces of `make_tasks.py`; the pupil's words train."""
    speech = Speech(ctx.tokenizer, template=True)
    for group in groups:
        for sample in group.samples:
            text = render([{"role": "user", "content": sample.prompt}], ctx.tokenizer, template=True, where=sample.id)
            sample.tokens = encode(ctx.tokenizer, text)
            *turns, last = sample.metadata["trace"]
            for words, result in turns:
                answer = say(sample, words, ctx)
                sample.append_response(speech.between([{"role": "tool", "content": result}], answer), mask=0)
            say(sample, last, ctx)
            sample.status, sample.reward = Status.COMPLETED, 0.0
    return groups


def say(sample: Sample, text: str, ctx: Context) -> list[int]:
    """Append a pupil's answer; its ids."""
    ids = [*encode(ctx.tokenizer, text), ctx.tokenizer.eos_token_id]
    sample.append_response(ids, log_probs=[0.0] * len(ids), text=text)
    return ids


async def run_done(ctx: Context) -> None:
    """End the sandbox."""
    await WORKSPACES.aclose()
