"""Trainer ranks as processes, behind one Trainer: calls go to all ranks, rank 0's answer counts.

    step, score:  Batch --Dealer--> a Portion a data-parallel rank --one frame, put once--> the ranks of its model
    other calls:  one frame for all

A rank that fails alone leaves the others in a collective that never ends: they are ended, and its error is the call's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slime_core.clusters.channel import SILENT, Channel, Child, Start, end, start_here, within
from slime_core.clusters.hangs import Member
from slime_core.clusters.wire import Frame, encode
from slime_core.config.algorithms import settle
from slime_core.durable import FileMark
from slime_core.errors import SlimeError, TrainerError, remade
from slime_core.trainers.portion import by_number

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.plugins import Plugins
    from slime_core.protocols import Role
    from slime_core.trainers.dealing import Dealer
    from slime_core.trainers.portion import Portion, Seat
    from slime_core.types import Batch, Columns, WeightRoute, WeightUpdate

RANK = "slime_core.clusters.rank"
GRACE = 5.0  # seconds in which ranks that were told to end must be gone before they are killed
CAUSE = 2.0  # seconds in which the other ranks may say what they know, once one has failed
LOOK = 10.0  # seconds in which a rank that does not answer must show that it lives, once another has failed
POLL = 0.02  # seconds between questions whether ranks have written their files; steps go on between them
BEGIN = "its start"
START = 900.0  # seconds that it may take, whatever a later call may
GONE = "closed its connection"
RESUME = "what was finished is in the ledger: slime run --resume RUN_DIR"


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
        device: str,
        cpu_threads: int,
        run_dir: Path,
        epoch: int = 0,
        start: Start = start_here,
        address: str = "",
    ) -> None:
        self._epoch = epoch
        self._config, self._plugins, self._fingerprint = config, plugins, plugins.fingerprint()
        self._seats: list[Seat] = []
        self._dealer: Dealer | None = None
        self._world, self._device, self._cpu_threads = world, device, cpu_threads
        self._run_dir, self._log_dir = run_dir, run_dir / "log"
        self._rendezvous = run_dir / "log" / f"rendezvous-{os.getpid()}"
        self._start, self._address = start, address
        self._ranks: list[Channel] = []
        self._ended: SlimeError | None = None  # why no rank answers any more
        self._asked, self._since = "", 0.0  # the call under way, and when it began
        self._answered: set[int] = set()  # ranks that have answered it
        self._lock = asyncio.Lock()  # one call at a time: the loop and a checkpoint's task share the streams

    async def __aenter__(self) -> Self:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        seen = self._run_dir / f".ranks-{secrets.token_hex(8)}"
        seen.write_text(seen.name)
        try:
            await self._greet(seen.name)
        except BaseException:
            for rank in self._ranks:  # some may wait for others that will never come
                await rank.kill()
            await self.__aexit__()
            raise
        finally:
            seen.unlink(missing_ok=True)
        return self

    async def _greet(self, seen: str) -> None:
        """Start the ranks; each proves that it sees the run directory before any of them builds its model."""
        env = {"OMP_NUM_THREADS": str(self._cpu_threads)}
        for number in range(self._world):
            log = self._log_dir / f"rank-{number}.log"
            self._ranks.append(await self._start(number, Child(module=RANK, log=log, env=env)))
        for number, rank in enumerate(self._ranks):
            hello = {
                "rank": number,
                "world": self._world,
                "config": self._config.model_dump_json(),
                "fingerprint": self._fingerprint,
                "device": self._device,
                "cpu_threads": self._cpu_threads,
                "rendezvous": str(self._rendezvous),
                "address": self._address,
                "errors": str(self._run_dir / "errors"),
                "run_dir": str(self._seen_by(number)),
                "seen": seen,
            }
            with suppress(ConnectionError):  # the answer that does not come says more
                await rank.write(encode(hello))
        place, *_ = await self._replies(BEGIN)
        for rank in self._ranks:
            with suppress(ConnectionError):
                await rank.write(encode({"rendezvous": place}))
        self._seats = await self._replies(BEGIN)

    def _seen_by(self, _: int) -> Path:
        """The run directory, as a rank's machine names it."""
        return self._run_dir

    async def __aexit__(self, *_: object) -> None:
        close = encode({"method": "close"})
        await asyncio.gather(*(end(rank, close, GRACE) for rank in self._ranks))
        self._rendezvous.unlink(missing_ok=True)

    def members(self) -> list[Member]:
        """See `hangs.Watched`."""
        patience = START if self._asked == BEGIN else 0.0
        return [
            Member(
                name=f"rank {number}",
                channel=rank,
                doing="" if number in self._answered else self._asked,
                since=self._since,
                patience=patience,
            )
            for number, rank in enumerate(self._ranks)
        ]

    async def _all(self, method: str, *args: Any) -> Any:
        """Rank 0's answer, when all have answered."""
        return (await self._every(method, *args))[0]

    async def _every(self, method: str, *args: Any) -> list[Any]:
        """Every rank's answer."""
        return await self._each(method, [encode({"method": method, "args": list(args)})] * self._world)

    async def _dealt(self, method: str, portions: Sequence[Portion], *args: Any) -> list[Any]:
        """Every rank's answer, each asked about its own portion; one frame a portion, however many ranks get it."""

        def frames() -> list[Frame]:
            return [encode({"method": method, "args": [portion, *args]}) for portion in portions]

        mine = await asyncio.to_thread(frames)
        return await self._each(method, [mine[seat.number] for seat in self._seats])

    async def _each(self, method: str, frames: Sequence[Frame]) -> list[Any]:
        """Every rank's answer to its frame. A caller that is cancelled leaves no answer behind in a stream."""
        return await asyncio.shield(asyncio.ensure_future(self._exchange(method, frames)))

    async def _exchange(self, method: str, frames: Sequence[Frame]) -> list[Any]:
        async with self._lock:
            if self._ended is not None:
                raise TrainerError(
                    f"the trainer's ranks were ended, none can answer {method}",
                    code="TRN105",
                    where=self._ended.where,
                    why=str(self._ended),
                    fix=RESUME,
                    lost=self._ended.lost,
                ) from self._ended
            await asyncio.gather(*(_write(rank, frame) for rank, frame in zip(self._ranks, frames, strict=True)))
            return await self._replies(method)

    async def _replies(self, phase: str) -> list[Any]:
        """Every rank's answer to what was sent last. An error is the first that was told, with its rank.

        A rank that dies makes its peers fail: the one that died is the cause, whoever told first.
        """
        told: list[tuple[int, SlimeError]] = []
        self._asked, self._since, self._answered = phase, time.monotonic(), set()
        waiting = [asyncio.create_task(self._reply(number, told)) for number in range(self._world)]
        _, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        if pending:
            _, pending = await asyncio.wait(waiting, timeout=CAUSE)
        if pending:
            await self._lost(waiting, told)
            pending = {task for task in waiting if not task.done()}
        for task in pending:
            task.cancel()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        self._asked = ""
        if not told:
            return [task.result() for task in waiting]
        number, error = next((one for one in told if one[1].code == "TRN105"), told[0])
        if len(told) < self._world and f"rank {number}" not in f"{error.what} {error.where}":
            place = f"trainer rank {number} of {self._world}, in {phase}"
            error.where = f"{place}: {error.where}" if error.where else place
        if pending or error.code == "TRN105":
            self._ended = error
            for rank in self._ranks:
                await rank.kill()
        if pending:
            others = ", ".join(str(n) for n, one in enumerate(found) if isinstance(one, asyncio.CancelledError))
            error.why = "\n".join(filter(None, [error.why, f"ranks that waited for it, and were ended: {others}"]))
        raise error

    async def _lost(self, waiting: Sequence[asyncio.Task[Any]], told: list[tuple[int, SlimeError]]) -> None:
        """Tell of ranks that cannot answer: their peers may know of a machine's loss before this process does."""
        quiet = [number for number, task in enumerate(waiting) if not task.done()]
        ends = await asyncio.gather(*(within(LOOK, self._ranks[number].ended(0.0)) for number in quiet))
        for number, how in zip(quiet, ends, strict=True):
            rank = self._ranks[number]
            if waiting[number].done() or how == "":  # it lives
                continue
            error = TrainerError(
                f"trainer rank {number}, process {rank.pid}, {how or f'was lost: {rank.node} does not answer'}",
                code="TRN105",
                where=rank.log,
                why="\n".join(f"rank {other}: {one.what}" for other, one in told),
                fix=RESUME,
                lost=True,
            )
            told.append((number, error))

    async def _reply(self, number: int, told: list[tuple[int, SlimeError]]) -> Any:
        rank = self._ranks[number]
        try:
            answer = await rank.read()
            self._answered.add(number)
        except ConnectionError as gone:
            error: SlimeError = TrainerError(
                f"trainer rank {number}, process {rank.pid}, {await rank.ended(CAUSE) or GONE}",
                code="TRN105",
                where=rank.log,
                why=await rank.tail() or SILENT,
                fix=RESUME,
                lost=True,
            )
            told.append((number, error))
            raise error from gone
        if "error" in answer:
            error = remade(answer["kind"], answer["error"], TrainerError)
            error.where = error.where or rank.log
            told.append((number, error))
            await rank.note(answer["trace"])
            raise error
        return answer["value"]

    async def begin(self, stage: Config) -> None:
        """See `protocols.Trainer`."""
        from slime_core.trainers.dealing import Dealer

        await self._all("begin", stage.model_dump_json())
        train = settle(stage.train)
        settled = stage.model_copy(update={"train": train})
        self._dealer = Dealer(settled, self._plugins.loss(train.loss_type), self._seats[0])

    def _dealing(self) -> Dealer:
        if self._dealer is None:
            raise TrainerError("the trainer has no stage yet", fix="call begin(stage) first")
        return self._dealer

    async def score(self, batch: Batch, roles: frozenset[Role]) -> dict[str, Columns]:
        """See `protocols.Trainer`; every rank scores its own samples."""
        if not roles:
            return {}
        dealer = self._dealing()
        portions = await asyncio.to_thread(dealer.portions, batch)
        answers = await self._dealt("score", portions, sorted(roles))
        numbered = [(seat.number, answer) for seat, answer in zip(self._seats, answers, strict=True)]
        return dealer.joined(batch, portions, by_number(len(portions), numbered))

    async def step(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`; every rank trains on its own samples."""
        portions = await asyncio.to_thread(self._dealing().step, batch)
        answer: dict[str, float] = (await self._dealt("step", portions))[0]
        return answer

    async def verify(self, batch: Batch) -> dict[str, float]:
        """See `protocols.Trainer`; every rank gets the whole batch, to compute all of it the slow way."""
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


async def _write(rank: Channel, frame: Frame) -> None:
    """Send it; of a rank that is gone, the answer that does not come says more."""
    with suppress(ConnectionError):
        await rank.write(frame)
