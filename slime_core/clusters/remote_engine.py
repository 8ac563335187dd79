"""The embedded engine in a process of its own, as a `protocols.Engine`: it generates while this process trains.

    generate, abort, ... --numbered frames--> engine_process --answers, as they are ready--> whoever waits
    load --block of shared memory (`weights.shared_memory`)--> "

Where the process dies, every call that waits and every later one raises ENG84 with the exit code and the end of the
log; the requests that were in flight are lost with it. It needs the config and the model folder, no plugin.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slime_core import errors
from slime_core.clusters.parent import end_of
from slime_core.clusters.wire import receive, send
from slime_core.errors import EngineError, SlimeError
from slime_core.protocols import Ability, PauseMode
from slime_core.weights.shared_memory import SharedBlock, checksums

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.threads import TorchThread
    from slime_core.transfer import Check as WeightCheck, WeightRoute
    from slime_core.types import Completion, GenerateRequest, WeightUpdate

GRACE = 5.0
"""Seconds in which a process that was told to end, or that closed its socket, must be gone before it is killed."""

LOG_TAIL = 4000  # bytes of a dead process's log in the error


class EngineProcess:
    """Implements `protocols.Engine` over one process; enter it with ``async with``.

    ``thread`` is the trainer's: weights are copied there, after the step that made them.

    Example:
        async with EngineProcess(config, run_dir=path, epoch=1, thread=thread) as engine:
            await engine.load(await trainer.publish(0))
            done = await engine.generate(request)
    """

    def __init__(self, config: Config, *, run_dir: Path, epoch: int, thread: TorchThread) -> None:
        self.version, self.epoch = -1, epoch
        self.abilities: frozenset[Ability] = frozenset()
        self._config, self._thread = config, thread
        self.log = run_dir / "log" / "engine-0.log"
        self._block = SharedBlock()
        self._sent = 0  # number of the block that the process has
        self._loading = asyncio.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._lost = ""  # why no call can be answered any more
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 before it is started."""
        return self._process.pid if self._process is not None else 0

    async def __aenter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        self._blocks, their_blocks = socket.socketpair()
        with theirs, their_blocks, self.log.open("ab") as out:
            fds = theirs.fileno(), their_blocks.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slime_core.clusters.engine_process", *map(str, (*fds, os.getpid()))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(self._config),
                process_group=0,  # a terminal's Ctrl-C is for the driver
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            await self._greet(reader)
        except BaseException:
            await self.__aexit__()
            raise
        self._listener = asyncio.create_task(self._listen(reader), name="slime-engine-process")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lost = self._lost or "the engine was closed"
        with suppress(ConnectionError):
            await send(self._writer, {"method": "close"})
        self._writer.close()
        self._blocks.close()
        await self._end()
        if self._listener is not None:
            await asyncio.gather(self._listener, return_exceptions=True)
        self._fail()
        self._block.close()

    # -- protocols.Engine

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `protocols.Engine`; a caller that is cancelled ends the request."""
        done: Completion = await self._call("generate", request)
        return done

    async def score(self, tokens: Sequence[int], start: int) -> NDArray[Any]:
        """See `protocols.Engine`."""
        found: NDArray[Any] = await self._call("score", [int(token) for token in tokens], start)
        return found

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """See `protocols.Engine`."""
        ended: list[Completion] = await self._call("abort", list(ids))
        return ended

    async def load(self, update: WeightUpdate) -> None:
        """See `protocols.Engine`; running requests go on, each token says its version.

        Where the trainer sent no checksums, the float32 tensors' go into ``update.fingerprints`` if that is also the
        dtype of compute: what the engine then serves must have them.

        Raises:
            EngineError: ENG83 tensors that did not arrive whole, ENG84 a dead process, ENG86 weights that do not fit.
        """
        async with self._loading:
            listing = await self._thread.run(self._block.fill, update.tensors)
            if self._sent != self._block.number and not self._lost:
                with suppress(OSError):  # where the process is gone, the call below says so
                    socket.send_fds(self._blocks, [b"w"], [self._block.fd])
                self._sent = self._block.number
            await self._call("load", update.version, update.epoch, listing)
        if not update.fingerprints and self._config.train.dtype == "float32":
            update.fingerprints = checksums(listing, "float32")

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """See `protocols.Engine`: weights cross in shared memory."""
        return None

    async def fingerprints(self) -> dict[str, str]:
        """See `protocols.Engine`."""
        found: dict[str, str] = await self._call("fingerprints")
        return found

    async def pause(self, mode: PauseMode) -> None:
        """See `protocols.Engine`."""
        await self._call("pause", mode)

    async def resume(self) -> None:
        """See `protocols.Engine`."""
        await self._call("resume")

    async def release(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        await self._call("release", sorted(what))

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        await self._call("reacquire", sorted(what))

    # -- calls and answers

    async def _greet(self, reader: asyncio.StreamReader) -> None:
        hello = {
            "config": self._config.model_dump_json(),
            "cpu_threads": self._config.cluster.cpu_threads,
            "epoch": self.epoch,
        }
        try:
            await send(self._writer, hello)
            answer = await receive(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lost = await self._obituary()
            raise self._error() from None
        if "error" in answer:
            raise _error_of(answer)
        self._note(answer["state"])

    async def _call(self, method: str, *args: Any) -> Any:
        if self._lost:
            raise self._error()
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            with suppress(ConnectionError):  # the listener knows more
                await send(self._writer, {"number": number, "method": method, "args": list(args)})
            return await future
        except asyncio.CancelledError:
            if not self._lost:
                with suppress(ConnectionError):
                    await send(self._writer, {"method": "cancel", "args": [number]})
            raise
        finally:
            del self._waiting[number]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._settle(await receive(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lost = self._lost or await self._obituary()
        except Exception as error:
            self._lost = self._lost or f"the engine's process answered something unreadable: {error!r}"
        self._fail()

    def _settle(self, answer: dict[str, Any]) -> None:
        self._note(answer["state"])
        future = self._waiting.get(answer["number"])
        if future is None or future.done():
            return  # its caller has gone
        if "error" in answer:
            future.set_exception(_error_of(answer))
        else:
            future.set_result(answer["value"])

    def _note(self, state: dict[str, Any]) -> None:
        self.version, self.abilities = state["version"], frozenset(state["abilities"])

    def _fail(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._error())

    def _error(self) -> EngineError:
        if self._process is None or self._lost == "the engine was closed":
            return EngineError(self._lost, code="ENG84")
        return EngineError(
            self._lost,
            code="ENG84",
            where=str(self.log),
            why=self.log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip() or "its log is empty",
            fix="what was finished is in the ledger: slime run --resume RUN_DIR",
        )

    async def _obituary(self) -> str:
        return f"the engine's process {self.pid} {end_of(await self._end())}"

    async def _end(self) -> int | None:
        """The exit code of the process; None where it did not end by itself and was killed."""
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            return None


def _error_of(answer: dict[str, Any]) -> SlimeError:
    kind: type[SlimeError] = getattr(errors, answer["kind"], EngineError)
    return kind(**answer["error"])


def _environment(config: Config) -> dict[str, str]:
    """The process's environment; on a machine with a GPU more than the trainer uses, it sees that one alone."""
    env = {**os.environ, "OMP_NUM_THREADS": str(config.cluster.cpu_threads)}
    if config.cluster.device == "cuda":
        import torch

        ranks = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
        if torch.cuda.device_count() > ranks:
            visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            env["CUDA_VISIBLE_DEVICES"] = visible[ranks] if visible else str(ranks)
    return env
