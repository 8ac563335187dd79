"""A run goes on though its ledger or segments are damaged: a checkpoint's copy, and samples that are made again.

    ledger gone, damaged, or older than the checkpoint    the checkpoint's copy takes its place
    payloads that cannot be read                          their groups are pending again; so is what was made with
                                                          weights of the steps that they were in, or later ones

A step that lost a sample is no longer recorded, nor is any after it: they are made again from the checkpoint.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slime_core.errors import StorageError
from slime_core.ledger.codec import decode
from slime_core.ledger.owner import Owner
from slime_core.ledger.repair import repair
from slime_core.ledger.rows import OF_PROMPT, array_refs, of_prompt
from slime_core.ledger.schema import DROPPED, FINISHED, PENDING, TRAINED, connect, damaged, database_path, sqlite_error
from slime_core.ledger.segments import Place, Segments

UNREADABLE = frozenset({"STO111", "STO112", "STO121"})
STORED = f"""
SELECT serial, id, state, segment, offset, length, crc32 FROM samples WHERE segment IS NOT NULL
AND (state = {FINISHED} OR coalesce(position, ?2) >= ?2 AND (step IS NULL OR step > ?1))
"""
TURNS = f"""
SELECT serial, id, state, turns.segment, turns.offset, turns.length, turns.crc32
FROM turns JOIN samples USING (serial) WHERE state != {TRAINED} OR step > ?1
"""
LATER = f"SELECT id FROM samples WHERE newest >= ? AND (state = {FINISHED} OR state = {TRAINED})"
OPEN_ROWS = (
    f"SELECT serial FROM samples WHERE {OF_PROMPT} AND state IN ({FINISHED}, {TRAINED}) AND (step IS NULL OR step > ?)"
)
RESET = f"""
UPDATE samples SET state = {PENDING}, newest = NULL, ticks = NULL,
    segment = NULL, offset = NULL, length = NULL, crc32 = NULL WHERE serial = ?
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class Standing:
    """Where a run goes on: the checkpoint's version, its copy of the ledger, and how many samples it knew.

    Groups before position ``first`` were trained or dropped by then.
    """

    version: int = 0
    copy: Path | None = None
    issued: int = 0
    first: int = 0


class _Row(NamedTuple):
    serial: int
    id: str
    state: int
    segment: int
    offset: int
    length: int
    crc32: int

    @property
    def place(self) -> Place:
        return Place(segment=self.segment, offset=self.offset, length=self.length, crc32=self.crc32)


def recover(run_dir: Path, standing: Standing, ledger_dir: str = "", *, thorough: bool = False) -> list[str]:
    """Make the ledger one that the run can go on with; the answer says what was damaged, a sentence each.

    A ledger of any size is checked whole if ``thorough``.

    Raises:
        StorageError: STO117 it is damaged and the checkpoint has no copy, STO116 in use; it cannot be written.
    """
    elsewhere = Path(ledger_dir) if ledger_dir else None
    path = database_path(run_dir, elsewhere)
    lines = []
    try:
        _check(path, standing, thorough=thorough)
    except StorageError as error:
        if error.code != "STO117":
            raise
        if standing.copy is None:
            raise _no_copy(error, standing) from error
        done = repair(run_dir, standing.copy, elsewhere)
        kept = f"; the damaged files are {', '.join(old.name for old in done.kept)}" if done.kept else ""
        lines.append(
            f"DAMAGED LEDGER {path}: {error.what} ({error.why}). The copy of checkpoint {standing.version} takes its "
            f"place, with {done.rows} samples and {done.steps} steps; later ones are made again{kept}"
        )
    if path.exists():
        lines += _reset_unreadable(path, Segments(run_dir / "segments"), standing)
    return lines


def _check(path: Path, standing: Standing, *, thorough: bool) -> None:
    if not (path.exists() and path.stat().st_size):
        if standing.issued:
            raise damaged(path, "the ledger is gone", f"the checkpoint was made with {standing.issued} samples")
        return
    owner = Owner(path)
    try:
        with closing(connect(path, owner.marks, thorough=thorough)) as db:
            (known,) = db.execute("SELECT coalesce(max(serial), 0) FROM samples").fetchone()
    except sqlite3.Error as error:
        raise sqlite_error(error, path) from error
    finally:
        owner.release()
    if known < standing.issued:
        lost = f"it has {known} samples, the checkpoint was made with {standing.issued}"
        raise damaged(path, "the ledger has lost commits", lost)


def _no_copy(error: StorageError, standing: Standing) -> StorageError:
    lacks = f"checkpoint {standing.version} has no copy of it" if standing.issued else "there is no checkpoint"
    fix = "put the file back, or start another run: slime run ... --run-dir NEW_DIR"
    return StorageError(error.what, code="STO117", where=error.where, why=f"{error.why}; {lacks}", fix=fix)


def _reset_unreadable(path: Path, segments: Segments, standing: Standing) -> list[str]:
    owner = Owner(path)
    try:
        with closing(connect(path, owner.marks)) as db:
            samples = list(_unreadable(db, segments, STORED, (standing.version, standing.first)))
            turns = list(_unreadable(db, segments, TURNS, (standing.version,)))
            if not (samples or turns):
                return []
            db.execute("BEGIN IMMEDIATE")
            db.executemany("DELETE FROM turns WHERE serial = ?", [(row.serial,) for row, _ in turns])
            begin, groups = _reset(db, [row for row, _ in samples], standing.version)
            if begin is not None:
                owner.note(owner.marks[0], min(owner.marks[1], begin - 1))  # first: it never says more than there is
            db.execute("COMMIT")
    except sqlite3.Error as error:
        raise sqlite_error(error, path) from error
    finally:
        owner.release()
        segments.close()
    steps = f", and the steps from version {begin} on are made again" if begin else ""
    return [*_damage(segments, samples + turns), f"{groups} groups are generated again{steps}"]


def _unreadable(
    db: sqlite3.Connection, segments: Segments, query: str, parameters: tuple[int, ...]
) -> Iterator[tuple[_Row, StorageError]]:
    """Payloads that the run will ask for and that cannot be read, each with why."""
    for row in (_Row(*values) for values in db.execute(query, parameters)):
        try:
            body = segments.read(row.place)
            for ref in array_refs(decode(body)) if query == STORED else ():
                segments.read_array(ref)
        except StorageError as error:
            if error.code not in UNREADABLE:
                raise
            yield row, error


def _reset(db: sqlite3.Connection, rows: list[_Row], version: int) -> tuple[int | None, int]:
    """Forget samples and what came of them: the first step that is made again, and how many groups."""
    dropped = [(row.serial,) for row in rows if row.state == DROPPED]
    db.executemany("UPDATE samples SET segment = NULL WHERE serial = ?", dropped)
    groups = {_prompt(row.id) for row in rows if row.state != DROPPED}
    query = f"SELECT min(step) FROM samples WHERE {OF_PROMPT} AND step > ?"
    steps = [db.execute(query, (*of_prompt(name), version)).fetchone()[0] for name in groups]
    begin: int | None = min((step for step in steps if step is not None), default=None)
    if begin is not None:
        groups |= {_prompt(name) for (name,) in db.execute(LATER, (begin,))}
        db.execute(f"UPDATE samples SET state = {FINISHED} WHERE step >= ? AND state = {TRAINED}", (begin,))
        db.execute("UPDATE samples SET step = NULL WHERE step >= ?", (begin,))
        db.execute("DELETE FROM members WHERE version >= ?", (begin,))
        db.execute("DELETE FROM steps WHERE version >= ?", (begin,))
    for name in groups:
        again = db.execute(OPEN_ROWS, (*of_prompt(name), version)).fetchall()
        db.executemany("DELETE FROM arrays WHERE serial = ?", again)
        db.executemany(RESET, again)
    return begin, len(groups)


def _prompt(name: str) -> str:
    return name.rpartition("-")[0]


def _damage(segments: Segments, lost: list[tuple[_Row, StorageError]]) -> Iterator[str]:
    """A sentence per segment file."""
    for number in sorted({row.segment for row, _ in lost}):
        names = [(row.id, error) for row, error in lost if row.segment == number]
        name, error = names[0]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"DAMAGED SEGMENT {segments.path(number)}: sample {name}{more} cannot be read ({error.code} {error.why})"
