"""Trainer ranks as processes on this machine, behind one Trainer: calls go to all ranks, rank 0's answer counts."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slime_core import errors
from slime_core.clusters.parent import end_of
from slime_core.clusters.wire import receive, send
from slime_core.durable import FileMark
from slime_core.errors import SlimeError, TrainerError

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Role
    from slime_core.transfer import WeightRoute
    from slime_core.types import Batch, Columns, WeightUpdate

LOG_TAIL = 4000  # bytes of a dead rank's log in the error
CAUSE = 2.0  # seconds in which the other ranks may say what they know, once one has failed
POLL = 0.02  # seconds between questions whether ranks have written their files; steps go on between them


@dataclass(slots=True)
class Rank:
    """One process and the stream to it."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    log: Path


class RankTrainer:
    """Implements `protocols.Trainer` over N processes; enter it with ``async with``."""

    def __init__(
        self,
        config: Config,
        plugins: Plugins,
        *,
        world: int,
        device: str,
        cpu_threads: int,
        run_dir: Path,
        epoch: int = 0,
    ) -> None:
        self._epoch = epoch
        self._config, self._fingerprint = config, plugins.fingerprint()
        self._world, self._device, self._cpu_threads = world, device, cpu_threads
        self._run_dir, self._log_dir = run_dir, run_dir / "log"
        self._rendezvous = run_dir / "log" / f"rendezvous-{os.getpid()}"
        self._ranks: list[Rank] = []
        self._lock = asyncio.Lock()  # one call at a time: the loop and a checkpoint's task share the streams

    async def __aenter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        seen = self._run_dir / f".ranks-{secrets.token_hex(8)}"
        seen.write_text(seen.name)
        try:
            await self._greet(seen.name)
        except BaseException:
            for rank in self._ranks:  # some may wait for others that will never come
                rank.process.kill()
            await self.__aexit__()
            raise
        finally:
            seen.unlink(missing_ok=True)
        return self

    async def _greet(self, seen: str) -> None:
        """Start the ranks; each proves that it sees the run directory before any of them builds its model."""
        for number in range(self._world):
            self._ranks.append(await self._start(number))
        for number, rank in enumerate(self._ranks):
            hello = {
                "rank": number,
                "world": self._world,
                "config": self._config.model_dump_json(),
                "fingerprint": self._fingerprint,
                "device": self._device,
                "cpu_threads": self._cpu_threads,
                "rendezvous": str(self._rendezvous),
                "errors": str(self._run_dir / "errors"),
                "run_dir": str(self._seen_by(number)),
                "seen": seen,
            }
            await send(rank.writer, hello)
        await self._replies()
        await self._replies()

    def _seen_by(self, _: int) -> Path:
        """The run directory, as a rank's machine names it."""
        return self._run_dir

    async def __aexit__(self, *_: object) -> None:
        for rank in self._ranks:
            with suppress(ConnectionError, OSError):
                await send(rank.writer, {"method": "close"})
            rank.writer.close()
        for rank in self._ranks:
            try:
                await asyncio.to_thread(rank.process.wait, 5)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                await asyncio.to_thread(rank.process.wait)
        self._rendezvous.unlink(missing_ok=True)

    async def _start(self, number: int) -> Rank:
        ours, theirs = socket.socketpair()
        log = self._log_dir / f"rank-{number}.log"
        with theirs, log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "slime_core.clusters.rank", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(self._cpu_threads)},
                process_group=0,  # a terminal's Ctrl-C is for the driver
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return Rank(process=process, reader=reader, writer=writer, log=log)

    async def _all(self, method: str, *args: Any) -> Any:
        """Rank 0's answer, when all have answered."""
        return (await self._every(method, *args))[0]

    async def _every(self, method: str, *args: Any) -> list[Any]:
        """Every rank's answer. A caller that is cancelled leaves no answer behind in a stream."""
        return await asyncio.shield(asyncio.ensure_future(self._exchange(method, args)))

    async def _exchange(self, method: str, args: Sequence[Any]) -> list[Any]:
        async with self._lock:
            for rank in self._ranks:
                with suppress(ConnectionError):
                    await send(rank.writer, {"method": method, "args": list(args)})
            return await self._replies()

    async def _replies(self) -> list[Any]:
        waiting = [asyncio.create_task(self._reply(number)) for number in range(self._world)]
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        if pending:  # a rank that dies makes its peers fail: the one that died is the cause, whoever told first
            done, pending = await asyncio.wait(waiting, timeout=CAUSE)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        failed = [error for task in waiting if task in done and (error := task.exception()) is not None]
        if failed:
            raise next((error for error in failed if getattr(error, "code", "") == "TRN105"), failed[0])
        return [task.result() for task in waiting]

    async def _reply(self, number: int) -> Any:
        rank = self._ranks[number]
        try:
            answer = await receive(rank.reader)
        except (asyncio.IncompleteReadError, ConnectionError) as gone:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(rank.process.wait, CAUSE)
            raise TrainerError(
                f"trainer rank {number}, process {rank.process.pid}, {end_of(rank.process.returncode)}",
                code="TRN105",
                where=str(rank.log),
                why=rank.log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip() or "its log is empty",
                fix="what was finished is in the ledger: slime run --resume RUN_DIR",
            ) from gone
        if "error" in answer:
            with rank.log.open("a") as log:
                log.write(answer["trace"])
            kind: type[SlimeError] = getattr(errors, answer["kind"], TrainerError)
            raise kind(**answer["error"])
        return answer["value"]

    async def begin(self, stage: Config) -> None:
        """See `protocols.Trainer`."""
        await self._all("begin", stage.model_dump_json())

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """See `protocols.Trainer`."""
        if not roles:
            return {}
        answer: dict[str, Columns] = await self._all("score", batch, sorted(roles))
        return answer

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        answer: dict[str, float] = await self._all("step", batch)
        return answer

    async def verify(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`."""
        answer: dict[str, float] = await self._all("verify", batch)
        return answer

    async def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """See `protocols.Trainer`; without a route the tensors arrive through this process's memory."""
        answer: WeightUpdate = await self._all("publish", version, route)
        answer.epoch = self._epoch
        return answer

    async def save(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        await self._all("save", str(path))

    async def saved(self) -> dict[str, FileMark]:
        """See `protocols.Trainer`; every rank tells of its own files."""
        while True:
            answers = await self._every("written")
            if None not in answers:
                marks = {name: FileMark(**mark) for answer in answers for name, mark in answer.items()}
                return dict(sorted(marks.items()))
            await asyncio.sleep(POLL)

    async def fingerprint(self) -> str:
        """See `protocols.Trainer`."""
        answer: str = await self._all("fingerprint")
        return answer

    async def restore(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        await self._all("restore", str(path))

    async def export(self, path: Path) -> None:
        """See `protocols.Trainer`."""
        await self._all("export", str(path))

    async def release(self, what: set[str]) -> None:
        """See `protocols.Trainer`."""
        await self._all("release", sorted(what))

    async def reacquire(self, what: set[str]) -> None:
        """See `protocols.Trainer`."""
        await self._all("reacquire", sorted(what))


def processes(trainer: RankTrainer) -> Sequence[int]:
    """Process ids of the ranks."""
    return [rank.process.pid for rank in trainer._ranks]
