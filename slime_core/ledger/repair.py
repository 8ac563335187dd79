"""A ledger or segments that are damaged: a checkpoint's copy takes their place, and samples are made again.

    ledger gone, damaged, or older than the checkpoint    the checkpoint's copy takes its place
    payloads that cannot be read                          their groups are pending again; so are those generated with
                                                          weights of the steps that they were in, or later ones

A step that lost a sample is no longer recorded, nor is any after it: they are made again from the checkpoint.
A resumed run calls :func:`recover`. By hand, the copy alone is put back by

    python -m slime_core.ledger.repair RUN_DIR [--ledger-dir DIR] [--copy FILE]

The damaged files are kept as ``corrupt-N-ledger.sqlite``. Rows that are newer than the copy are gone: the run that is
resumed from the copy's checkpoint, or an earlier one, generates those samples again.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slime_core import durable
from slime_core.errors import StorageError
from slime_core.ledger.codec import array_refs, decode
from slime_core.ledger.commits import Owner
from slime_core.ledger.rows import OF_PROMPT, of_prompt
from slime_core.ledger.schema import (
    APPLICATION_ID,
    DROPPED,
    FINISHED,
    MARKS,
    NAME,
    PENDING,
    READABLE,
    TRAINED,
    chunks,
    connect,
    damaged,
    database_path,
    sqlite_error,
)
from slime_core.ledger.segments import RecordPlace, Segments

UNREADABLE = frozenset({"STO111", "STO112", "STO121"})
STORED = f"""
SELECT serial, id, state, segment, offset, length, crc32 FROM samples WHERE segment IS NOT NULL
AND (state = {FINISHED} OR coalesce(position, :first) >= :first AND (step IS NULL OR step > :version))
"""
TURNS = f"""
SELECT serial, id, state, turns.segment, turns.offset, turns.length, turns.crc32
FROM turns JOIN samples USING (serial) WHERE state != {TRAINED} OR step > :version
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
class Repaired:
    """Result of a repair: the copy's rows, and how many newer rows the replaced file had (None: unknown)."""

    path: Path
    damaged: tuple[Path, ...]
    rows: int
    steps: int
    newer: int | None


def newest_copy(run_dir: Path) -> Path:
    """The ledger of the newest checkpoint that has one.

    Raises:
        StorageError: STO111 no checkpoint has one.
    """
    copies = [path for path in run_dir.glob(f"checkpoints/step-*/{NAME}") if path.parent.name[5:].isdecimal()]
    if not copies:
        raise StorageError(
            "no checkpoint has a copy of the ledger",
            code="STO111",
            where=str(run_dir / "checkpoints"),
            fix="name a copy with --copy FILE, or start another run",
        )
    return max(copies, key=lambda path: int(path.parent.name[5:]))


def repair(run_dir: Path, copy: Path, ledger_dir: Path | None = None) -> Repaired:
    """Put ``copy`` in the place of a run's ledger; a crash in between leaves an error that names this command.

    Raises:
        StorageError: STO116 the ledger is in use, STO117 the copy is damaged, STO113 it is no ledger of this version,
            STO109, STO110 or STO121 it cannot be written.
    """
    path = database_path(run_dir, ledger_dir)
    owner = Owner(path)
    try:
        rows, steps = _verified(copy)
        before = max(_rows(path), owner.marks[0])
        moved = _replace(path, copy)
        owner.note(rows, steps)
    finally:
        owner.release()
    return Repaired(path=path, damaged=moved, rows=rows, steps=steps, newer=max(before - rows, 0) if before else None)


def _replace(path: Path, copy: Path) -> tuple[Path, ...]:
    aside = path.with_name(f".{path.name}.repair.tmp")
    number = 1 + max((int(old.name.split("-")[1]) for old in path.parent.glob(f"corrupt-*-{path.name}")), default=0)
    moved = []
    try:
        aside.unlink(missing_ok=True)
        with copy.open("rb") as file:
            durable.write_file(aside, chunks(file))
        log = path.with_name(f"{path.name}-wal")
        for old in (log, path):  # the database last: without its log, its marks identify it
            if old.exists() and old.stat().st_size:
                moved.append(path.with_name(f"corrupt-{number}-{old.name}"))
                durable.disk.rename(old, moved[-1])
        for sidecar in (log, path.with_name(f"{path.name}-shm")):
            sidecar.unlink(missing_ok=True)
        durable.disk.rename(aside, path)
        durable.disk.sync_folder(path.parent)
    except OSError as error:
        raise durable.storage_error(error, path, "the ledger cannot be put back") from error
    return tuple(moved)


def _verified(copy: Path) -> tuple[int, int]:
    try:
        with closing(_open(copy)) as db:
            marks = tuple(db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            if marks not in {(APPLICATION_ID, version) for version in READABLE}:
                raise StorageError(f"{copy.name} is not a ledger of this version", code="STO113", where=str(copy))
            (sound,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise damaged(copy, "the copy is damaged too", str(sound))
            rows, steps = db.execute(MARKS).fetchone()
    except sqlite3.Error as error:
        raise damaged(copy, "the copy is damaged too", str(error)) from error
    return rows, steps


def _rows(path: Path) -> int:
    """Rows of a database that may be damaged, as far as they can be read."""
    with suppress(sqlite3.Error, OSError):
        with closing(_open(path)) as db:
            return int(db.execute(MARKS).fetchone()[0])
    return 0


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


@dataclass(slots=True, frozen=True, kw_only=True)
class ResumePoint:
    """Where a run resumes: the checkpoint's version, its copy of the ledger, and its number of samples.

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
    def place(self) -> RecordPlace:
        return RecordPlace(*self[3:])


def recover(run_dir: Path, standing: ResumePoint, ledger_dir: str = "", *, thorough: bool = False) -> list[str]:
    """Repair the ledger so that the run can resume; return one sentence for each damage.

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
        note = f"; the damaged files are {', '.join(old.name for old in done.damaged)}" if done.damaged else ""
        lines.append(
            f"DAMAGED LEDGER {path}: {error.what} ({error.why}). The copy of checkpoint {standing.version} takes its "
            f"place, with {done.rows} samples and {done.steps} steps; later ones are generated and trained again{note}"
        )
    if path.exists():
        lines += _reset_unreadable(path, Segments(run_dir / "segments"), standing)
    return lines


def _check(path: Path, standing: ResumePoint, *, thorough: bool) -> None:
    if not (path.exists() and path.stat().st_size):
        if standing.issued:
            raise damaged(path, "the ledger is gone", f"the checkpoint was made with {standing.issued} samples")
        return
    owner = Owner(path)
    try:
        with closing(connect(path, owner.marks, thorough=thorough)) as db:
            (newest,) = db.execute("SELECT coalesce(max(serial), 0) FROM samples").fetchone()
    except sqlite3.Error as error:
        raise sqlite_error(error, path) from error
    finally:
        owner.release()
    if newest < standing.issued:
        lost = f"it has {newest} samples, the checkpoint was made with {standing.issued}"
        raise damaged(path, "the ledger has lost commits", lost)


def _no_copy(error: StorageError, standing: ResumePoint) -> StorageError:
    lacks = f"checkpoint {standing.version} has no copy of it" if standing.issued else "there is no checkpoint"
    fix = "put the file back, or start another run: slime run ... --run-dir NEW_DIR"
    return StorageError(error.what, code="STO117", where=error.where, why=f"{error.why}; {lacks}", fix=fix)


def _reset_unreadable(path: Path, segments: Segments, standing: ResumePoint) -> list[str]:
    owner = Owner(path)
    try:
        with closing(connect(path, owner.marks)) as db:
            samples = list(_unreadable(db, segments, STORED, {"version": standing.version, "first": standing.first}))
            turns = list(_unreadable(db, segments, TURNS, {"version": standing.version}))
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
    steps = f", and the steps from version {begin} on train again" if begin else ""
    return [*_damage(segments, samples + turns), f"{groups} groups are generated again{steps}"]


def _unreadable(
    db: sqlite3.Connection, segments: Segments, query: str, parameters: dict[str, int]
) -> Iterator[tuple[_Row, StorageError]]:
    """Payloads that the run will ask for and that cannot be read, each with why."""
    for row in (_Row(*values) for values in db.execute(query, parameters)):
        try:
            body = segments.read(row.place)
            for ref in array_refs(decode(body)).values() if query == STORED else ():
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


def main(args: Sequence[str] | None = None) -> int:
    """The command; the answer is its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_core.ledger.repair",
        description="Put a checkpoint's copy in the place of a damaged ledger.",
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--copy", type=Path, help="default: the newest checkpoint's")
    parser.add_argument("--ledger-dir", type=Path, help="where the run has its ledger outside the run directory")
    options = parser.parse_args(args)
    try:
        copy = options.copy or newest_copy(options.run_dir)
        done = repair(options.run_dir, copy, options.ledger_dir)
    except StorageError as error:
        sys.stderr.write(error.render() + "\n")
        return error.exit_code
    newer = "an unknown number of rows was newer" if done.newer is None else f"{done.newer} rows were newer"
    sys.stdout.write(
        f"{done.path} is {copy} again: {done.rows} samples, {done.steps} steps; {newer} and will be generated again\n"
        + "".join(f"kept {old}\n" for old in done.damaged)
        + f"continue with: slime run --resume {options.run_dir}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
