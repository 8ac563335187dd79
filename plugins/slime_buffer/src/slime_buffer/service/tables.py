"""The tables of `service.sqlite`, and what their rows are outside of SQL.

open -> (every rollout written) -> finished, unread -> acknowledged -> read
  `------------------ dropped(reason), unread until its reader knows
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slime_core.errors import StorageError
from slime_core.failpoints import failpoint
from slime_core.ledger.schema import sqlite_error

APPLICATION_ID = 0x534C4253  # "SLBS"
SCHEMA_VERSION = 1
OPEN, FINISHED, DROPPED, READ = range(4)
STATES = ("open", "finished", "dropped", "read")
WORK, BATCH = 0, 1

SCHEMA = """
CREATE TABLE runs (name TEXT PRIMARY KEY, engine TEXT NOT NULL) STRICT;
CREATE TABLE groups (
    serial INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL, id TEXT NOT NULL, attempt INTEGER NOT NULL, task TEXT NOT NULL,
    state INTEGER NOT NULL DEFAULT 0 CHECK (state BETWEEN 0 AND 3),
    told INTEGER NOT NULL DEFAULT 0,        -- whether the ledger knows of this state
    unread INTEGER NOT NULL DEFAULT 0,      -- ended, and its reader does not know
    reason TEXT NOT NULL DEFAULT '',
    spec TEXT NOT NULL,                     -- AskedGroup or PushedGroup without rollouts, JSON
    names TEXT NOT NULL,                    -- sample ids, in order, JSON
    size INTEGER NOT NULL, written INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0,
    outcome TEXT NOT NULL DEFAULT '',       -- [sequences, why it failed] a rollout, JSON
    lease INTEGER, claim INTEGER,           -- of leases
    step INTEGER,                           -- of acknowledgements; below 0: it was, and is handed out again
    UNIQUE (run, id, attempt)
) STRICT;
CREATE INDEX queued ON groups (serial) WHERE state = 0 AND lease IS NULL;
CREATE INDEX unread ON groups (run, serial) WHERE unread = 1;
CREATE INDEX untold ON groups (serial) WHERE told = 0;
CREATE INDEX leased ON groups (lease) WHERE lease IS NOT NULL;
CREATE INDEX claimed ON groups (claim) WHERE claim IS NOT NULL;
CREATE INDEX opened ON groups (run) WHERE state = 0;
CREATE INDEX stepped ON groups (step) WHERE step IS NOT NULL;
CREATE TABLE staged (                       -- rollouts of groups that are not complete
    serial INTEGER NOT NULL REFERENCES groups (serial), place INTEGER NOT NULL, part INTEGER NOT NULL,
    body BLOB, tokens INTEGER NOT NULL, failed TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (serial, place, part)
) STRICT, WITHOUT ROWID;
CREATE TABLE leases (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind INTEGER NOT NULL, owner TEXT NOT NULL, request TEXT NOT NULL,
    seconds REAL NOT NULL
) STRICT;
CREATE INDEX asked ON leases (kind, owner, request);
"""
GROUP = "serial, run, id, attempt, state, reason, spec, names, outcome"


@dataclass(slots=True, frozen=True)
class BufferLimits:
    """What one service holds at most."""

    unread: int = 4096  # groups of a run that have ended and are not read; beyond it writers wait
    open: int = 65536  # requested groups of a run that are not written
    runs: int = 1024


class QueueFull(Exception):
    """A queue is full; the request changed nothing and may be repeated."""

    def __init__(self, what: str, size: int) -> None:
        super().__init__(f"{size} {what}")
        self.what, self.size = what, size


@dataclass(slots=True)
class Stored:
    """A group on disk."""

    serial: int
    run: str
    id: str
    attempt: int
    state: int
    reason: str
    spec: dict[str, Any]
    names: list[str]
    outcome: list[tuple[int, str]]

    @property
    def ledger_id(self) -> str:
        """Of its prompt in the ledger: no id of another group begins with it and a hyphen."""
        return f"{quote(f'{self.run}:{self.id}', safe='/:')}@{self.attempt}"

    def sample_ids(self) -> list[str]:
        """Of its samples in the ledger."""
        return [
            f"{self.ledger_id}-{place}" + (f".{part}" if part else "")
            for place, (parts, _) in enumerate(self.outcome)
            for part in range(parts)
        ]


@dataclass(slots=True, frozen=True)
class Incoming:
    """One written rollout: its sequences as the codec's bytes and token counts, or why it failed."""

    group: str
    attempt: int
    sample: str
    bodies: list[bytes]
    tokens: list[int]
    failed: str = ""


@dataclass(slots=True)
class Change:
    """What a call has moved."""

    standing: list[tuple[str, int, int, str]] = field(default_factory=list)  # id, attempt, state, reason
    verdicts: list[tuple[str, str]] = field(default_factory=list)  # of written rollouts
    complete: list[int] = field(default_factory=list)  # serials of open groups that wait for nothing
    untold: list[int] = field(default_factory=list)  # serials that the ledger must be told of


class Tables:
    """One connection. Not for two threads at once. Every method raises StorageError where the disk or SQLite fails."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "service.sqlite"
        try:
            self.db = sqlite3.connect(self.path, timeout=10, isolation_level=None, check_same_thread=False)
            try:
                _prepare(self.db, self.path)
            except BaseException:
                self.db.close()
                raise
        except sqlite3.Error as error:
            raise sqlite_error(error, self.path) from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block, durable when it ends, or nothing."""
        try:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
                failpoint("buffer.commit.before")
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise sqlite_error(error, self.path) from error
        failpoint("buffer.commit.after")

    def rows(self, query: str, *values: object) -> list[Any]:
        """The rows of a query."""
        try:
            return self.db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise sqlite_error(error, self.path) from error

    def one(self, query: str, *values: object) -> Any:
        """The first value of the only row."""
        return self.rows(query, *values)[0][0]

    def groups(self, serials: list[int]) -> list[Stored]:
        """Groups by serial."""
        query = f"SELECT {GROUP} FROM groups WHERE serial = ?"
        return [stored(row) for serial in serials for row in self.rows(query, serial)]


def stored(row: tuple[Any, ...]) -> Stored:
    serial, run, name, attempt, state, reason, spec, names, outcome = row
    parts = [(int(count), str(failed)) for count, failed in json.loads(outcome or "[]")]
    return Stored(serial, run, name, attempt, state, reason, json.loads(spec), json.loads(names), parts)


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and (application, version) != (APPLICATION_ID, SCHEMA_VERSION):
        raise StorageError(
            f"{path.name} has schema {version}, this slime reads {SCHEMA_VERSION}",
            code="STO113",
            where=str(path),
            fix="use the slime that made it, or serve another folder",
        )
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    if not tables:
        db.executescript(
            f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
            f"{SCHEMA} COMMIT;"
        )
