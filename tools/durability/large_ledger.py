"""A ledger of any size, made with SQL: what a run of millions of samples leaves behind, its payloads pruned."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from slime_core.ledger.schema import DROPPED, TRAINED

GROUP = 8  # samples a prompt
STEP = 1024  # samples a step
DROPS = 20  # one group in so many is dropped
COLUMNS = (
    *("serial", "id", "attempt", "state", "reason", "position", "place", "rollout", "version", "newest", "ticks"),
    *("step", "reward", "tokens", "response_length"),
)
INSERT = f"INSERT INTO samples ({', '.join(COLUMNS)}) VALUES ({', '.join('?' for _ in COLUMNS)})"


def fill_ledger(path: Path, samples: int) -> None:
    """Add ``samples`` rows behind those that are there, to a ledger that nobody has open."""
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA cache_size = -200000")
        (first,) = db.execute("SELECT coalesce(max(serial), 0) + 1 FROM samples").fetchone()
        db.execute("INSERT INTO reasons (name) VALUES ('equal_rewards') ON CONFLICT DO NOTHING")
        (reason,) = db.execute("SELECT id FROM reasons WHERE name = 'equal_rewards'").fetchone()
        (version,) = db.execute("SELECT coalesce(max(version), 0) + 1 FROM steps").fetchone()
        db.execute("BEGIN")
        db.executemany(INSERT, _rows(first, samples, version, reason))
        db.execute(
            "INSERT INTO steps SELECT step, 'main', count(*), 1, printf('%064x', step) FROM samples "
            "WHERE serial >= ? AND step IS NOT NULL GROUP BY step",
            (first,),
        )
        db.execute(
            "INSERT INTO members SELECT step, row_number() OVER (PARTITION BY step ORDER BY serial) - 1, serial "
            "FROM samples WHERE serial >= ? AND step IS NOT NULL",
            (first,),
        )
        db.execute("COMMIT")
    finally:
        db.close()


def _rows(first: int, count: int, first_version: int, reason: int) -> Iterator[tuple[object, ...]]:
    for serial in range(first, first + count):
        position, rollout = divmod(serial - 1, GROUP)
        version = first_version + (serial - first) // STEP
        dropped = position % DROPS == 0
        state = (DROPPED, reason) if dropped else (TRAINED, 0)
        made = (rollout, serial - 1, version - 1, version - 1, 517, None if dropped else version)
        numbers = (0.123456789 * rollout, 1045, 517)
        yield (serial, f"main/{position}-{rollout}", 0, *state, position, *made, *numbers)
