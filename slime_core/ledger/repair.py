"""A ledger that is damaged, or has lost commits: a checkpoint's copy takes its place, and what is known is told.

    python -m slime_core.ledger.repair RUN_DIR [--ledger-dir DIR] [--copy FILE]

The damaged files are kept as ``corrupt-N-ledger.sqlite``. Rows that are newer than the copy are gone: the run that is
resumed from the copy's checkpoint, or an earlier one, generates those samples again.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from slime_core import durable
from slime_core.errors import StorageError
from slime_core.ledger.owner import Owner
from slime_core.ledger.schema import APPLICATION_ID, NAME, READABLE, chunks, damaged, database_path

MARKS = "SELECT (SELECT max(serial) FROM samples), (SELECT max(version) FROM steps)"


@dataclass(slots=True, frozen=True, kw_only=True)
class Repaired:
    """What was done: the copy's rows, and how many were newer in the file it replaced (None: nobody can tell)."""

    path: Path
    kept: tuple[Path, ...]
    rows: int
    steps: int
    newer: int | None


def newest_copy(run_dir: Path) -> Path:
    """The ledger of the newest checkpoint that has one.

    Raises:
        StorageError: STO111 no checkpoint has one.
    """
    found = [path for path in run_dir.glob(f"checkpoints/step-*/{NAME}") if path.parent.name[5:].isdecimal()]
    if not found:
        raise StorageError(
            "no checkpoint has a copy of the ledger",
            code="STO111",
            where=str(run_dir / "checkpoints"),
            fix="name a copy with --copy FILE, or start another run",
        )
    return max(found, key=lambda path: int(path.parent.name[5:]))


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
        kept = _replace(path, copy)
        owner.note(rows, steps)
    finally:
        owner.release()
    return Repaired(path=path, kept=kept, rows=rows, steps=steps, newer=max(before - rows, 0) if before else None)


def _replace(path: Path, copy: Path) -> tuple[Path, ...]:
    aside = path.with_name(f".{path.name}.repair.tmp")
    number = 1 + max((int(old.name.split("-")[1]) for old in path.parent.glob(f"corrupt-*-{path.name}")), default=0)
    kept = []
    try:
        aside.unlink(missing_ok=True)
        with copy.open("rb") as file:
            durable.write_file(aside, chunks(file))
        log = path.with_name(f"{path.name}-wal")
        for old in (log, path):  # the database last: without its log it is told apart by its marks
            if old.exists() and old.stat().st_size:
                kept.append(path.with_name(f"corrupt-{number}-{old.name}"))
                durable.disk.rename(old, kept[-1])
        for left in (log, path.with_name(f"{path.name}-shm")):
            left.unlink(missing_ok=True)
        durable.disk.rename(aside, path)
        durable.disk.sync_folder(path.parent)
    except OSError as error:
        raise durable.storage_error(error, path, "the ledger cannot be put back") from error
    return tuple(kept)


def _verified(copy: Path) -> tuple[int, int]:
    try:
        with closing(_open(copy)) as db:
            marks = tuple(db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
            if marks not in {(APPLICATION_ID, version) for version in READABLE}:
                raise StorageError(f"{copy.name} is no ledger of this version", code="STO113", where=str(copy))
            (sound,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise damaged(copy, "the copy is damaged too", str(sound))
            rows, steps = db.execute(MARKS).fetchone()
    except sqlite3.Error as error:
        raise damaged(copy, "the copy is damaged too", str(error)) from error
    return rows or 0, steps or 0


def _rows(path: Path) -> int:
    """Rows of a database that may be damaged, as far as it tells."""
    with suppress(sqlite3.Error, OSError):
        with closing(_open(path)) as db:
            return int(db.execute(MARKS).fetchone()[0] or 0)
    return 0


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def main(args: Sequence[str] | None = None) -> int:
    """The command; the answer is its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_core.ledger.repair", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--copy", type=Path, help="default: the newest checkpoint's")
    parser.add_argument("--ledger-dir", type=Path, help="where the run has its ledger outside the run directory")
    asked = parser.parse_args(args)
    try:
        copy = asked.copy or newest_copy(asked.run_dir)
        done = repair(asked.run_dir, copy, asked.ledger_dir)
    except StorageError as error:
        sys.stderr.write(error.render() + "\n")
        return error.exit_code
    newer = "an unknown number of rows was newer" if done.newer is None else f"{done.newer} rows were newer"
    sys.stdout.write(
        f"{done.path} is {copy} again: {done.rows} samples, {done.steps} steps; {newer} and will be made again\n"
        + "".join(f"kept {old}\n" for old in done.kept)
        + f"go on with: slime run --resume {asked.run_dir}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
