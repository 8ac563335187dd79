"""Workspaces of agents, each a process of the run's sandbox; and the tests of what they leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from slime_core import Context
from slime_core.errors import SandboxError
from slime_sandbox import CandidateEnded, CandidateProcess, Limits, Policy, Sandbox

LIMITS = Limits(wall_seconds=600.0, cpu_seconds=300, memory_bytes=1 << 30)  # of an agent with all that it starts
TEST_SECONDS = 60.0
SHOWN = 2000  # characters of a tool's result that the model reads
AT_ONCE = 16  # processes in the sandbox
Task = Mapping[str, Any]
"""A row's metadata: ``files`` (path to text); ``module``, ``cases`` [function, arguments, repr], or ``tests``."""


class Broken(Exception):
    """The sandbox failed, and not what ran in it."""


class Workspace:
    """One agent's package and tools."""

    def __init__(self, child: CandidateProcess) -> None:
        self._child = child
        self.ended = ""  # why it takes no more calls

    async def call(self, name: str, arguments: Any) -> str:
        """The result of a tool, as the model reads it.

        Raises:
            Broken: the sandbox failed.
        """
        if name not in ("bash", "edit") or not isinstance(arguments, dict):
            return "no such tool: call bash or edit with named arguments"
        result = str(await self._ask(name, arguments))
        return result if len(result) <= SHOWN else f"{result[:SHOWN]}\n... {len(result) - SHOWN} characters left out"

    async def files(self) -> dict[str, str]:
        """The package as it is now; nothing where the workspace has ended.

        Raises:
            Broken: the sandbox failed.
        """
        texts = await self._ask("files", {})
        return texts if isinstance(texts, dict) else {}

    async def _ask(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if not self.ended:
            try:
                await self._child.send(json.dumps({"name": name, "arguments": arguments}).encode())
                return json.loads(await self._child.receive())
            except CandidateEnded as error:
                if error.outcome.status == "infra":
                    raise Broken(error.outcome.reason) from error
                self.ended = error.outcome.reason or "ended"
            except ValueError:
                self.ended = "sent what is no JSON"
        return f"the workspace is gone: it {self.ended}"


class Workspaces:
    """The sandbox of a run. Belongs to one event loop until :meth:`aclose`."""

    def __init__(self) -> None:
        self._opening: asyncio.Task[Sandbox] | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)

    @asynccontextmanager
    async def open(self, task: Task, ctx: Context) -> AsyncIterator[Workspace]:
        """A workspace with a task's files."""
        box = await self._sandbox(ctx)
        async with self._slots, box.spawn("workspace_inside:serve", limits=LIMITS) as child:
            await child.send(json.dumps(task["files"]).encode())
            yield Workspace(child)

    async def verify(self, task: Task, files: Mapping[str, str], ctx: Context) -> float:
        """The reward of a package: whether all hidden cases come out, or what the task's own tests wrote, from 0 to 1.

        It runs in a process of its own. Cases are compared here, so that no code of the package decides on them; tests
        of a task folder run beside the package, and what they write is their own claim.

        Raises:
            Broken: the sandbox failed.
        """
        cases = task.get("cases", ())
        request = {"files": files, "seconds": TEST_SECONDS, "calls": [case[:2] for case in cases]}
        request |= {name: task[name] for name in ("tests", "module") if name in task}
        box = await self._sandbox(ctx)
        async with self._slots:
            limits = Limits(wall_seconds=2 * TEST_SECONDS, memory_bytes=LIMITS.memory_bytes)
            outcome = await box.run("workspace_inside:verify", json.dumps(request).encode(), limits)
        if outcome.status == "infra":
            raise Broken(outcome.reason)
        try:
            answer = json.loads(outcome.result)
        except ValueError:
            return 0.0  # the package ended the process
        if "tests" not in task:
            return float(answer == [expected for *_, expected in cases])
        return reward_in(answer[1]) if len(answer) == 2 else 0.0

    async def aclose(self) -> None:
        """End the sandbox."""
        opening, self._opening = self._opening, None
        with suppress(SandboxError):  # it did not open, which is the error of the run already
            if opening is not None:
                await (await opening).aclose()

    async def _sandbox(self, ctx: Context) -> Sandbox:
        if self._opening is None:
            self._slots = asyncio.Semaphore(AT_ONCE)
            rules = ctx.config.reward
            policy = Policy(level=rules.sandbox_level, i_trust_this_code=rules.i_trust_this_code)
            self._opening = asyncio.ensure_future(Sandbox.open(policy, preload=("workspace_inside",)))
        return await asyncio.shield(self._opening)


def reward_in(text: str) -> float:
    """The number in a verifier's reward file, from 0 to 1; 0 where there is none.

    Example: reward_in('{"reward": 0.5}') == 0.5
    """
    try:
        value = json.loads(text)
        number = float(next(iter(value.values())) if isinstance(value, dict) else value)
    except (ValueError, TypeError, StopIteration, OverflowError, RecursionError):
        return 0.0
    return number if 0 <= number <= 1 else 0.0
