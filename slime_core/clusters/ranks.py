"""Trainer ranks as processes, behind one Trainer: calls go to all ranks, rank 0's answer counts.

    step, score:  Batch --Partitioner--> a RankBatch a data-parallel rank --one frame, put once--> its ranks
    other calls:  one frame for all

    python -m slime_core.clusters.ranks CALLS PARENT         is one rank: `RankService`

A rank that fails alone leaves the others in a collective that never ends: they are ended, and its error is the call's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slime_core.clusters.channel import Child, Frame, Start, start_here
from slime_core.clusters.embedded import open_folder
from slime_core.clusters.hangs import Member, within
from slime_core.clusters.proxy import RESUME, Proxy, Service, forwarded, request, run
from slime_core.config.presets import settle
from slime_core.errors import PluginError, SlimeError, StorageError, TrainerError
from slime_core.plugins import load_plugins
from slime_core.plugins.backends import trainer_of
from slime_core.protocols import Trainer
from slime_core.threads import TorchThread
from slime_core.trainers.data_parallel import by_number

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.durable import FileMark
    from slime_core.plugins import Plugins
    from slime_core.protocols import Role
    from slime_core.trainers.data_parallel import DataParallelRank, Partitioner, RankBatch
    from slime_core.types import Batch, Columns, WeightRoute, WeightUpdate

RANK = "slime_core.clusters.ranks"
GONE = "TRN105"
CAUSE = 2.0  # seconds in which the other ranks may say what they know, once one has failed
LOOK = 10.0  # seconds in which a rank that does not answer must show that it lives, once another has failed
POLL = 0.02  # seconds between questions whether ranks have written their files; steps go on between them
BEGIN = "its start"
START = 900.0  # seconds that it may take, whatever a later call may


class RankTrainer:
    """Implements `protocols.Trainer` over N processes; enter it with ``async with``.

    ``start`` says where they live. Ranks of one machine meet in a file; those of several at ``address``, rank 0's.
    """

    def __init__(
        self,
        config: Config,
        plugins: Plugins,
        *,
        world: int,
        run_dir: Path,
        epoch: int = 0,
        start: Start = start_here,
        address: str = "",
    ) -> None:
        self._epoch = epoch
        self._config, self._plugins = config, plugins
        self._dp_ranks: list[DataParallelRank] = []
        self._partitioner: Partitioner  # of the stage that has begun
        self._world, self._run_dir = world, run_dir
        self._rendezvous = run_dir / "log" / f"rendezvous-{os.getpid()}"
        self._start, self._address = start, address
        self._ranks: list[Proxy] = []
        self._numbers = count(1)
        self._ended: SlimeError | None = None  # why no rank answers any more
        self._phase, self._since = "", 0.0  # the call under way, and when it began
        self._lock = asyncio.Lock()  # one call at a time: the loop and a checkpoint's task share the ranks

    async def __aenter__(self) -> Self:
        (self._run_dir / "log").mkdir(parents=True, exist_ok=True)
        marker = self._run_dir / f".ranks-{secrets.token_hex(8)}"
        marker.write_text(marker.name)
        try:
            await self._greet(marker.name)
        except BaseException:
            for rank in self._ranks:  # some may wait for others that will never come
                await rank.channel.kill()
            await self.__aexit__()
            raise
        finally:
            marker.unlink(missing_ok=True)
        return self

    async def _greet(self, marker: str) -> None:
        """Start the ranks; each proves that it sees the run directory before any of them builds its model."""
        env = {"OMP_NUM_THREADS": str(self._config.cluster.cpu_threads)}
        for number in range(self._world):
            log = self._run_dir / "log" / f"rank-{number}.log"
            channel = await self._start(number, Child(module=RANK, log=log, env=env))
            title = f"trainer rank {number}, process {channel.pid},"
            self._ranks.append(Proxy(channel, title, TrainerError, GONE))
        hello = {
            "world": self._world,
            "config": self._config,
            "fingerprint": self._plugins.fingerprint(),
            "seen": marker,
            "rendezvous": str(self._rendezvous),
            "address": self._address,
        }
        args = [({"rank": number, **hello}, self._seen_by(number)) for number in range(self._world)]
        met, *_ = await self._ask("meet", args, range(self._world), BEGIN)
        self._dp_ranks = await self._every("join", met, self._run_dir / "errors", phase=BEGIN)

    def _seen_by(self, _: int) -> Path:
        """The run directory, as a rank's machine names it."""
        return self._run_dir

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(rank.close() for rank in self._ranks))
        self._rendezvous.unlink(missing_ok=True)

    def members(self) -> list[Member]:
        """See `hangs.Watched`."""
        patience = START if self._phase == BEGIN else 0.0
        return [
            Member(
                name=f"rank {number}",
                channel=rank.channel,
                doing=self._phase if rank.waiting else "",
                since=self._since,
                patience=patience,
            )
            for number, rank in enumerate(self._ranks)
        ]

    async def call(self, method: str, *args: Any) -> Any:
        """Rank 0's answer, when all have answered."""
        return (await self._every(method, *args))[0]

    async def _every(self, method: str, *args: Any, phase: str = "") -> list[Any]:
        """Every rank's answer to the same."""
        return await self._ask(method, [args], [0] * self._world, phase or method)

    async def _scatter(self, phase: str, rank_batches: Sequence[RankBatch], *args: Any) -> list[Any]:
        """Every rank's answer, each sent its own rank batch."""
        numbers = [rank.number for rank in self._dp_ranks]
        return await self._ask(phase, [(rank_batch, *args) for rank_batch in rank_batches], numbers, phase)

    async def _ask(self, method: str, args: Sequence[Sequence[Any]], which: Sequence[int], phase: str) -> list[Any]:
        """Every rank's answer, each asked with those of ``args`` that ``which`` says: one frame, however many get it.

        A caller that is cancelled leaves no rank behind the others.
        """
        number = next(self._numbers)
        frames = await asyncio.to_thread(lambda: [request(number, method, *values) for values in args])
        exchange = self._exchange(phase, number, [frames[one] for one in which])
        return await asyncio.shield(asyncio.ensure_future(exchange))

    async def _exchange(self, phase: str, number: int, frames: Sequence[Frame]) -> list[Any]:
        """Every rank's answer to its frame. An error is the first that was told, with its rank.

        A rank that dies makes its peers fail: the one that died is the cause, whoever told first.
        """
        async with self._lock:
            if self._ended is not None:
                raise TrainerError(
                    f"the trainer's ranks were ended, none can answer {phase}",
                    code=GONE,
                    where=self._ended.where,
                    why=str(self._ended),
                    fix=RESUME,
                    lost=self._ended.lost,
                ) from self._ended
            errors: list[tuple[int, SlimeError]] = []
            self._phase, self._since = phase, time.monotonic()
            replies = [self._reply(rank, number, frame, errors) for rank, frame in enumerate(frames)]
            waiting = [asyncio.create_task(one) for one in replies]
            _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                _, pending = await asyncio.wait(waiting, timeout=CAUSE)
            if pending:
                await self._lost(waiting, errors)
                pending = {task for task in waiting if not task.done()}
            for task in pending:
                task.cancel()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            self._phase = ""
            if not errors:
                return [task.result() for task in waiting]
            first, error = next((one for one in errors if one[1].code == GONE), errors[0])
            if len(errors) < self._world and f"rank {first}" not in f"{error.what} {error.where}":
                place = f"trainer rank {first} of {self._world}, in {phase}"
                error.where = f"{place}: {error.where}" if error.where else place
            if pending or error.code == GONE:
                self._ended = error
                for rank in self._ranks:
                    await rank.channel.kill()
            if pending:
                others = ", ".join(str(n) for n, one in enumerate(results) if isinstance(one, asyncio.CancelledError))
                waited = f"ranks that waited for it, and were ended: {others}"
                error.why = "\n".join(filter(None, [error.why, waited]))
            raise error

    async def _lost(self, waiting: Sequence[asyncio.Task[Any]], errors: list[tuple[int, SlimeError]]) -> None:
        """Tell of ranks that cannot answer: their peers may know of a machine's loss before this process does."""
        quiet = [number for number, task in enumerate(waiting) if not task.done()]
        ends = await asyncio.gather(*(within(LOOK, self._ranks[number].channel.ended(0.0)) for number in quiet))
        for number, how in zip(quiet, ends, strict=True):
            channel = self._ranks[number].channel
            if waiting[number].done() or how == "":  # it lives
                continue
            error = TrainerError(
                f"trainer rank {number}, process {channel.pid}, {how or f'was lost: {channel.node} does not answer'}",
                code=GONE,
                where=channel.log,
                why="\n".join(f"rank {other}: {one.what}" for other, one in errors),
                fix=RESUME,
                lost=True,
            )
            errors.append((number, error))

    async def _reply(self, rank: int, number: int, frame: Frame, errors: list[tuple[int, SlimeError]]) -> Any:
        try:
            return await self._ranks[rank].ask(number, frame)
        except SlimeError as error:
            error.where = error.where or self._ranks[rank].channel.log
            errors.append((rank, error))
            raise

    async def begin(self, stage: Config) -> None:
        """See `protocols.Trainer`."""
        from slime_core.trainers.data_parallel import Partitioner

        await self.call("begin", stage)
        train = settle(stage.train)
        settled = stage.model_copy(update={"train": train})
        self._partitioner = Partitioner(settled, self._plugins.loss(train.loss_type), self._dp_ranks[0])

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """See `protocols.Trainer`; every rank scores its own samples."""
        if not roles:
            return {}
        rank_batches = await asyncio.to_thread(self._partitioner.partition, batch)
        answers = await self._scatter("score", rank_batches, roles)
        numbered = [(rank.number, answer) for rank, answer in zip(self._dp_ranks, answers, strict=True)]
        return self._partitioner.join(batch, rank_batches, by_number(len(rank_batches), numbered))

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`; every rank trains on its own samples."""
        rank_batches = await asyncio.to_thread(self._partitioner.partition_step, batch)
        answer: dict[str, float] = (await self._scatter("step", rank_batches))[0]
        return answer

    async def publish(self, version: int, route: WeightRoute | None = None) -> WeightUpdate:
        """See `protocols.Trainer`; without a route the tensors arrive through this process's memory."""
        answer: WeightUpdate = await self.call("publish", version, route)
        answer.epoch = self._epoch
        return answer

    async def saved(self) -> dict[str, FileMark]:
        """See `protocols.Trainer`; every rank tells of its own files."""
        while True:
            answers = await self._every("written")
            if None not in answers:
                return dict(sorted((name, mark) for answer in answers for name, mark in answer.items()))
            await asyncio.sleep(POLL)

    verify = forwarded(Trainer.verify)  # every rank computes all of the batch, the slow way
    save, restore, export = forwarded(Trainer.save), forwarded(Trainer.restore), forwarded(Trainer.export)
    fingerprint = forwarded(Trainer.fingerprint)
    release, reacquire = forwarded(Trainer.release), forwarded(Trainer.reacquire)


class RankService(Service):
    """One rank in its process; ``target`` is its trainer, a class of `backends.TrainerBackend`."""

    async def meet(self, hello: dict[str, Any], run_dir: Path) -> str:
        """Read back what the driver has just written into the run directory; where the ranks meet.

        That is a file in the folder, or, where the driver gives rank 0 an address to meet at, a port there.

        Raises:
            StorageError: STO200 this rank sees another folder, or none: a checkpoint would lack its part.
        """
        self._hello = hello
        try:
            text = (run_dir / hello["seen"]).read_text()
        except OSError as error:
            text = error.strerror or str(error)
        if text != hello["seen"]:
            raise StorageError(
                f"trainer rank {hello['rank']} does not see the run directory",
                code="STO200",
                where=f"{run_dir} on {socket.gethostname()}",
                why=f"{hello['seen']}, which the driver wrote there: {text}",
                fix="choose a folder that all ranks share: --run-dir DIR",
            )
        if hello["rank"] == 0 and hello["address"]:
            from slime_core.trainers.process_group import open_rendezvous

            return open_rendezvous(hello["address"], hello["world"])
        return str(hello["rendezvous"])

    async def join(self, place: str, errors: Path) -> DataParallelRank:
        """Make the trainer, when all are at ``place``; return its data-parallel rank, which the driver needs."""
        hello, config = self._hello, self._hello["config"]
        plugins = load_plugins(config)
        if plugins.fingerprint() != hello["fingerprint"]:
            raise PluginError(
                f"rank {hello['rank']} loaded other plugins than the driver",
                why=f"fingerprints {plugins.fingerprint()} and {hello['fingerprint']}",
                fix="install the same plugin versions for every process",
            )
        thread = TorchThread(config.cluster.cpu_threads)
        self.stack.callback(thread.close)
        self.target = trainer_of(config).trainer()(
            config,
            plugins,
            open_folder(config),
            thread=thread,
            rank=hello["rank"],
            world=hello["world"],
            device=config.cluster.device,
            rendezvous=place,
            errors=errors,
        )
        dp_rank: DataParallelRank = self.target.dp_rank
        return dp_rank


if __name__ == "__main__":
    run(RankService)
