"""Rewards in processes of their own: one that hangs, crashes or eats memory is killed, and one group is lost.

    @own_process                       facade -> Processes -> worker process (slime_core.plugins.worker)
    def slime_reward(group, ctx)                  one JSON line a request, one a response

Workers load the plugins by themselves, from the config; nothing is pickled. They are started when first needed, serve
one question at a time, and are killed at a deadline and with this process. ``ctx`` has no engine and no tokenizer
there, and what such a reward writes into a sample stays there.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginError, remade
from slime_core.plugins.boundary import HookImpl, HookThreads, Late, too_late, wrong
from slime_core.types import Group, Reward, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context

START_SECONDS = 120.0  # to import the plugins


class Gone(Exception):
    """The worker ended without a response."""


class IsolatedWorker:
    """One process and the socket to it. Make it on a thread that lasts: the process ends with that thread."""

    def __init__(self, config: Config) -> None:
        parent_end, child_end = socket.socketpair()
        command = [sys.executable, "-m", "slime_core.plugins.worker", str(child_end.fileno()), str(os.getpid())]
        with child_end:
            self.process = subprocess.Popen(command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL)
        self._file = parent_end.makefile("rwb")
        parent_end.close()
        self.config = config

    def load(self) -> None:
        """Load the plugins; blocks, and raises as :meth:`ask` and :func:`value_of`."""
        value_of(self.ask(json.dumps({"config": self.config.model_dump_json(), "path": sys.path})))

    def ask(self, request: str) -> dict[str, Any]:
        """The response to one line of JSON; blocks, and raises Gone where the process ended."""
        try:
            self._file.write(request.encode() + b"\n")
            self._file.flush()
            line = self._file.readline()
        except OSError as error:
            raise Gone from error
        if not line.endswith(b"\n"):
            raise Gone
        return json.loads(line)  # type: ignore[no-any-return]

    def kill(self) -> int:
        """End it now, and return its exit code."""
        self.process.kill()
        code = self.process.wait()
        with suppress(OSError):
            self._file.close()
        return code


def value_of(response: Mapping[str, Any]) -> Any:
    """The value of a worker's response; raises the SlimeError that it holds."""
    if "error" in response:
        raise remade(response["kind"], response["error"], PluginError)
    return response["value"]


class Processes:
    """Workers of a run, each with the config of its stage."""

    def __init__(self, most: int = 0) -> None:
        self._most = most or max(1, min(8, os.cpu_count() or 1))
        self._threads = HookThreads(2 * self._most)
        self._idle: list[IsolatedWorker] = []
        self._all: set[IsolatedWorker] = set()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def ask(self, impl: HookImpl, question: Mapping[str, Any], ctx: Context, about: str) -> list[Reward]:
        """A worker's rewards, within ``reward.reward_timeout``.

        Raises:
            PluginError: PLG57 the question is no JSON, PLG60 it was late and was killed, PLG62 it ended, or what the
                reward raised in it.
        """
        loop, deadline = asyncio.get_running_loop(), ctx.config.reward.reward_timeout
        facts = {"version": ctx.version, "stage": ctx.stage, "evaluation": ctx.evaluation}
        facts["run_dir"] = str(ctx.run_dir) if ctx.run_dir else None
        try:
            request = json.dumps({**question, **facts})
        except (TypeError, ValueError) as error:
            message, fix = "cannot run in a process", "keep JSON in metadata and labels: the sample travels as JSON"
            raise wrong(impl, message, about, code="PLG57", why=str(error), fix=fix) from error
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._most)
        async with self._slots[1]:
            worker = await self._take(impl, ctx.config, about)
            try:
                response = await self._threads.run(lambda: worker.ask(request), deadline)
            except BaseException as error:
                code = self._kill(worker)
                if isinstance(error, Late):
                    raise too_late(impl, about, deadline, "reward.reward_timeout", Late()) from None
                if isinstance(error, Gone):
                    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                    reason = "one reward is lost with it"
                    raise wrong(impl, f"ended its process {how}", about, code="PLG62", why=reason) from None
                raise
            self._idle.append(worker)
        return [Reward(**reward) for reward in value_of(response)]

    def close(self) -> None:
        """Kill every worker."""
        for worker in list(self._all):
            self._kill(worker)

    async def _take(self, impl: HookImpl, config: Config, about: str) -> IsolatedWorker:
        while self._idle:
            worker = self._idle.pop()
            if worker.config is config and worker.process.poll() is None:
                return worker
            self._kill(worker)
        worker = IsolatedWorker(config)
        self._all.add(worker)
        try:
            await self._threads.run(worker.load, START_SECONDS)
        except BaseException as error:
            self._kill(worker)
            if isinstance(error, (Late, Gone)):
                reason = f"it did not start: {error!r}"
                raise wrong(impl, "has no process", about, code="PLG60", why=reason) from error
            raise
        return worker

    def _kill(self, worker: IsolatedWorker) -> int:
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        return worker.kill()


INSIDE = "SLIME_REWARD_PROCESS"
"""Set in the environment of a worker."""


def group_question(group: Group) -> dict[str, Any]:
    """The question for a group's rewards."""
    samples = [_plain(sample) for sample in group.samples]
    return {"prompt": asdict(group.prompt), "samples": samples, "rollouts": list(group.rollouts.items())}


def sample_question(name: str, sample: Sample) -> dict[str, Any]:
    """The question for one sample's reward by a type."""
    return {"type": name, "sample": _plain(sample)}


def _plain(sample: Sample) -> dict[str, Any]:
    """A sample's fields without the arrays of its pictures, which no reward reads: it has their references."""
    arrays, sample.multimodal_train_inputs = sample.multimodal_train_inputs, None
    try:
        return Sample.to_dict(sample)
    finally:
        sample.multimodal_train_inputs = arrays
