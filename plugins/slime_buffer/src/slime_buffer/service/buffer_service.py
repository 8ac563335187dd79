"""The store and the ledger as one: nothing is answered before it is durable.

    store: what a group is and who has it      ledger: every sample in exactly one state, and its payload

The store is told first of what is asked for and dropped, the ledger first of what is finished. `start` tells either
what it missed when the process died in between; each of these calls changes nothing where it was heard before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from slime_buffer.service import bodies, models
from slime_buffer.service.leases import Leases
from slime_buffer.service.store import Store
from slime_buffer.service.tables import DROPPED, FINISHED, OPEN, STATES, BufferLimits, Change, Stored, Tables
from slime_core.failpoints import failpoint
from slime_core.ledger.ledger import SqliteLedger, dropped_in
from slime_core.types import Drop, Sample

R = TypeVar("R")
FAILED = "failed"  # reason of samples whose generator gave up
MINUTE = 60.0


class BufferService:
    """What the routes call. Every method raises StorageError where the disk fails, and `Full` where a queue is.

    ``clock``: of leases, seconds.

    Example:
        service = BufferService(Path("buffer"), BufferLimits())
        await service.start()
        await service.ask(ask)
    """

    def __init__(self, folder: Path, limits: BufferLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="buffer-store")
        try:
            self._tables, self._store, self._leases = self._thread.submit(_open, folder, limits, clock).result()
            try:
                self._ledger = SqliteLedger(folder)
            except BaseException:
                self._thread.submit(self._tables.db.close).result()
                raise
        except BaseException:
            self._thread.shutdown()
            raise
        self._turn = asyncio.Lock()  # held while store and ledger are told of one change
        self._news = asyncio.Event()
        self._closing = False
        self._done: Counter[str] = Counter()
        self._recent: deque[tuple[float, str, int]] = deque()
        self._started = time.monotonic()

    async def start(self) -> None:
        """Tell the ledger and the store what they missed."""
        async with self._turn:
            await self._tell(await self._run(self._store.untold))
            await self._finish(await self._run(self._store.all_complete))
            for step in await self._run(self._leases.unfinished_steps):
                await self._acknowledge(step)

    def stop_waiting(self) -> None:
        """Answer every request that waits for something to give."""
        self._closing = True
        self._tell_waiting()

    async def close(self) -> None:
        """Close both. A second call does nothing."""
        self.stop_waiting()
        async with self._turn:
            await self._ledger.close()
            with suppress(RuntimeError):  # closed before
                await self._run(self._tables.db.close)
            self._thread.shutdown()

    async def ask(self, ask: models.Ask) -> models.Asked:
        """Open groups for generators."""
        engine = None if ask.engine is None else ask.engine.model_dump_json()
        specs = [group.model_dump(mode="json") for group in ask.groups]
        async with self._turn:
            change = await self._run(self._store.ask, ask.run, engine, specs)
            await self._tell(change.untold)
        self._count("groups_asked", len(specs))
        self._tell_waiting()
        return _standing_model(change)

    async def push(self, push: models.Push) -> models.Asked:
        """Store whole groups that nobody asked for."""
        async with self._turn:
            change = await self._run(
                lambda: self._store.push(push.run, [bodies.pushed(group) for group in push.groups])
            )
            await self._tell(change.untold)
            await self._finish(change.complete)
        self._count("groups_pushed", len(change.untold))
        self._tell_waiting()
        return models.Asked(
            groups=[
                models.Standing(group=name, attempt=attempt, state=STATES[state or FINISHED], reason=reason)  # type: ignore[arg-type]
                for name, attempt, state, reason in change.standing
            ]
        )

    async def write(self, write: models.Write) -> models.Written:
        """Store rollouts of open groups."""
        change = await self._run(
            lambda: self._store.write(write.run, [bodies.incoming(t, t.group, t.attempt) for t in write.trajectories])
        )
        finished: list[str] = []
        if change.complete:
            failpoint("buffer.write.staged")
            async with self._turn:
                groups = await self._finish(change.complete)
            finished = [group.id for group in groups]
            self._tell_waiting()
        for verdict, _ in change.verdicts:
            self._count(f"rollouts_{verdict}", 1)
        judged = [
            models.Judged(group=t.group, attempt=t.attempt, sample=t.sample, state=verdict, why=reason)  # type: ignore[arg-type]
            for t, (verdict, reason) in zip(write.trajectories, change.verdicts, strict=True)
        ]
        return models.Written(trajectories=judged, finished=finished)

    async def claim_work(self, claim: models.ClaimWork) -> models.Works:
        """Lease open groups."""

        async def attempt() -> list[models.Work]:
            async with self._turn:
                return await self._run(self._claim_work, claim)

        items = await self._waited(attempt, claim.wait_seconds)
        self._count("work_claimed", len(items))
        return models.Works(items=items)

    async def extend(self, lease: models.Lease) -> models.Held:
        """Leases of work get their length again."""
        numbers = bodies.lease_numbers("w", lease.leases)
        lease_ids = await self._run(self._leases.extend, list(numbers.values()), lease.lease_seconds)
        return _lease_model(lease.leases, numbers, lease_ids)

    async def release(self, lease: models.Lease) -> models.Held:
        """Open groups can be claimed again."""
        numbers = bodies.lease_numbers("w", lease.leases)
        lease_ids = await self._run(self._leases.release, list(numbers.values()))
        self._count("work_released", len(lease_ids))
        self._tell_waiting()
        return _lease_model(lease.leases, numbers, lease_ids)

    async def claim_batch(self, claim: models.ClaimBatch) -> models.Claimed:
        """Lease groups that have ended, with what they hold."""

        async def attempt() -> tuple[int, list[Stored]] | None:
            async with self._turn:
                lease, groups = await self._run(self._claim_batch, claim)
            return None if lease is None else (lease, groups)

        batch = await self._waited(attempt, claim.wait_seconds)
        if batch is None:
            return models.Claimed(claim=None, groups=[])
        lease, groups = batch
        payloads = await self._ledger.samples([name for group in groups for name in _readable(group)])
        self._count("groups_claimed", len(groups))
        samples = iter(payloads)
        ended = [bodies.ended(group, [next(samples) for _ in _readable(group)]) for group in groups]
        return models.Claimed(claim=f"b{lease}", groups=ended)

    async def settle(self, claim: str, settle: models.Settle, *, acknowledge: bool) -> models.Settled:
        """Acknowledge groups of a claim, or give them back."""
        keys = None if settle.groups is None else [(key.group, key.attempt) for key in settle.groups]
        numbers = bodies.lease_numbers("b", [claim])
        if not numbers:
            return models.Settled(groups=0)
        async with self._turn:
            count, steps = await self._run(self._settle, numbers[claim], keys, acknowledge)
            for step in steps:
                await self._acknowledge(step)
        self._count("groups_acknowledged" if acknowledge else "groups_given_back", count)
        self._tell_waiting()
        return models.Settled(groups=count)

    async def drop(self, drop: models.DropGroups) -> models.Asked:
        """Give up groups."""
        keys = [(key.group, key.attempt) for key in drop.groups]
        async with self._turn:
            change = await self._run(self._store.drop, drop.run, keys, drop.reason, drop.tell)
            await self._tell(change.untold)
        self._count("groups_dropped", len(change.untold))
        self._tell_waiting()
        return _standing_model(change)

    async def peek(self, query: models.PeekQuery) -> models.Rows:
        """List groups; nothing is taken."""
        return await self._run(bodies.peek, self._tables, query)

    async def stats(self) -> models.Stats:
        """Counts, queues, and what happened."""
        async with self._turn:
            await self._run(self._leases.sweep)
            counts = dict(await self._ledger.counts())
            groups, queues = await self._run(bodies.tallies, self._tables)
        dropped = dropped_in(counts)
        self._forget_old()
        recent: Counter[str] = Counter()
        for _, name, count in self._recent:
            recent[name] += count
        return models.Stats(
            samples={"read" if name == "trained" else name: count for name, count in counts.items()},
            conserved=counts["issued"] == counts["trained"] + dropped + counts["pending"],
            groups=groups,
            queues=queues,
            since_start=dict(self._done),
            per_minute=dict(recent),
            seconds=round(time.monotonic() - self._started, 3),
        )

    # -- on the store's thread

    async def _run(self, fn: Callable[..., R], *args: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, fn, *args)

    def _claim_work(self, claim: models.ClaimWork) -> list[models.Work]:
        self._leases.sweep()
        leases = self._leases.claim_work(
            *(claim.worker, claim.request),
            run=claim.run,
            task=claim.task,
            count=claim.count,
            seconds=claim.lease_seconds,
        )
        return [
            bodies.work(lease, group, self._leases.missing(group), self._leases.engine(group.run))
            for lease, group in leases
        ]

    def _claim_batch(self, claim: models.ClaimBatch) -> tuple[int | None, list[Stored]]:
        self._leases.sweep()
        return self._leases.claim_batch(
            *(claim.reader, claim.request),
            run=claim.run,
            count=claim.count,
            seconds=claim.lease_seconds,
            restart=claim.restart,
        )

    def _settle(self, lease: int, keys: Sequence[tuple[str, int]] | None, acknowledge: bool) -> tuple[int, list[int]]:
        return self._leases.settle(lease, keys, acknowledge=acknowledge)

    # -- the ledger is told, with the turn held

    async def _tell(self, serials: list[int]) -> None:
        if not serials:
            return
        groups = await self._run(self._tables.groups, serials)
        failpoint("buffer.ledger.before")
        opened = [bodies.pending(group) for group in groups if group.state == OPEN]
        dropped = [(_all_samples(group), Drop(reason=group.reason)) for group in groups if group.state == DROPPED]
        if opened:
            await self._ledger.issue(opened)
        if dropped:
            await self._ledger.drop(dropped)
        failpoint("buffer.ledger.after")
        await self._run(self._store.acknowledge, serials)

    async def _finish(self, serials: list[int]) -> list[Stored]:
        groups = [group for group in await self._run(self._tables.groups, serials) if group.state == OPEN]
        await asyncio.gather(*(self._finish_one(group) for group in groups))
        failpoint("buffer.write.finished")
        for group in groups:
            await self._run(self._store.finished, group.serial)
        self._count("groups_finished", len(groups))
        return groups

    async def _finish_one(self, group: Stored) -> None:
        whole, failed = await self._run(lambda: bodies.whole(group, self._store.staged(group.serial)))
        drops = [(failed, Drop(reason=FAILED))] if failed else []
        if whole.samples:
            await self._ledger.finish(whole, drops)
        else:
            await self._ledger.drop(drops)

    async def _acknowledge(self, step: int) -> None:
        groups = await self._run(self._leases.of_step, step)
        failpoint("buffer.ack.noted")
        await self._ledger.journal(bodies.acknowledged(step, [name for g in groups for name in g.sample_ids()]))
        await self._ledger.trained(step)
        failpoint("buffer.ack.told")
        await self._run(self._leases.read, step)

    # -- waiting and counting

    async def _waited(self, attempt: Callable[[], Awaitable[R]], seconds: float) -> R:
        end = time.monotonic() + seconds
        while True:
            news = self._news
            result = await attempt()
            remaining = end - time.monotonic()
            if result or remaining <= 0 or self._closing:
                return result
            until = await self._run(self._leases.next_end)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, max(0.01, until))):
                    await news.wait()

    def _tell_waiting(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _count(self, name: str, count: int) -> None:
        if count:
            self._done[name] += count
            self._recent.append((time.monotonic(), name, count))
            self._forget_old()

    def _forget_old(self) -> None:
        while self._recent and self._recent[0][0] < time.monotonic() - MINUTE:
            self._recent.popleft()


def _open(folder: Path, limits: BufferLimits, clock: Callable[[], float]) -> tuple[Tables, Store, Leases]:
    tables = Tables(folder)
    try:
        return tables, Store(tables, limits), Leases(tables, clock)
    except BaseException:
        tables.db.close()
        raise


def _readable(group: Stored) -> list[str]:
    """Ledger ids of what a reader gets of it."""
    return [] if group.state == DROPPED else group.sample_ids()


def _all_samples(group: Stored) -> list[Sample]:
    issued = [f"{group.ledger_id}-{place}" for place in range(len(group.names))]
    return [Sample(id=name) for name in dict.fromkeys([*issued, *group.sample_ids()])]


def _standing_model(change: Change) -> models.Asked:
    return models.Asked(
        groups=[
            models.Standing(group=name, attempt=attempt, state=STATES[state], reason=reason)  # type: ignore[arg-type]
            for name, attempt, state, reason in change.standing
        ]
    )


def _lease_model(names: Sequence[str], numbers: dict[str, int], lease_ids: Sequence[int]) -> models.Held:
    names_held = [name for name in names if numbers.get(name) in lease_ids]
    return models.Held(held=names_held, lost=[name for name in names if name not in names_held])
