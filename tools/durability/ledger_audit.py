"""Everything that must hold in a ledger, looked at row by row and payload by payload."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping

from slime_core.errors import StorageError
from slime_core.ledger.ledger import SqliteLedger, conservation
from slime_core.ledger.schema import DROPPED, FINISHED, PENDING, TRAINED
from slime_core.ledger.segments import RecordPlace, Segments

SHOWN = 5
CHECKS = (
    ("SQLite's own check", "SELECT * FROM pragma_integrity_check WHERE integrity_check != 'ok'"),
    ("references", "SELECT * FROM pragma_foreign_key_check"),
    (
        "tally and rows (state, reason, tally, rows)",
        "SELECT state, reason, sum(told), sum(found) FROM ("
        "SELECT state, reason, count AS told, 0 AS found FROM tally UNION ALL "
        "SELECT state, reason, 0, count(*) FROM samples GROUP BY state, reason"
        ") GROUP BY state, reason HAVING sum(told) != sum(found)",
    ),
    (
        "several open attempts",
        f"SELECT id, count(*) FROM samples WHERE state != {DROPPED} GROUP BY id HAVING count(*) > 1",
    ),
    ("in two steps", "SELECT serial, count(*) FROM members GROUP BY serial HAVING count(*) > 1"),
    (
        "journaled for another step than its own (id, own, journal)",
        "SELECT id, step, members.version FROM members JOIN samples USING (serial) WHERE step IS NOT members.version",
    ),
    (
        "state and step (id, state, version, trained)",
        "SELECT id, state, steps.version, trained FROM samples JOIN steps ON steps.version = samples.step "
        f"WHERE state != CASE trained WHEN 1 THEN {TRAINED} ELSE {FINISHED} END",
    ),
    (
        "trained, and in no step",
        f"SELECT id FROM samples WHERE state = {TRAINED} AND step IS NULL",
    ),
    (
        "in a step that is not complete (version, samples, members)",
        "SELECT version, samples, (SELECT count(*) FROM members WHERE members.version = steps.version) AS found "
        "FROM steps WHERE samples != found",
    ),
    ("pending, with a payload", f"SELECT id FROM samples WHERE state = {PENDING} AND segment IS NOT NULL"),
    ("finished, without a payload", f"SELECT id FROM samples WHERE state = {FINISHED} AND segment IS NULL"),
    ("dropped without a reason", f"SELECT id FROM samples WHERE (state = {DROPPED}) != (reason != 0)"),
)


async def audit(ledger: SqliteLedger) -> list[str]:
    """Look at every row and every payload; what is wrong, in sentences. Empty where the ledger is sound."""
    db = ledger.commits.db

    def look() -> list[str]:
        return [*audit_tables(db, ledger.rows.counts()), *audit_payloads(db, ledger.segments)]

    return await ledger.commits.run(look)


def audit_tables(db: sqlite3.Connection, counts: Mapping[str, int]) -> list[str]:
    """What is wrong with the rows: a sentence each, with the first of them."""
    wrong = []
    try:
        conservation(counts)
    except StorageError as error:
        wrong.append(str(error))
    for what, query in CHECKS:
        found = db.execute(f"SELECT * FROM ({query}) LIMIT {SHOWN + 1}").fetchall()
        if found:
            more = " and more" if len(found) > SHOWN else ""
            wrong.append(f"{what}: {', '.join(str(row) for row in found[:SHOWN])}{more}")
    return wrong


def audit_payloads(db: sqlite3.Connection, segments: Segments) -> Iterator[str]:
    """Payloads and suspended turns that cannot be read."""
    stored = (
        "SELECT id, segment, coalesce(offset, 0), coalesce(length, 0), crc32 FROM samples WHERE segment IS NOT NULL"
    )
    turns = "SELECT id, t.segment, t.offset, t.length, t.crc32 FROM turns AS t JOIN samples USING (serial)"
    for what, query in (("the payload", stored), ("the turns", turns)):
        for name, segment, offset, length, crc32 in db.execute(query):
            try:
                segments.read(RecordPlace(segment=segment, offset=offset, length=length, crc32=crc32))
            except StorageError as error:
                yield f"{what} of {name} cannot be read: {error}"
