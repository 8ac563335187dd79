"""The Data Buffer on disk: every sample of a run in exactly one state, SQLite for states, segment files for payloads.

    issue -> pending -> finish -> finished -> journal, trained -> trained
                |                    |
                `------ drop --------'--> dropped(reason)

A payload is durable before the commit that names it. Every call is one transaction on the ledger's own thread; groups
that finish while the disk is busy share the next one. The event loop never waits for the disk, and a call that is
repeated changes nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from slime_core.buffer.codec import decode, encode, plain_reward
from slime_core.buffer.schema import DROPPED, FINISHED, PENDING, STATES, TRAINED, connect, sqlite_error
from slime_core.buffer.segments import Place, Segments
from slime_core.errors import StorageError
from slime_core.protocols import Drops
from slime_core.types import Batch, Group, Sample

R = TypeVar("R")
REPLACED = "replaced"  # issued, but a fan-out returned other samples in its place
RESTARTED = "restarted"  # a later attempt of the same sample was issued
REASON_LENGTH = 64

FINISH = """
INSERT INTO samples
    (state, position, rollout, version, reward, tokens, response_length, segment, offset, length, crc32, id, attempt)
VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id, attempt) DO UPDATE SET
    state = 1, position = excluded.position, rollout = excluded.rollout, version = excluded.version,
    reward = excluded.reward, tokens = excluded.tokens, response_length = excluded.response_length,
    segment = excluded.segment, offset = excluded.offset, length = excluded.length, crc32 = excluded.crc32
WHERE state = 0
"""
LATEST = "SELECT serial, state, attempt FROM samples WHERE id = ? ORDER BY attempt DESC LIMIT 1"


class SqliteLedger:
    """The ledger of one run directory: ``ledger.sqlite`` and ``segments/``. Implements `protocols.Ledger`.

    Example:
        ledger = SqliteLedger(run_dir)
        await ledger.issue(groups)
        await ledger.finish(groups[0])
        assert (await ledger.counts())["issued"] == len(groups) * 8
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(run_dir) / "ledger.sqlite"
        self.segments = Segments(Path(run_dir) / "segments")
        self._reasons: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._closed = False
        self._waiting: deque[tuple[Group, Drops, Future[None]]] = (
            deque()
        )  # finished groups that no transaction has taken yet
        try:
            self._db = self._thread.submit(connect, self.path).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def issue(self, groups: Sequence[Group]) -> None:
        """See `protocols.Ledger`. An earlier attempt of a sample that is still open becomes dropped(restarted).

        Raises:
            StorageError: a sample that has trained is issued again.
        """
        rows = [(s, g.prompt.position) for g in groups for s in g.samples]
        await self._call(self._issue, rows)

    async def finish(self, group: Group, drops: Drops = ()) -> None:
        """See `protocols.Ledger`. Pending samples of the prompt that the group no longer has become dropped(replaced).

        Raises:
            StorageError: a sample of the group was dropped before; the disk failed.
            PluginError: PLG57, a field that JSON cannot hold.
        """
        done: Future[None] = Future()
        self._waiting.append((group, drops, done))
        await self._call(self._finish_waiting)
        await asyncio.wrap_future(done)

    async def drop(self, drops: Drops) -> None:
        """See `protocols.Ledger`. Samples that were never issued are added; what is dropped keeps its first reason.

        Raises:
            StorageError: a sample that has trained.
        """
        await self._call(self._drop_all, drops)

    async def journal(self, batch: Batch) -> None:
        """See `protocols.Ledger`. The step makes version ``batch.version + 1``.

        Raises:
            StorageError: samples that are not finished, or another composition under the same version.
        """
        await self._call(self._journal, batch.version + 1, batch.stage, list(batch.sample_ids))

    async def trained(self, version: int, fingerprint: str = "") -> None:
        """See `protocols.Ledger`.

        Raises:
            StorageError: the version was never journaled, or trained before with another fingerprint.
        """
        await self._call(self._trained, version, fingerprint)

    async def composition(self, version: int) -> list[str]:
        """See `protocols.Ledger`."""
        return await self._call(self._composition, version)

    async def samples(self, ids: Sequence[str]) -> list[Sample]:
        """See `protocols.Ledger`. The latest attempt of each id.

        Raises:
            StorageError: an id without a stored payload, STO111 or STO112 a segment that is gone or damaged.
        """
        return await self._call(self._samples, list(ids))

    async def counts(self) -> Mapping[str, int]:
        """See `protocols.Ledger`. ``issued`` is the last serial (no row is ever deleted), the rest is the tally."""
        return await self._call(self._counts)

    async def close(self) -> None:
        """See `protocols.Ledger`. A second call does nothing."""
        if not self._closed:
            self._closed = True
            try:
                await asyncio.wrap_future(self._thread.submit(self._shut))
            finally:
                self._thread.shutdown(wait=True)

    async def _call(self, fn: Callable[..., R], *args: object) -> R:
        if self._closed:
            raise StorageError("the ledger is closed", where=str(self.path))
        return await asyncio.wrap_future(self._thread.submit(self._guarded, fn, *args))

    def _guarded(self, fn: Callable[..., R], *args: object) -> R:
        try:
            return fn(*args)
        except sqlite3.Error as error:
            raise sqlite_error(error, self.path) from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._reasons.clear()
            raise

    def _issue(self, rows: list[tuple[Sample, int]]) -> None:
        with self._transaction() as db:
            for sample, position in rows:
                latest = db.execute(LATEST, (sample.id,)).fetchone()
                if latest is not None:
                    serial, state, attempt = latest
                    if attempt >= sample.attempt:
                        continue
                    if state == TRAINED:
                        raise self._conflict(sample.id, "trained", "issued again")
                    if state != DROPPED:
                        self._set_dropped(serial, RESTARTED)
                db.execute(
                    "INSERT INTO samples (id, attempt, state, position, rollout) VALUES (?, ?, ?, ?, ?)",
                    (sample.id, sample.attempt, PENDING, position, sample.rollout_id),
                )

    def _finish_waiting(self) -> None:
        """Store every waiting group in one transaction; a group that cannot be stored fails alone."""
        placed: list[tuple[Group, Drops, list[tuple[Sample, Place]]]] = []
        answers: list[Future[None]] = []
        while self._waiting:
            group, drops, done = self._waiting.popleft()
            try:
                placed.append((group, drops, self._place(group)))
            except Exception as error:
                done.set_exception(error)
            else:
                answers.append(done)
        if not answers:
            return
        try:
            self.segments.sync()
            with self._transaction():
                for group, drops, samples in placed:
                    for unfit, drop in drops:
                        self._drop(unfit, drop.reason[:REASON_LENGTH])
                    self._finish(group, samples)
        except Exception as error:
            failure = sqlite_error(error, self.path) if isinstance(error, sqlite3.Error) else error
            for done in answers:
                done.set_exception(failure)
        else:
            for done in answers:
                done.set_result(None)

    def _place(self, group: Group) -> list[tuple[Sample, Place]]:
        """Append the payloads of a group's samples that are not stored yet."""
        wanted = []
        for sample in group.samples:
            row = self._db.execute(
                "SELECT state FROM samples WHERE id = ? AND attempt = ?", (sample.id, sample.attempt)
            ).fetchone()
            state = PENDING if row is None else row[0]
            if state == DROPPED:
                raise self._conflict(sample.id, "dropped", "finished")
            if state == PENDING:
                wanted.append((sample, encode(sample)))
        return [(sample, self.segments.append(parts)) for sample, parts in wanted]

    def _finish(self, group: Group, placed: list[tuple[Sample, Place]]) -> None:
        for sample, place in placed:
            self._db.execute(FINISH, _finished_row(sample, group.prompt.position, place))
        kept = {(s.id, s.attempt) for s in group.samples}
        # every id of the prompt's samples starts with PROMPT_ID- and '.' follows '-' in ASCII
        issued = self._db.execute(
            "SELECT serial, id, attempt FROM samples WHERE id >= ? AND id < ? AND state = 0",
            (f"{group.prompt.id}-", f"{group.prompt.id}."),
        ).fetchall()
        for serial, name, attempt in issued:
            if (name, attempt) not in kept:
                self._set_dropped(serial, REPLACED)

    def _drop_all(self, drops: Drops) -> None:
        with self._transaction():
            for samples, drop in drops:
                self._drop(samples, drop.reason[:REASON_LENGTH])

    def _drop(self, samples: Sequence[Sample], reason: str) -> None:
        for sample in samples:
            self._db.execute(
                "INSERT INTO samples (id, attempt, state, position, rollout) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id, attempt) DO NOTHING",
                (sample.id, sample.attempt, PENDING, sample.group_index, sample.rollout_id),
            )
            serial, state = self._db.execute(
                "SELECT serial, state FROM samples WHERE id = ? AND attempt = ?", (sample.id, sample.attempt)
            ).fetchone()
            if state == TRAINED:
                raise self._conflict(sample.id, "trained", "dropped")
            if state != DROPPED:
                self._set_dropped(serial, reason)

    def _journal(self, version: int, stage: str, ids: list[str]) -> None:
        if len(set(ids)) != len(ids):
            raise StorageError(f"the step of version {version} names a sample twice", where=str(self.path))
        before = self._composition(version)
        if before:
            if before != ids:
                raise StorageError(
                    f"version {version} is journaled with another composition",
                    where=str(self.path),
                    why=f"{len(before)} samples from {before[0]} on, now {len(ids)} from {ids[:1]} on",
                    fix="a version is made from its journal: slime run --resume RUN_DIR",
                )
            return
        with self._transaction() as db:
            serials = []
            for name in ids:
                row = db.execute(LATEST, (name,)).fetchone()
                if row is None or row[1] != FINISHED:
                    state = "unknown" if row is None else STATES[row[1]]
                    raise self._conflict(name, state, f"journaled for version {version}")
                serials.append(row[0])
            db.execute("INSERT INTO steps (version, stage, samples) VALUES (?, ?, ?)", (version, stage, len(ids)))
            db.executemany(
                "INSERT INTO members VALUES (?, ?, ?)",
                [(version, place, serial) for place, serial in enumerate(serials)],
            )

    def _trained(self, version: int, fingerprint: str) -> None:
        with self._transaction() as db:
            row = db.execute("SELECT trained, fingerprint FROM steps WHERE version = ?", (version,)).fetchone()
            if row is None:
                raise StorageError(f"version {version} was never journaled", where=str(self.path))
            if row[0]:
                if row[1] and fingerprint and row[1] != fingerprint:
                    raise StorageError(
                        f"version {version} was made again with other weights",
                        where=str(self.path),
                        why=f"fingerprint {fingerprint}, the journal has {row[1]}",
                    )
                return
            db.execute("UPDATE steps SET trained = 1, fingerprint = ? WHERE version = ?", (fingerprint, version))
            moved = db.execute(
                "UPDATE samples SET state = ?, step = ? WHERE state = ? "
                "AND serial IN (SELECT serial FROM members WHERE version = ?)",
                (TRAINED, version, FINISHED, version),
            ).rowcount
            (members,) = db.execute("SELECT count(*) FROM members WHERE version = ?", (version,)).fetchone()
            if moved != members:
                raise StorageError(
                    f"{members - moved} of the {members} samples of version {version} are not finished any more",
                    where=str(self.path),
                )

    def _composition(self, version: int) -> list[str]:
        query = "SELECT id FROM members JOIN samples USING (serial) WHERE members.version = ? ORDER BY place"
        return [name for (name,) in self._db.execute(query, (version,))]

    def _samples(self, ids: list[str]) -> list[Sample]:
        query = "SELECT segment, offset, length, crc32 FROM samples WHERE id = ? ORDER BY attempt DESC LIMIT 1"
        found = []
        for name in ids:
            row = self._db.execute(query, (name,)).fetchone()
            if row is None or row[0] is None:
                why = "it was never issued" if row is None else "it was not finished, or its payload was pruned"
                raise StorageError(f"sample {name} has no payload", where=str(self.path), why=why)
            place = Place(segment=row[0], offset=row[1], length=row[2], crc32=row[3])
            found.append(decode(self.segments.read(place)))
        return found

    def _counts(self) -> dict[str, int]:
        (issued,) = self._db.execute("SELECT coalesce(max(serial), 0) FROM samples").fetchone()
        counts = {"issued": issued, "trained": 0, "pending": 0}
        query = "SELECT state, name, count FROM tally LEFT JOIN reasons ON reasons.id = tally.reason ORDER BY 1, 2"
        for state, reason, count in self._db.execute(query):
            name = {PENDING: "pending", FINISHED: "pending", TRAINED: "trained"}.get(state, f"dropped/{reason}")
            if count:
                counts[name] = counts.get(name, 0) + count
        return counts

    def _set_dropped(self, serial: int, reason: str) -> None:
        if reason not in self._reasons:
            self._db.execute("INSERT INTO reasons (name) VALUES (?) ON CONFLICT DO NOTHING", (reason,))
            (self._reasons[reason],) = self._db.execute("SELECT id FROM reasons WHERE name = ?", (reason,)).fetchone()
        self._db.execute(
            "UPDATE samples SET state = ?, reason = ? WHERE serial = ?", (DROPPED, self._reasons[reason], serial)
        )

    def _conflict(self, name: str, state: str, wanted: str) -> StorageError:
        return StorageError(
            f"sample {name} is {state} and cannot be {wanted}",
            where=f"{self.path}: sample {name}",
            why="a sample is in exactly one state: pending, finished, trained or dropped",
        )

    def _shut(self) -> None:
        try:
            self.segments.close()
        finally:
            self._db.close()


def _finished_row(sample: Sample, position: int, place: Place) -> tuple[object, ...]:
    made = [version for version in sample.weight_versions if version >= 0]
    numbers = (min(made, default=None), plain_reward(sample), len(sample.tokens), sample.response_length)
    where = (place.segment, place.offset, place.length, place.crc32)
    return (position, sample.rollout_id, *numbers, *where, sample.id, sample.attempt)
