"""Questions to the ledger's tables: recall, samples, suspended turns, counts, and whether counts add up."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slime_core.errors import StorageError
from slime_core.ledger.codec import cut, decode, decode_turns
from slime_core.ledger.rows import OF_PROMPT, REPLACED, of_prompt
from slime_core.ledger.schema import DROPPED, FINISHED, PENDING, STATES, TRAINED
from slime_core.ledger.segments import Place, Segments
from slime_core.protocols import Recalled, Turn
from slime_core.types import Sample

KNOWN = f"""
SELECT samples.id, attempt, state, coalesce(name, ''), place, step, newest, ticks, segment, offset, length, crc32
FROM samples LEFT JOIN reasons ON reasons.id = samples.reason
WHERE {OF_PROMPT.replace("id ", "samples.id ").replace("(id", "(samples.id")} ORDER BY place, serial
"""


class _Known(NamedTuple):
    """What `recall` looks at of a row."""

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


class Reads:
    """Reads of one connection."""

    def __init__(self, db: sqlite3.Connection, segments: Segments, where: Path) -> None:
        self._db, self._segments, self._where = db, segments, where

    def recall(self, prompt_ids: Sequence[str]) -> dict[str, Recalled]:
        """See `protocols.Ledger`. Samples of a trained group whose payloads are pruned are left out."""
        found = {}
        for prompt_id in prompt_ids:
            rows = [_Known(*row) for row in self._db.execute(KNOWN, of_prompt(prompt_id))]
            if rows:
                found[prompt_id] = self._recalled(_latest(rows))
        return found

    def samples(self, ids: Sequence[str]) -> list[Sample]:
        """See `protocols.Ledger`."""
        query = "SELECT segment, offset, length, crc32 FROM samples WHERE id = ? ORDER BY attempt DESC LIMIT 1"
        found = []
        for name in ids:
            row = self._db.execute(query, (name,)).fetchone()
            if row is None or row[0] is None:
                why = "it was never issued" if row is None else "it was not finished, or its payload was pruned"
                raise StorageError(f"sample {name} has no payload", where=str(self._where), why=why)
            found.append(decode(self._segments.read(_place(*row))))
        return found

    def suspended(self, ids: Sequence[str], before: int) -> dict[str, list[Turn]]:
        """See `protocols.Ledger`; samples of which nothing is left are left out."""
        query = (
            "SELECT turns.segment, turns.offset, turns.length, turns.crc32 "
            "FROM samples LEFT JOIN turns USING (serial) WHERE id = ? ORDER BY attempt DESC LIMIT 1"
        )
        found = {}
        for name in ids:
            row = self._db.execute(query, (name,)).fetchone()
            turns = cut(decode_turns(self._segments.read(_place(*row))), before) if row and row[0] is not None else []
            if turns:
                found[name] = turns
        return found

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

    def _recalled(self, rows: list[_Known]) -> Recalled:
        states = {row.state for row in rows}
        state = next(s for s in (PENDING, TRAINED, FINISHED, DROPPED) if s in states)
        newest = max((row.newest for row in rows if row.newest is not None), default=-1)
        stored = [
            row for row in rows if row.state == state and (state in (FINISHED, TRAINED) or row.segment is not None)
        ]
        kept = [] if state == PENDING else stored
        dropped = [row for row in rows if row.state == DROPPED and row.reason != REPLACED]
        places = [_place(row.segment, row.offset, row.length, row.crc32) for row in kept if row.segment is not None]
        return Recalled(
            state=STATES[state],  # type: ignore[arg-type]
            attempt=max(row.attempt for row in rows),
            version=(kept[0].step or 0) if state == TRAINED else 0,
            samples=[decode(self._segments.read(place)) for place in places],
            drops=dict(Counter(row.reason for row in dropped if row not in kept)),
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


def _place(segment: int, offset: int, length: int, crc32: int) -> Place:
    return Place(segment=segment, offset=offset, length=length, crc32=crc32)


def dropped_in(counts: Mapping[str, int]) -> int:
    """Samples of a ledger's counts that were dropped, whatever the reason."""
    return sum(count for name, count in counts.items() if name.startswith("dropped/"))


def conservation(counts: Mapping[str, int]) -> str:
    """A ledger's counts as one line: ``24 issued = 20 trained + 4 dropped + 0 pending``.

    Raises:
        StorageError: STO00 with the counts, where they do not add up.
    """
    dropped = dropped_in(counts)
    issued, trained, pending = counts["issued"], counts["trained"], counts["pending"]
    if issued != trained + dropped + pending or min(counts.values()) < 0:
        raise StorageError(
            f"samples were lost or doubled: {dict(counts)}",
            code="STO00",
            why=f"issued = trained + dropped + pending, here {issued} and {trained} + {dropped} + {pending}",
            fix="keep the run directory as it is and report this; slime show RUN_DIR tells the counts",
        )
    return f"{issued} issued = {trained} trained + {dropped} dropped + {pending} pending"
