"""A worker's process: started on a device, asked for verdicts, killed when it is in doubt."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from slime_core.clusters.channel import end_of
from slime_kernelbench.service.devices import Device
from slime_kernelbench.service.frames import MAX_LINE, receive, send
from slime_kernelbench.types import KernelProblem

COMMAND = (sys.executable, "-m", "slime_kernelbench.service.worker")


class Lost(Exception):
    """A worker that answers no more, or whose device is in doubt."""


class JudgeWorker:
    """The server's end of a worker.

    Example:
        worker = await Worker.start(Device(name="cpu-0"), options={})
        data = await worker.judge(source, problem, seconds=300)     # a verdict as JSON
        await worker.kill()
    """

    def __init__(self, device: Device, process: asyncio.subprocess.Process) -> None:
        self.device, self.pid = device, process.pid
        self.passed = False  # the canary
        self._process = process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._hearing: asyncio.Task[None] | None = None
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    @classmethod
    async def start(
        cls, device: Device, *, options: Mapping[str, Any], secret: str = "", command: Sequence[str] = COMMAND
    ) -> JudgeWorker:
        """A process of ``command`` with one end of a socket as its last argument; ``secret`` is `Secret.text`.

        Raises:
            Lost: it cannot be started.
        """
        parent_end, child_end = socket.socketpair()
        try:
            with child_end:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(child_end.fileno()),
                    pass_fds=(child_end.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env={**os.environ, **device.environment()},
                    start_new_session=True,  # a Ctrl-C is for the server, which lets it finish
                )
        except OSError as error:
            parent_end.close()
            raise Lost(f"a worker cannot be started: {error}") from error
        worker = cls(device, process)
        worker._reader, worker._writer = await asyncio.open_connection(sock=parent_end, limit=MAX_LINE)
        try:
            gpus = {"judge_gpus": [device.gpu]} if device.gpu else {}
            await send(worker._writer, {"options": {**options, **gpus}, "secret": secret, "parent": os.getpid()})
        except ConnectionError as error:
            await worker.kill()
            raise Lost(f"a worker ended at its start: {error}") from error
        except asyncio.CancelledError:  # the pool closes
            await worker.kill()
            raise
        worker._hearing = asyncio.create_task(worker._hear())
        return worker

    async def judge(self, source: str, problem: KernelProblem, seconds: float) -> Any:
        """What the worker says of a candidate; several may be asked at once.

        Raises:
            Lost: it died, said nothing for ``seconds``, or said what is no message.
        """
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._futures[number] = answer
        try:
            async with asyncio.timeout(seconds):
                if self._hearing is None or not self._hearing.done():  # else nobody would hear an answer
                    await send(self._writer, {"id": number, "source": source, "problem": asdict(problem)})
                    return await answer
        except TimeoutError:
            raise Lost(f"its worker said nothing for {seconds:.0f} s") from None
        except ConnectionError:
            pass
        finally:
            del self._futures[number]
        raise Lost(f"its worker {end_of(await self._process.wait())}")

    async def _hear(self) -> None:
        """Hand answers to those who asked, until the worker is gone."""
        reason = ""
        try:
            while (answer := await receive(self._reader)) is not None:
                waiting = self._futures.get(answer["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer["verdict"])
            reason = end_of(await self._process.wait())
        except (ValueError, KeyError) as error:
            reason = f"sent an invalid answer: {error}"
        finally:
            for waiting in self._futures.values():
                if not waiting.done():
                    waiting.set_exception(Lost(f"its worker {reason or 'was given up'}"))

    async def kill(self) -> None:
        """End the process, which takes its sandbox with it, and wait for it."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
