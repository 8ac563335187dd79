"""The processes that play: requests to them, their deadlines, and episodes that go on where one has ended.

    Episode.play(action) -> GameProcess -> worker (slime_gym.worker)      one JSON line a request, one a response

A process answers in the order of the requests, so the first that waits is the one at work. Where it takes too long, or
ends the process, that episode has failed; the others are played again from their actions in the next process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import IO, Any

from slime_gym.games import GameError, GameTurn, Spec
from slime_gym.worker import OUT_OF_MEMORY

TICK = 1.0  # seconds between looks at the request at work; a stopped machine counts one
START_SECONDS = 120.0  # for the first response, before which libraries are imported
LONGEST_LINE = 1 << 24
TAIL = 2000  # characters of what a process said last


class Restarted(Exception):
    """The process ended at the work of another episode."""


class GameProcess:
    """One worker and the requests that it has not answered."""

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds, self._answered = seconds, False
        self._waiting: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._ticks = 0  # of the first of them
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the process
        self._socket, child_end = socket.socketpair()
        command = [sys.executable, "-m", "slime_gym.worker", str(child_end.fileno()), str(os.getpid()), str(memory)]
        with child_end:
            self._child = subprocess.Popen(
                command,
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=self._log,
                env=environment(),
            )
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.ended = False

    async def start(self) -> GameProcess:
        """Connect to it."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=LONGEST_LINE)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
        return self

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The response.

        Raises:
            GameError: the process ended at this request.
            Restarted: it ended at another.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self.tell(request)
        response: dict[str, Any] = await future
        return response

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send what has no response."""
        if self._writer is not None and not self.ended:
            self._writer.write(json.dumps(request).encode() + b"\n")

    async def close(self) -> None:
        """End it."""
        self._kill()
        if self._reading is not None:
            await self._reading
        self._child.wait()
        self._log.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, ValueError, IndexError):  # a reset connection, a line too long or that nobody asked for
            while line := await reader.readline():
                response = json.loads(line)
                future = self._waiting.popleft()
                self._ticks, self._answered = 0, True
                if not future.done():
                    future.set_result(response)
        self._end()

    @property
    def _limit(self) -> float:
        return self._seconds if self._answered else max(self._seconds, START_SECONDS)

    @property
    def _late(self) -> bool:
        return self._ticks * TICK >= self._limit

    def _end(self) -> None:
        """Blame the first request that waits; the others may ask another process."""
        self.ended = True
        self._timer.cancel()
        assert self._writer is not None
        self._writer.close()
        self._child.kill()
        code = self._child.wait()
        errors: list[Exception] = [self._reason(code)] if self._waiting else []
        errors += [Restarted() for _ in self._waiting]
        for future, error in zip(self._waiting, errors, strict=False):
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()

    def _reason(self, code: int) -> GameError:
        if code == OUT_OF_MEMORY:
            return GameError("the game ran out of memory", fix="raise plugin.gym.worker_memory_gb")
        if self._late:
            return GameError(f"the game did not answer in {self._limit:g} s", fix="raise plugin.gym.step_timeout")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - TAIL))
        return GameError(f"the game ended its process {how}", self._log.read().decode(errors="replace").strip())

    def _kill(self) -> None:
        """Have the reader end, also where a fork of the game's still holds the other end of the socket."""
        self._child.kill()
        if self._writer is not None:
            self._writer.transport.abort()

    def _tick(self) -> None:
        self._ticks = self._ticks + 1 if self._waiting else 0
        if self._late:
            self._kill()
        else:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)


class GameProcesses:
    """GameProcesses that share a run's episodes; each is started when first needed, and again when it has ended."""

    def __init__(self, count: int, seconds: float, memory: int) -> None:
        self._seconds, self._memory = seconds, memory
        self._slots: list[asyncio.Task[GameProcess] | None] = [None] * count
        self._episodes = 0

    def open(self, spec: Spec) -> Episode:
        """An episode; nothing is played before its first turn."""
        self._episodes += 1
        return Episode(spec, str(self._episodes), partial(self._process, self._episodes % len(self._slots)))

    async def close(self) -> None:
        """End every process."""
        for task in self._slots:
            if task is not None:
                await (await task).close()

    async def _process(self, slot: int) -> GameProcess:
        task = self._slots[slot]
        if task is not None and task.done() and task.result().ended:
            await task.result().close()
            task = None if self._slots[slot] is task else self._slots[slot]
        if task is None:
            starting = GameProcess(self._seconds, self._memory).start()
            task = self._slots[slot] = asyncio.get_running_loop().create_task(starting)
        return await asyncio.shield(task)


class Episode:
    """A game in a process; played again from its actions where that process has ended."""

    def __init__(self, spec: Spec, key: str, find: Callable[[], Awaitable[GameProcess]]) -> None:
        self._spec, self._key, self._find = spec, key, find
        self._actions: list[str] = []
        self._process: GameProcess | None = None  # where it is

    async def play(self, action: str | None = None) -> GameTurn:
        """The turn that follows an action; the first, without one.

        Raises:
            GameError: the game raised, took too long, or ended its process.
        """
        if action is not None:
            self._actions.append(action)
        while True:
            process = self._process
            if process is None or process.ended:
                process = self._process = await self._find()
                request = {"key": self._key, "spec": asdict(self._spec), "actions": self._actions}
            else:
                request = {"key": self._key, "actions": self._actions[-1:]}
            with suppress(Restarted):
                response = await process.ask(request)
                break
        if "error" in response:
            raise GameError(response["error"], response["why"], response["fix"])
        return GameTurn(**response)

    def close(self) -> None:
        """Forget it."""
        if self._process is not None:
            self._process.tell({"key": self._key, "close": True})


def described(spec: Spec, seconds: float = START_SECONDS) -> dict[str, Any]:
    """What is known of a game, by a process that ends then; blocks.

    Raises:
        GameError: it cannot be played here, or its process did not answer.
    """
    command = [sys.executable, "-m", "slime_gym.worker", "describe", json.dumps(asdict(spec))]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, env=environment(), check=False)
    except subprocess.TimeoutExpired as late:
        raise GameError(f"{spec.game} did not begin in {seconds:g} s") from late
    if not done.stdout:
        raise GameError(f"{spec.game} ended its process", done.stderr.decode(errors="replace")[-TAIL:].strip())
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise GameError(answer["error"], answer["why"], answer["fix"])
    return answer


def environment() -> dict[str, str]:
    """Variables of a process that plays: our import path, sets in the same order in every process, no screen."""
    fixed = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed, "NO_COLOR": "1", "SDL_VIDEODRIVER": "dummy"}
