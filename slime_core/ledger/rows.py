"""What `SqliteLedger` promises, in SQL: changes of state and reads, each inside a transaction that its caller holds.

issue -> pending -> finish -> finished -> journal, trained -> trained -> rewind -> finished
            |                    |
            `------ drop --------'--> dropped(reason)

Pruning removes payloads that are no longer needed, never rows. First the rows stop naming their payloads,
durably; then segment files in which nothing lives any more are removed. A crash between the two leaves files that the
next pruning removes.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from slime_core import durable
from slime_core.durable import storage_error
from slime_core.errors import StorageError
from slime_core.ledger.codec import (
    array_refs,
    cut,
    decode,
    decode_turns,
    encode,
    encode_turns,
    plain_reward,
    stored_arrays,
)
from slime_core.ledger.schema import DROPPED, FINISHED, PENDING, STATES, TRAINED
from slime_core.ledger.segments import RecordPlace, Segments
from slime_core.protocols import Drops, GroupRecord, RequestTurn
from slime_core.types import ArrayRef, Group, Sample

REPLACED = "replaced"  # issued, but a fan-out returned other samples in its place
RESTARTED = "restarted"  # a later attempt of the same sample was issued
REASON_LENGTH = 64
OF_PROMPT = "id >= ? AND id < ? AND instr(substr(id, ?), '-') = 0"
"""Rows of one prompt, with :func:`of_prompt`: PROMPT_ID-J and PROMPT_ID-J.K ('.' follows '-' in ASCII)."""
MEASURES = ("place", "rollout", "version", "newest", "ticks", "reward", "tokens", "response_length", "model")
STORED = RecordPlace._fields
FINISH = f"""
INSERT INTO samples (state, position, {", ".join(MEASURES)}, {", ".join(STORED)}, id, attempt)
VALUES ({FINISHED}, ?, {", ".join("?" for _ in (*MEASURES, *STORED))}, ?, ?)
ON CONFLICT (id, attempt) DO UPDATE SET
    state = {FINISHED}, position = excluded.position,
    {", ".join(f"{name} = excluded.{name}" for name in (*MEASURES, *STORED))}
WHERE state = {PENDING}
"""
DROP = f"""
INSERT INTO samples (state, reason, position, {", ".join(MEASURES)}, id, attempt)
VALUES ({DROPPED}, ?, ?, {", ".join("?" for _ in MEASURES)}, ?, ?)
ON CONFLICT (id, attempt) DO UPDATE SET
    state = {DROPPED}, reason = excluded.reason, {", ".join(f"{name} = excluded.{name}" for name in MEASURES)}
WHERE state = {PENDING}
"""
ROW = "SELECT serial, state, step FROM samples WHERE id = ? AND attempt = ?"
LATEST = "SELECT serial, state, attempt, step FROM samples WHERE id = ? ORDER BY attempt DESC LIMIT 1"
OLD = f"(state = {DROPPED} AND coalesce(newest, -1) < :version OR state = {TRAINED} AND step < :version)"
"""Samples that no version from ``:version`` on had a part in."""

KNOWN = f"""
SELECT samples.id, attempt, state, coalesce(name, ''), place, step, newest, ticks, segment, offset, length, crc32
FROM samples LEFT JOIN reasons ON reasons.id = samples.reason
WHERE {OF_PROMPT.replace("id ", "samples.id ").replace("(id", "(samples.id")} ORDER BY place, serial
"""


class _Known(NamedTuple):
    """What `groups` looks at of a row."""

    id: str
    attempt: int
    state: int
    reason: str
    place: int | None
    step: int | None
    newest: int | None
    ticks: int | None
    segment: int | None
    offset: int
    length: int
    crc32: int


def of_prompt(prompt_id: str) -> tuple[str, str, int]:
    """The parameters of ``OF_PROMPT``."""
    return f"{prompt_id}-", f"{prompt_id}.", len(prompt_id) + 2


class LedgerTables:
    """The tables of one connection; nothing here begins or ends a transaction."""

    def __init__(self, db: sqlite3.Connection, segments: Segments, where: Path) -> None:
        self._db, self._segments, self._where = db, segments, where
        self._reasons: dict[str, int] = {}

    def forget(self) -> None:
        """A transaction was rolled back: nothing that was read in it holds."""
        self._reasons.clear()

    def issue(self, groups: Sequence[Group]) -> None:
        """See `protocols.Ledger`."""
        for group in groups:
            for sample in group.samples:
                latest = self._db.execute(LATEST, (sample.id,)).fetchone()
                if latest is not None and latest[2] >= sample.attempt:
                    continue
                if latest is not None:
                    self._restart(sample)
                self._db.execute(
                    "INSERT INTO samples (id, attempt, state, position, rollout) VALUES (?, ?, ?, ?, ?)",
                    (sample.id, sample.attempt, PENDING, group.prompt.position, sample.rollout_id),
                )

    def finish(self, group: Group, drops: Drops = ()) -> list[tuple[Sample, dict[str, Any]]]:
        """See `protocols.Ledger`; the payloads are appended, not yet durable. Returns fields with arrays' places.

        An array that several samples of the group have is stored once.
        """
        self.drop(drops)
        rows = []
        stored: dict[int, ArrayRef] = {}

        def write(array: NDArray[Any]) -> ArrayRef:
            if id(array) not in stored:
                stored[id(array)] = self._segments.write_array(array, named=True)
            return stored[id(array)]

        for place, sample in enumerate(group.samples):
            row = self._db.execute(ROW, (sample.id, sample.attempt)).fetchone()
            if row is not None and row[1] == DROPPED:
                raise self.conflict(sample.id, "dropped", "finished")
            if row is None or row[1] == PENDING:
                fields = stored_arrays(sample, write)
                rows.append((place, sample, fields, encode(sample, fields)))
        for place, sample, fields, parts in rows:
            self._store(group.prompt.position, place, sample, fields, self._segments.append(parts))
        keys = {(sample.id, sample.attempt) for sample in group.samples}
        query = f"SELECT serial, id, attempt FROM samples WHERE {OF_PROMPT} AND state = {PENDING}"
        for serial, name, attempt in self._db.execute(query, of_prompt(group.prompt.id)).fetchall():
            if (name, attempt) not in keys:
                self._set_dropped(serial, REPLACED)
        return [(sample, fields) for _, sample, fields, _ in rows if fields]

    def drop(self, drops: Drops) -> None:
        """See `protocols.Ledger`."""
        place = 0
        for samples, drop in drops:
            reason = self._reason(drop.reason)
            for sample in samples:
                row = self._db.execute(ROW, (sample.id, sample.attempt)).fetchone()
                if row is not None and row[1] == FINISHED:
                    self._require_open(sample.id, *row[1:], change="dropped")
                    self._set_dropped(row[0], drop.reason)
                    self._db.execute("UPDATE samples SET place = ? WHERE serial = ?", (place, row[0]))
                elif row is None or row[1] == PENDING:
                    numbers = (reason, sample.group_index, *_measures(sample, place))
                    self._db.execute(DROP, (*numbers, sample.id, sample.attempt))
                elif row[1] == TRAINED:
                    raise self.conflict(sample.id, "trained", "dropped")
                place += 1

    def suspend(self, turns: Mapping[str, Sequence[RequestTurn]]) -> None:
        """See `protocols.Ledger`; the tokens of samples that have ended are left unchanged.

        They stay until the payloads are pruned: a step repeated after a rewind continues from them.
        """
        for name, turn_list in turns.items():
            row = self._db.execute(LATEST, (name,)).fetchone()
            if row is None:
                raise self.conflict(name, "unknown", "suspended")
            if row[1] != PENDING:
                continue
            self._db.execute("DELETE FROM turns WHERE serial = ?", (row[0],))
            if turn_list:
                place = self._segments.append(encode_turns(turn_list))
                self._db.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?)", (row[0], *place))

    def journal(self, version: int, stage: str, ids: Sequence[str]) -> None:
        """See `protocols.Ledger`; ``version`` is the one that the step makes."""
        if len(set(ids)) != len(ids):
            raise StorageError(f"the step of version {version} names a sample twice", where=str(self._where))
        before = self.composition(version)
        if before:
            if before != list(ids):
                raise StorageError(
                    f"version {version} is journaled with another composition",
                    where=str(self._where),
                    why=f"{len(before)} samples from {before[0]} on, now {len(ids)} from {list(ids[:1])} on",
                    fix="a version is made from its journal: slime run --resume RUN_DIR",
                )
            return
        serials = [self._enters(name, version) for name in ids]
        self._db.execute("INSERT INTO steps (version, stage, samples) VALUES (?, ?, ?)", (version, stage, len(ids)))
        self._db.executemany("INSERT INTO members VALUES (?, ?, ?)", [(version, i, s) for i, s in enumerate(serials)])
        self._db.executemany("UPDATE samples SET step = ? WHERE serial = ?", [(version, s) for s in serials])

    def trained(self, version: int, fingerprint: str) -> None:
        """See `protocols.Ledger`."""
        row = self._db.execute("SELECT trained, fingerprint FROM steps WHERE version = ?", (version,)).fetchone()
        if row is None:
            raise StorageError(f"version {version} was never journaled", where=str(self._where))
        if row[1] and fingerprint and row[1] != fingerprint:
            raise StorageError(
                f"version {version} was trained again and has other weights",
                where=str(self._where),
                why=f"fingerprint {fingerprint}, the journal has {row[1]}",
                fix="resume on the machine, with the versions and the cpu_threads that made it",
            )
        if row[0]:
            return
        self._db.execute(
            "UPDATE steps SET trained = 1, fingerprint = ? WHERE version = ?", (fingerprint or row[1], version)
        )
        moved = self._db.execute(
            f"UPDATE samples SET state = {TRAINED} WHERE state = {FINISHED} AND step = :version "
            "AND serial IN (SELECT serial FROM members WHERE version = :version)",
            {"version": version},
        ).rowcount
        (members,) = self._db.execute("SELECT count(*) FROM members WHERE version = ?", (version,)).fetchone()
        if moved != members:
            raise StorageError(
                f"{members - moved} of the {members} samples of version {version} are not finished any more",
                where=str(self._where),
            )

    def rewind(self, version: int) -> None:
        """See `protocols.Ledger`."""
        later = "serial IN (SELECT serial FROM members WHERE members.version > ?)"
        (pruned,) = self._db.execute(
            f"SELECT count(*) FROM samples WHERE {later} AND segment IS NULL", (version,)
        ).fetchone()
        if pruned:
            raise StorageError(
                f"the ledger cannot go back to version {version}: {pruned} samples of later steps have no payload",
                where=str(self._where),
                why="report.ledger_keep_steps had them forgotten",
                fix="resume from a later checkpoint",
            )
        self._db.execute(f"UPDATE samples SET state = {FINISHED} WHERE {later} AND state = {TRAINED}", (version,))
        self._db.execute("UPDATE steps SET trained = 0 WHERE version > ?", (version,))

    def composition(self, version: int) -> list[str]:
        """See `protocols.Ledger`."""
        query = "SELECT id FROM members JOIN samples USING (serial) WHERE members.version = ? ORDER BY members.place"
        return [name for (name,) in self._db.execute(query, (version,))]

    def groups(self, prompt_ids: Sequence[str]) -> dict[str, GroupRecord]:
        """See `protocols.Ledger`. Samples of a trained group whose payloads are pruned are left out."""
        records = {}
        for prompt_id in prompt_ids:
            rows = [_Known(*row) for row in self._db.execute(KNOWN, of_prompt(prompt_id))]
            if rows:
                records[prompt_id] = self._group_record(_latest(rows))
        return records

    def samples(self, ids: Sequence[str]) -> list[Sample]:
        """See `protocols.Ledger`."""
        query = "SELECT segment, offset, length, crc32 FROM samples WHERE id = ? ORDER BY attempt DESC LIMIT 1"
        samples = []
        for name in ids:
            row = self._db.execute(query, (name,)).fetchone()
            if row is None or row[0] is None:
                reason = "it was never issued" if row is None else "it was not finished, or its payload was pruned"
                raise StorageError(f"sample {name} has no payload", where=str(self._where), why=reason)
            samples.append(decode(self._segments.read(RecordPlace(*row))))
        return samples

    def suspended(self, ids: Sequence[str], before: int) -> dict[str, list[RequestTurn]]:
        """See `protocols.Ledger`; samples of which nothing is left are left out."""
        query = (
            "SELECT turns.segment, turns.offset, turns.length, turns.crc32 "
            "FROM samples LEFT JOIN turns USING (serial) WHERE id = ? ORDER BY attempt DESC LIMIT 1"
        )
        suspended = {}
        for name in ids:
            row = self._db.execute(query, (name,)).fetchone()
            turns = (
                cut(decode_turns(self._segments.read(RecordPlace(*row))), before) if row and row[0] is not None else []
            )
            if turns:
                suspended[name] = turns
        return suspended

    def counts(self) -> dict[str, int]:
        """See `protocols.Ledger`. ``issued`` is the last serial (no row is ever deleted), the rest is the tally."""
        (issued,) = self._db.execute("SELECT coalesce(max(serial), 0) FROM samples").fetchone()
        counts = {"issued": issued, "trained": 0, "pending": 0}
        query = "SELECT state, name, count FROM tally LEFT JOIN reasons ON reasons.id = tally.reason ORDER BY 1, 2"
        for state, reason, count in self._db.execute(query):
            name = {PENDING: "pending", FINISHED: "pending", TRAINED: "trained"}.get(state, f"dropped/{reason}")
            if count:
                counts[name] = counts.get(name, 0) + count
        return counts

    def conflict(self, name: str, state: str, change: str) -> StorageError:
        """The error for a sample that cannot leave its state that way."""
        return StorageError(
            f"sample {name} is {state} and cannot be {change}",
            where=f"{self._where}: sample {name}",
            why="a sample is in exactly one state: pending, finished, trained or dropped",
        )

    def _enters(self, name: str, version: int) -> int:
        row = self._db.execute(LATEST, (name,)).fetchone()
        serial, state, _, step = row or (0, -1, 0, None)
        if state != FINISHED:
            raise self.conflict(name, STATES[state] if state >= 0 else "unknown", f"journaled for version {version}")
        self._require_open(name, state, step, change=f"journaled for version {version}")
        return int(serial)

    def _restart(self, sample: Sample) -> None:
        """Drop what earlier attempts left open, fan-out siblings too."""
        earlier = self._db.execute(
            "SELECT serial, id, state, step FROM samples WHERE (id = :id OR id >= :id || '.' AND id < :id || '/') "
            f"AND attempt < :attempt AND state != {DROPPED}",
            {"id": sample.id, "attempt": sample.attempt},
        ).fetchall()
        for serial, *row in earlier:
            self._require_open(*row, change="issued again")
            self._set_dropped(serial, RESTARTED)

    def _require_open(self, name: str, state: int, step: int | None, *, change: str) -> None:
        if state == TRAINED:
            raise self.conflict(name, "trained", change)
        if step is not None:
            raise self.conflict(name, f"journaled for version {step}", change)

    def _store(self, position: int, order: int, sample: Sample, fields: Mapping[str, Any], place: RecordPlace) -> None:
        values = (position, *_measures(sample, order), *place, sample.id, sample.attempt)
        self._db.execute(FINISH, values)
        refs = array_refs(sample, fields).values()
        named = {int(ref.segment[:-4]) for ref in refs if ref.segment[:-4].isdecimal()}
        if others := named - {place.segment}:
            (serial, *_) = self._db.execute(ROW, (sample.id, sample.attempt)).fetchone()
            rows = [(segment, serial) for segment in others]
            self._db.executemany("INSERT INTO arrays VALUES (?, ?) ON CONFLICT DO NOTHING", rows)

    def _reason(self, text: str) -> int:
        name = text[:REASON_LENGTH]
        if name not in self._reasons:
            self._db.execute("INSERT INTO reasons (name) VALUES (?) ON CONFLICT DO NOTHING", (name,))
            (self._reasons[name],) = self._db.execute("SELECT id FROM reasons WHERE name = ?", (name,)).fetchone()
        return self._reasons[name]

    def _set_dropped(self, serial: int, reason: str) -> None:
        self._db.execute(
            f"UPDATE samples SET state = {DROPPED}, reason = ? WHERE serial = ?", (self._reason(reason), serial)
        )

    def _group_record(self, rows: list[_Known]) -> GroupRecord:
        states = {row.state for row in rows}
        state = next(s for s in (PENDING, TRAINED, FINISHED, DROPPED) if s in states)
        newest = max((row.newest for row in rows if row.newest is not None), default=-1)
        stored = [
            row for row in rows if row.state == state and (state in (FINISHED, TRAINED) or row.segment is not None)
        ]
        places_stored = [] if state == PENDING else stored
        dropped = [row for row in rows if row.state == DROPPED and row.reason != REPLACED]
        places = [
            RecordPlace(row.segment, row.offset, row.length, row.crc32)
            for row in places_stored
            if row.segment is not None
        ]
        return GroupRecord(
            state=STATES[state],  # type: ignore[arg-type]
            attempt=max(row.attempt for row in rows),
            version=(places_stored[0].step or 0) if state == TRAINED else 0,
            samples=[decode(self._segments.read(place)) for place in places],
            drops=dict(Counter(row.reason for row in dropped if row not in places_stored)),
            last_reason=dropped[-1].reason if dropped else "",
            newest=newest,
            ticks={row.id: row.ticks or 0 for row in rows if row.newest == newest and newest >= 0},
        )


def _latest(rows: list[_Known]) -> list[_Known]:
    """The rows of each issued sample's latest attempt, fan-out siblings with it."""
    attempts: dict[str, int] = {}
    for row in rows:
        attempts[_issued_as(row.id)] = max(row.attempt, attempts.get(_issued_as(row.id), 0))
    return [row for row in rows if row.attempt == attempts[_issued_as(row.id)]]


def _issued_as(name: str) -> str:
    """PROMPT-J of a fan-out sibling PROMPT-J.K."""
    prompt, _, rollout = name.rpartition("-")
    return f"{prompt}-{rollout.partition('.')[0]}"


def _measures(sample: Sample, place: int) -> tuple[object, ...]:
    """The values of ``MEASURES``."""
    lowest, newest, ticks = _ages(sample.weight_versions)
    sizes = (plain_reward(sample), len(sample.tokens), sample.response_length)
    return (place, sample.rollout_id, lowest, newest, ticks, *sizes, sample.model or None)


def _ages(versions: Sequence[int]) -> tuple[int | None, int | None, int | None]:
    """Lowest and highest weights that made a token, and how many tokens the latter made."""
    if versions and versions[0] >= 0 and versions.count(versions[0]) == len(versions):
        return versions[0], versions[0], len(versions)
    valid = [version for version in versions if version >= 0]
    newest = max(valid, default=None)
    return min(valid, default=None), newest, None if newest is None else valid.count(newest)


def forget_payloads(db: sqlite3.Connection, before_version: int) -> None:
    """Rows of samples that were dropped or trained before a version name no payload any more, and no turns."""
    for table in ("turns", "arrays"):
        of_old = f"SELECT 1 FROM samples WHERE samples.serial = {table}.serial AND {OLD}"
        db.execute(f"DELETE FROM {table} WHERE EXISTS ({of_old})", {"version": before_version})
    db.execute(
        "UPDATE samples SET segment = NULL, offset = NULL, length = NULL, crc32 = NULL "
        f"WHERE segment IS NOT NULL AND {OLD}",
        {"version": before_version},
    )


def living(db: sqlite3.Connection) -> set[int]:
    """Numbers of the segments in which a payload, a suspended turn or an array of a stored sample lies."""
    numbers: set[int] = set()
    number = -1
    while True:  # one step of the index a segment, however many rows name it
        query = "SELECT min(segment) FROM samples WHERE segment IS NOT NULL AND segment > ?"
        (number,) = db.execute(query, (number,)).fetchone()
        if number is None:
            break
        numbers.add(number)
    numbers |= {number for (number,) in db.execute("SELECT DISTINCT segment FROM turns")}
    return numbers | {number for (number,) in db.execute("SELECT DISTINCT segment FROM arrays")}


def remove_segments(segments: Segments, living_segments: set[int]) -> int:
    """Remove the files that are neither in ``living_segments`` nor may still be written to; the answer is their count.

    Raises:
        StorageError: a file that cannot be removed.
    """
    dead = segments.ended() - living_segments
    for number in sorted(dead):
        segments.forget(number)
        try:
            durable.disk.remove(segments.path(number))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, segments.path(number), "a segment that is empty cannot be removed") from error
    if dead:
        durable.disk.sync_folder(segments.folder)
    return len(dead)
