"""Tasks as prompts, episodes as samples, and what an environment said of them as rewards."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slime_core import ConfigError, Context, Group, Prompt, Reward, Sample, Status
from slime_core.errors import nearest
from slime_verifiers.options import EnvironmentOptions, Options
from slime_verifiers.pool import Failed, WorkerPool

if TYPE_CHECKING:
    from slime_chat import Session
    from slime_core.types import Message

TASK, HELDOUT = "verifiers", "_heldout"
EPISODE = "episode"
"""Key of a sample's metadata: ``trace``, as the worker sums it up, or ``failed``."""
POLICY = "policy"
OPENING = "(the environment speaks first)"


def environment_of(task: str, options: Options) -> tuple[EnvironmentOptions, bool]:
    """The environment of a task, and whether the task is its evaluation.

    Raises:
        ConfigError: CFG05 no such task.
    """
    environments: dict[str, EnvironmentOptions] = {TASK: options, "default": options} if options.env else {}
    environments |= options.environments
    name = task.removesuffix(HELDOUT) if task not in environments else task
    if name not in environments:
        raise ConfigError(
            f"verifiers has no task {task!r}",
            code="CFG05",
            where="data.tasks or eval.eval_tasks",
            fix=nearest(task, list(environments)) or f"use {', '.join(sorted(environments))}, or one with {HELDOUT}",
        )
    return environments[name], name != task


class EnvironmentTasks:
    """The tasks of an environment, or of its evaluation, by number."""

    def __init__(self, pool: WorkerPool, environment: EnvironmentOptions, *, evaluation: bool) -> None:
        self._pool, self._environment = pool, environment
        self._evaluation = evaluation and not environment.splits
        count = pool.load(environment, evaluation=self._evaluation)
        heldout = environment.heldout if environment.splits else 0
        heldout = heldout if count is None else min(heldout, count // 2)
        self._first = 0 if evaluation else heldout
        self._count = count
        if evaluation and environment.splits:
            self._count = heldout
            if not heldout:
                raise ConfigError(
                    f"no task of {environment.env} is left for evaluation",
                    code="CFG05",
                    where="plugin.verifiers.heldout",
                    why=f"heldout is {environment.heldout}; tasks: {'endless' if count is None else count}",
                    fix="--heldout 16   or --eval-env-args JSON with tasks of its own",
                )
        elif count is not None:
            self._count = count - self._first

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("the environment's tasks do not end")
        return self._count

    def at(self, position: int) -> Prompt:
        """The task at ``position``; the core sets its id and tokens."""
        row = self._first + position
        data = self._pool.task(self._environment, row, evaluation=self._evaluation)
        return Prompt(id=str(data.get("id") or ""), position=position, prompt=messages_of(data), metadata={"row": row})

    def state(self) -> dict[str, Any]:
        """The environment's block, the rows of it, and a digest of the first."""
        first = self._pool.task(self._environment, self._first, evaluation=self._evaluation)
        digest = hashlib.blake2b(json.dumps(first, sort_keys=True).encode(), digest_size=8).hexdigest()
        block = self._environment.served(evaluation=self._evaluation)
        return {"env": block, "rows": self._count, "first": self._first, "digest": digest}


def messages_of(data: Mapping[str, Any]) -> list[Message]:
    """How a task begins, as far as it is known before the environment speaks."""
    prompt = data.get("prompt")
    messages: list[Message] = []
    if data.get("system_prompt"):
        messages.append({"role": "system", "content": data["system_prompt"]})
    for message in prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt or OPENING}]:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        messages.append({"role": message["role"], "content": content})
    return messages


async def play(group: Group, ctx: Context, pool: WorkerPool) -> Group:
    """An episode for every pending sample, each in a session of its own."""
    from slime_chat import converse

    options: Options = ctx.options
    environment, evaluation = environment_of(group.prompt.task, options)
    evaluation = evaluation and not environment.splits
    row = group.prompt.metadata["row"]
    task = await asyncio.to_thread(pool.task, environment, row, evaluation=evaluation)

    async def one(session: Session) -> None:
        try:
            result = await pool.episode(environment, task, session, options.episode_seconds, evaluation=evaluation)
            session.sample.metadata[EPISODE] = {"traces": result["traces"]}
        except Failed as error:
            session.sample.metadata[EPISODE] = {"failed": str(error)}

    done = await converse(group, ctx, one, tool_parser=options.tool_parser, leave_out=options.leave_out)
    for sample in done.samples:
        note_trace(sample)
    return done


def note_trace(sample: Sample) -> None:
    """Give a sample the trace under whose name it spoke, and that trace's agent and status."""
    episode = sample.metadata.get(EPISODE, {})
    traces = {trace["id"]: trace for trace in episode.get("traces", ())}
    if sample.role == POLICY and len(traces) == 1:  # the model was never asked
        (sample.role,) = traces
    trace = traces.get(sample.role)
    sample.role = POLICY
    if trace is None:
        return
    sample.metadata[EPISODE] = {"trace": {name: value for name, value in trace.items() if name != "id"}}
    if len({trace["agent"] for trace in traces.values()}) > 1:
        sample.role = trace["agent"]
        sample.remove_sample = not trace["trainable"]
    if trace["truncated"] and sample.status is Status.COMPLETED:
        sample.status = Status.TRUNCATED


def reward_of(sample: Sample) -> Reward:
    """An episode's reward with the environment's rewards and metrics as terms; what failed was not judged."""
    episode = sample.metadata.get(EPISODE, {"failed": "no episode was played"})
    if "failed" in episode:
        return Reward(value=0.0, kind="infra_error", reason=episode["failed"])
    if "trace" not in episode:
        return Reward(value=0.0, kind="infra_error", reason="an attempt that the environment made again")
    trace = episode["trace"]
    return Reward(value=trace["reward"], terms={**trace["metrics"], **trace["rewards"]})
