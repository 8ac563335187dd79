"""The embedded engine in a process of its own, as a `protocols.Engine`: it generates while this process trains.

    generate, abort, ... --numbered frames--> engine_process --answers, as they are ready--> whoever waits
    load --block of memory (`weights.shared_memory`)--> "

The block is shared with a process on this machine; it is sent in a frame to one that was started elsewhere.

Where the process dies, every call that waits and every later one raises ENG84 with the exit code and the end of the
log; the requests that were in flight are lost with it. It needs the config and the model folder, no plugin.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from slime_core.clusters.channel import SILENT, Channel, Child, ProcessChannel, Start, end
from slime_core.clusters.hangs import Member
from slime_core.clusters.wire import Frame, encode
from slime_core.errors import EngineError, remade
from slime_core.protocols import Ability, PauseMode
from slime_core.weights.shared_memory import Listing, SharedBlock, checksums

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.config.schema import Config
    from slime_core.threads import TorchThread
    from slime_core.types import Completion, GenerateRequest, WeightCheck, WeightRoute, WeightUpdate

GRACE = 5.0
"""Seconds in which a process that was told to end, or that closed its socket, must be gone before it is killed."""

CLOSED = "the engine was closed"
PROCESS = "slime_core.clusters.engine_process"


class Sender:
    """Weights in a frame for engines elsewhere: made once an update, however many engines take it."""

    def __init__(self, thread: TorchThread) -> None:
        self._thread, self._block = thread, SharedBlock()
        self._lock = asyncio.Lock()
        self._made: tuple[WeightUpdate, Frame, Listing] | None = None

    async def frame(self, update: WeightUpdate) -> tuple[Frame, Listing]:
        """The frame of an update's tensors, and its listing."""
        async with self._lock:
            if self._made is None or self._made[0] is not update:
                self._made = None
                listing = await self._thread.run(self._block.fill, update.tensors)
                memory = np.frombuffer(self._block.memory, dtype=np.uint8)
                self._made = update, encode({"method": "block", "args": [listing, memory]}), listing
            return self._made[1:]

    def close(self) -> None:
        """Give the memory back."""
        self._made = None
        self._block.close()


class EngineProcess:
    """Implements `protocols.Engine` over one process; enter it with ``async with``.

    ``thread`` is the trainer's: weights are copied there, after the step that made them. With ``start`` the process is
    wherever that starts it, and ``sender`` makes the frames of its weights.

    Example:
        async with EngineProcess(config, run_dir=path, epoch=1, thread=thread) as engine:
            await engine.load(await trainer.publish(0))
            done = await engine.generate(request)
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: Path,
        epoch: int,
        thread: TorchThread,
        number: int = 0,
        start: Start | None = None,
        sender: Sender | None = None,
    ) -> None:
        self.version, self.epoch = -1, epoch
        self.abilities: frozenset[Ability] = frozenset()
        self._config, self._thread, self.number = config, thread, number
        self._start, self._sender = start, sender
        self.log = run_dir / "log" / f"engine-{number}.log"
        self._block = SharedBlock()
        self._sent = 0  # number of the block that the process has
        self._loading = asyncio.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._heard = 0.0  # when it last answered, or was first asked
        self._paused = False  # requests wait because they were told to
        self._lost = ""  # why no call can be answered any more
        self._dead: EngineError | None = None  # that says it with the end of the log
        self._channel: Channel | None = None
        self._blocks: socket.socket | None = None  # to a process on this machine
        self._listener: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the process; 0 before it is started."""
        return self._channel.pid if self._channel is not None else 0

    async def __aenter__(self) -> Self:
        env = _environment(self._config)
        if self._start is not None:
            child = Child(module=PROCESS, log=self.log, env=env)
            self._channel = await self._start(self.number, child)
        else:
            self._blocks, theirs = socket.socketpair()
            with theirs:
                child = Child(module=PROCESS, log=self.log, env={**env, **_visible(self._config, self.number)})
                self._channel = await ProcessChannel.start(child, theirs.fileno())
        try:
            await self._greet(self._channel)
        except BaseException:
            await self.__aexit__()
            raise
        self._listener = asyncio.create_task(self._listen(self._channel), name="slime-engine-process")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._lost = self._lost or CLOSED
        if (channel := self._channel) is not None:
            await end(channel, encode({"method": "close"}), GRACE)
        if self._blocks is not None:
            self._blocks.close()
        if self._listener is not None:
            await asyncio.gather(self._listener, return_exceptions=True)
        self._fail(EngineError(self._lost, code="ENG84"))
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
            if self._sender is not None:
                frame, listing = await self._sender.frame(update)
                await self._write(frame)
            else:
                listing = await self._thread.run(self._block.fill, update.tensors)
                if self._blocks is not None and self._sent != self._block.number and not self._lost:
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
        self._paused = True

    async def resume(self) -> None:
        """See `protocols.Engine`."""
        self._paused, self._heard = False, time.monotonic()
        await self._call("resume")

    async def release(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        await self._call("release", sorted(what))

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Engine`."""
        await self._call("reacquire", sorted(what))

    # -- calls and answers

    async def _greet(self, channel: Channel) -> None:
        hello = {
            "config": self._config.model_dump_json(),
            "cpu_threads": self._config.cluster.cpu_threads,
            "epoch": self.epoch,
        }
        try:
            await channel.write(encode(hello))
            answer = await channel.read()
        except ConnectionError:
            self._lost = await self._obituary(channel)
            raise await self._error(channel, self._lost) from None
        if "error" in answer:
            raise remade(answer["kind"], answer["error"], EngineError)
        self._note(answer["state"])

    async def _write(self, frame: Frame) -> None:
        if self._channel is not None:
            with suppress(ConnectionError):  # the listener knows more
                await self._channel.write(frame)

    async def _call(self, method: str, *args: Any) -> Any:
        if self._lost:
            raise self._dead or EngineError(self._lost, code="ENG84")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._heard = self._heard if self._waiting else time.monotonic()
        self._waiting[number] = future
        try:
            await self._write(encode({"number": number, "method": method, "args": list(args)}))
            return await future
        except asyncio.CancelledError:
            if not self._lost:
                await self._write(encode({"method": "cancel", "args": [number]}))
            raise
        finally:
            del self._waiting[number]

    async def _listen(self, channel: Channel) -> None:
        try:
            while True:
                self._settle(await channel.read())
        except ConnectionError:
            why = await self._obituary(channel)
        except Exception as error:
            why = f"the engine's process answered something unreadable: {error!r}"
        if not self._lost:
            self._dead = await self._error(channel, why)
            self._lost = why
            self._fail(self._dead)

    def members(self) -> list[Member]:
        """See `hangs.Watched`."""
        if self._channel is None:
            return []
        calls = len(self._waiting)
        doing = f"{calls} call{'s' * (calls != 1)}" if calls and not self._paused else ""
        return [Member(name=f"engine {self.number}", channel=self._channel, doing=doing, since=self._heard)]

    def _settle(self, answer: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        self._note(answer["state"])
        future = self._waiting.get(answer["number"])
        if future is None or future.done():
            return  # its caller has gone
        if "error" in answer:
            _fail(future, remade(answer["kind"], answer["error"], EngineError))
        else:
            future.set_result(answer["value"])

    def _note(self, state: dict[str, Any]) -> None:
        self.version, self.abilities = state["version"], frozenset(state["abilities"])

    def _fail(self, error: EngineError) -> None:
        for future in self._waiting.values():
            if not future.done():
                _fail(future, error)

    async def _error(self, channel: Channel, what: str) -> EngineError:
        return EngineError(
            what,
            code="ENG84",
            where=channel.log,
            why=await channel.tail() or SILENT,
            fix="what was finished is in the ledger: slime run --resume RUN_DIR",
            lost=True,
        )

    async def _obituary(self, channel: Channel) -> str:
        return f"the engine's process {channel.pid} {await self._end(channel) or 'closed its connection'}"

    async def _end(self, channel: Channel) -> str:
        """How the process ended; empty where it did not end by itself and was killed."""
        how = await channel.ended(GRACE)
        if not how:
            await channel.kill()
        return how


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End a call; a caller that is cancelled meanwhile never looks at it, and asyncio is not to print that."""
    future.set_exception(error)
    future.exception()


def _environment(config: Config) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(config.cluster.cpu_threads)}


def _visible(config: Config, number: int) -> dict[str, str]:
    """On a machine with more GPUs than the trainer uses, an engine sees one of those alone."""
    if config.cluster.device != "cuda":
        return {}
    import torch

    ranks = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    more = torch.cuda.device_count() - ranks
    if more <= 0:
        return {}
    place = ranks + number % more
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": visible[place] if visible else str(place)}
