"""The embedded engine in a process of its own: it answers Engine calls, many at once, and does nothing else.

    python -m slime_core.clusters.engine_process CALLS [BLOCKS] PARENT

CALLS and BLOCKS are descriptors of sockets to the process PARENT that started it: frames (`clusters.wire`) on the
first, descriptors of weight blocks on the second; without BLOCKS they arrive in frames. The first frame tells config,
threads and epoch; every later one is a block, or a call with a number, under which it is answered. The process ends
when PARENT closes the socket, or ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import traceback
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from slime_core.clusters.channel import die_with
from slime_core.clusters.looking import show_stacks
from slime_core.clusters.wire import receive, send
from slime_core.errors import EngineError, SlimeError
from slime_core.types import WeightUpdate

if TYPE_CHECKING:
    from slime_core.engines.local import LocalEngine
    from slime_core.weights.shared_memory import Listing, MappedBlock


class Answers:
    """Calls in, answers out, in the order in which they are ready."""

    def __init__(self, engine: LocalEngine, writer: asyncio.StreamWriter, blocks: socket.socket | None) -> None:
        self._engine, self._writer, self._blocks = engine, writer, blocks
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._block: MappedBlock | None = None
        self._sent: Any = None  # bytes of the last block that came in a frame

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the driver says ``close`` or is gone."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while (call := await receive(reader))["method"] != "close":
                if call["method"] == "cancel":
                    if task := self._tasks.get(call["args"][0]):
                        task.cancel()
                    continue
                if call["method"] == "block":
                    self._sent = call["args"][1]
                    continue
                number = call["number"]
                task = asyncio.create_task(self._answer(number, call["method"], call["args"]))
                self._tasks[number] = task
                task.add_done_callback(partial(self._forget, number))
        for task in list(self._tasks.values()):
            task.cancel()

    def _forget(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]

    async def _answer(self, number: int, method: str, args: list[Any]) -> None:
        try:
            answer = {"value": await self._call(method, args)}
        except SlimeError as error:
            answer = failure(error)
        except Exception as error:
            answer = failure(EngineError(f"{type(error).__name__}: {error}", code="ENG84"))
            traceback.print_exc()  # into the log
        engine = self._engine
        state = {"version": engine.version, "abilities": sorted(engine.abilities)}
        with suppress(ConnectionError):
            await send(self._writer, {"number": number, "state": state, **answer})

    async def _call(self, method: str, args: list[Any]) -> Any:
        engine = self._engine
        if method == "load":
            return await self._load(*args)
        if method in ("release", "reacquire"):
            return await getattr(engine, method)(set(args[0]))
        if method in ("generate", "score", "abort", "fingerprints", "pause", "resume"):
            return await getattr(engine, method)(*args)
        raise EngineError(f"no engine call is named {method!r}")

    async def _load(self, version: int, epoch: int, listing: Listing) -> None:
        tensors = await asyncio.to_thread(self._arrived, listing)
        await self._engine.load(WeightUpdate(version=version, epoch=epoch, transport="tensors", tensors=tensors))

    def _arrived(self, listing: Listing) -> Any:
        from slime_core.weights.shared_memory import MappedBlock, tensors_in

        if self._blocks is None:
            sent, self._sent = self._sent, None
            return tensors_in(sent, listing)
        if self._block is None or self._block.number != listing["block"]:
            self._block = None
            _, (fd,), _, _ = socket.recv_fds(self._blocks, 1, 1)
            self._block = MappedBlock(fd, listing)
        return self._block.tensors(listing)


def failure(error: SlimeError) -> dict[str, Any]:
    """The parts of an error as they cross."""
    return {"error": error.as_dict(), "kind": type(error).__name__}


async def serve(calls: socket.socket, blocks: socket.socket | None) -> None:
    """Build the engine and answer calls."""
    reader, writer = await asyncio.open_unix_connection(sock=calls)
    hello = await receive(reader)
    async with AsyncExitStack() as stack:
        try:
            engine = await _build(hello, stack)
        except SlimeError as error:
            await send(writer, failure(error))
            return
        answers = Answers(engine, writer, blocks)
        await send(writer, {"value": None, "state": {"version": -1, "abilities": sorted(engine.abilities)}})
        await answers.serve(reader)


async def _build(hello: dict[str, Any], stack: AsyncExitStack) -> LocalEngine:
    from slime_core.clusters.embedded import embedded_engine, open_folder
    from slime_core.config.schema import Config
    from slime_core.threads import TorchThread

    config = Config.model_validate_json(hello["config"])
    thread = TorchThread(hello["cpu_threads"])
    stack.callback(thread.close)
    folder = open_folder(config)
    return await stack.enter_async_context(embedded_engine(config, folder, thread, epoch=hello["epoch"]))


def main() -> None:
    """Serve until the driver is gone."""
    calls, *more, parent = map(int, sys.argv[1:])
    die_with(parent)
    show_stacks()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")  # to the log, as all output
    logging.getLogger("slime_core").setLevel(logging.INFO)
    try:
        asyncio.run(serve(socket.socket(fileno=calls), socket.socket(fileno=more[0]) if more else None))
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(0)  # the driver was gone before it had said anything


if __name__ == "__main__":
    main()
