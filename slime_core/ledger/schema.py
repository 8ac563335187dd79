"""The ledger's SQLite file: its tables, where it may lie, how it is opened and copied.

One row a sample and attempt, under 300 bytes with its indexes; payloads lie in segment files. `tally` counts rows by
state and reason and is kept by triggers, inside the transaction that changes a row. The partial index holds only rows
whose payload is not pruned.

SQLite's write-ahead log needs a local file system, and never says so: a network file system is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from slime_core import durable
from slime_core.durable import FileMark, storage_error
from slime_core.errors import StorageError

APPLICATION_ID = 0x534C4D31  # "SLM1"
SCHEMA_VERSION = 4
READABLE = (2, 3, 4)  # 2 has a column and two tables more, which are empty; 2 and 3 get `MODEL` when they are opened
MODEL = "ALTER TABLE samples ADD COLUMN model TEXT"
BUSY_MS = 10_000
CACHE_KIB = 2000  # of the file in memory, a connection; SQLite's own default
CHECKED_BYTES = 8 << 20  # a file up to this size is checked whole when it is opened

PENDING, FINISHED, TRAINED, DROPPED = range(4)
STATES = ("pending", "finished", "trained", "dropped")

SCHEMA = """
CREATE TABLE reasons (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE samples (
    serial INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    state INTEGER NOT NULL CHECK (state BETWEEN 0 AND 3),
    reason INTEGER NOT NULL DEFAULT 0,      -- of reasons, 0 where the state is not dropped
    position INTEGER,                       -- the prompt's place in its stage
    place INTEGER,                          -- in the group as it was finished, or among what was dropped together
    rollout INTEGER,
    version INTEGER,                        -- lowest weights that made a token
    newest INTEGER,                         -- highest weights that made a token
    ticks INTEGER,                          -- tokens that those made
    step INTEGER,                           -- version for whose step it is journaled
    reward REAL,
    tokens INTEGER,
    response_length INTEGER,
    segment INTEGER, offset INTEGER, length INTEGER, crc32 INTEGER,   -- NULL: no payload, or pruned
    model TEXT,                             -- the adapter that made it, of several
    UNIQUE (id, attempt)
) STRICT;
CREATE INDEX living ON samples (segment) WHERE segment IS NOT NULL;
CREATE TABLE turns (
    serial INTEGER PRIMARY KEY REFERENCES samples (serial),
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, crc32 INTEGER NOT NULL
) STRICT;
CREATE TABLE arrays (                       -- segments, other than its own, that a sample's ArrayRefs name
    segment INTEGER NOT NULL,
    serial INTEGER NOT NULL REFERENCES samples (serial),
    PRIMARY KEY (segment, serial)
) STRICT, WITHOUT ROWID;
CREATE TABLE steps (
    version INTEGER PRIMARY KEY,            -- the version that the step makes
    stage TEXT NOT NULL,
    samples INTEGER NOT NULL,
    trained INTEGER NOT NULL DEFAULT 0,
    fingerprint TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE TABLE members (
    version INTEGER NOT NULL REFERENCES steps (version),
    place INTEGER NOT NULL,
    serial INTEGER NOT NULL REFERENCES samples (serial),
    PRIMARY KEY (version, place)
) STRICT, WITHOUT ROWID;
CREATE TABLE tally (
    state INTEGER NOT NULL, reason INTEGER NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (state, reason)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER sample_added AFTER INSERT ON samples BEGIN
    INSERT INTO tally VALUES (new.state, new.reason, 1)
        ON CONFLICT (state, reason) DO UPDATE SET count = count + 1;
END;
CREATE TRIGGER sample_moved AFTER UPDATE OF state, reason ON samples BEGIN
    UPDATE tally SET count = count - 1 WHERE state = old.state AND reason = old.reason;
    INSERT INTO tally VALUES (new.state, new.reason, 1)
        ON CONFLICT (state, reason) DO UPDATE SET count = count + 1;
END;
CREATE TRIGGER sample_kept BEFORE DELETE ON samples BEGIN
    SELECT RAISE(ABORT, 'a sample is never deleted');
END;
"""
MARKS = "SELECT coalesce((SELECT max(serial) FROM samples), 0), coalesce((SELECT max(version) FROM steps), 0)"
"""The last row and the last step; 0 for none."""
NAME = "ledger.sqlite"
NETWORK = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "virtiofs", "weka", "wekafs",
})  # fmt: skip
LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs", "fuse.lxcfs"})
MOUNTS = Path("/proc/self/mountinfo")
ESCAPE = re.compile(r"\\([0-7]{3})")
CHUNK = 64 << 10
CACHE = "PRAGMA cache_size = -32"  # KiB, while copying: each page is read once


def connect(path: Path, marks: tuple[int, int] = (0, 0), *, thorough: bool = False) -> sqlite3.Connection:
    """Open or create a ledger file: WAL, durable commits, transactions begun by hand.

    ``marks`` are the last serial and step that are known to have been committed. A large file is checked if
    ``thorough``.

    Raises:
        StorageError: STO109 disk full, STO110 not writable, STO113 made by another version, STO116 in use, STO117
            damaged, or without rows that were committed.
    """
    try:
        db = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
        try:
            _prepare(db, path)
            _check(db, path, marks, thorough)
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        raise sqlite_error(error, path) from error
    return db


def damaged(path: Path, what: str, why: str) -> StorageError:
    """STO117, with the command that makes the ledger whole."""
    return StorageError(what, code="STO117", where=str(path), why=why, fix=_way_back(path))


def _way_back(path: Path) -> str:
    run_dir = path.parent if (path.parent / "config.toml").exists() else "RUN_DIR"  # else it is in report.ledger_dir
    return f"slime run --resume {run_dir}   takes the newest checkpoint's copy"


def _check(db: sqlite3.Connection, path: Path, marks: tuple[int, int], thorough: bool) -> None:
    serial, step = db.execute(MARKS).fetchone()
    if serial < marks[0] or step < marks[1]:
        lost = f"it has {serial} samples and {step} steps, and {marks[0]} and {marks[1]} were committed"
        raise damaged(path, "the ledger has lost commits", f"{lost}: its -wal file was removed, or the file is older")
    if thorough or path.stat().st_size <= CHECKED_BYTES:
        (report,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if report != "ok":
            raise damaged(path, "the ledger is damaged", str(report))


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables and (application != APPLICATION_ID or version not in READABLE):
        is_ours = application == APPLICATION_ID
        raise StorageError(
            f"{path.name} has schema {version}, this slime reads {SCHEMA_VERSION}"
            if is_ours
            else f"{path} is not a ledger",
            code="STO113",
            where=str(path),
            fix="use the slime that made it, or start another run: --run-dir",
        )
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    if not tables:
        db.executescript(
            f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
            f"{SCHEMA} COMMIT;"
        )
    elif version < SCHEMA_VERSION:
        db.executescript(f"BEGIN IMMEDIATE; {MODEL}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def sqlite_error(error: sqlite3.Error, path: Path) -> StorageError:
    """SQLite's error with what to do about it."""
    name = getattr(error, "sqlite_errorname", "") or ""
    kinds = {
        "SQLITE_FULL": ("STO109", "the disk is full", "free space, then slime run --resume RUN_DIR"),
        "SQLITE_IOERR": ("STO121", "the device failed", "look at the disk (dmesg), then slime run --resume RUN_DIR"),
        "SQLITE_READONLY": ("STO110", "the file is read-only", "make it writable, or choose another --run-dir"),
        "SQLITE_CANTOPEN": ("STO110", "the file cannot be opened", "make its folder writable, or choose --run-dir"),
        "SQLITE_PERM": ("STO110", "permission was denied", "make it writable, or choose another --run-dir"),
        "SQLITE_BUSY": ("STO116", "another process holds it", "one run directory has one run: stop the other"),
        "SQLITE_LOCKED": ("STO116", "another process holds it", "one run directory has one run: stop the other"),
        "SQLITE_CORRUPT": ("STO117", "the file is damaged", _way_back(path)),
        "SQLITE_NOTADB": ("STO117", "the file is not a SQLite database", _way_back(path)),
    }
    for prefix, (code, reason, fix) in kinds.items():
        if name.startswith(prefix):
            if code == "STO116" and (pid := locker(path)):
                reason, fix = f"process {pid} holds it", f"one run directory has one run: stop process {pid}"
            return StorageError(f"the ledger failed: {error}", code=code, where=str(path), why=reason, fix=fix)
    return StorageError(f"the ledger failed: {error}", where=str(path), why=name)


def locker(path: Path) -> int:
    """The pid of another process that has the database file, or its shared memory, locked; 0 for none."""
    inodes = set()
    for one in (path, path.with_name(f"{path.name}-shm")):
        with suppress(OSError):
            inodes.add(one.stat().st_ino)
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.replace("-> ", "").split()
            if int(fields[5].rpartition(":")[2]) in inodes and int(fields[4]) not in (0, -1, os.getpid()):
                return int(fields[4])
    return 0


def network_type(path: Path) -> str:
    """The type of the network file system that holds ``path``; empty for a local one, or if unknown."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    mount_point, kind = "", ""
    resolved = str(path.resolve())
    for line in lines:
        place, _, behind = line.partition(" - ")
        mount = ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), place.split()[4])
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(mount_point):  # a later mount covers an earlier one
            mount_point, kind = mount, behind.split()[0]
    remote = kind in NETWORK or (kind.startswith("fuse") and kind not in LOCAL_FUSE)
    return kind if remote else ""


def database_path(run_dir: Path, ledger_dir: Path | None) -> Path:
    """``ledger.sqlite`` in the run directory, or in a folder of the run's own below ``ledger_dir``, which is made.

    Raises:
        StorageError: STO118 it would lie on a network file system, STO110 the folder cannot be made.
    """
    if ledger_dir is None:
        _require_local(run_dir, "the run directory", "keep the ledger on a local disk: --ledger-dir /var/tmp/slime")
        return run_dir / NAME
    _require_local(ledger_dir, "report.ledger_dir", "choose a folder on a local disk: --ledger-dir /var/tmp/slime")
    folder = own_folder(run_dir, ledger_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, folder, "the ledger's folder cannot be made") from error
    return folder / NAME


def own_folder(run_dir: Path, ledger_dir: Path) -> Path:
    """The folder of a run below ``ledger_dir``, by the run directory's path; nothing is made."""
    resolved = run_dir.resolve()
    digest = hashlib.sha256(str(resolved).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return ledger_dir / f"{resolved.name}-{digest}"


def _require_local(path: Path, what: str, fix: str) -> None:
    kind = network_type(path)
    if kind:
        raise StorageError(
            f"{what} is on a network file system ({kind})",
            code="STO118",
            where=str(path),
            why="SQLite's write-ahead log is shared memory: over a network it loses commits",
            fix=fix,
        )


def copy_database(source: Path, target: Path) -> FileMark:
    """Write everything that is committed into a new durable file, without a write-ahead log.

    The copy is made beside the source, on its local disk, and then written to ``target`` as plain bytes: SQLite never
    works on the file system of the target.

    Raises:
        StorageError: the source is damaged, or the target cannot be written.
    """
    aside = source.with_name(f".{source.name}.{os.getpid()}.copy")
    try:
        aside.unlink(missing_ok=True)
        _copy(source, aside)
        with aside.open("rb") as file:
            return durable.write_file(target, chunks(file))
    except sqlite3.Error as error:
        raise sqlite_error(error, source) from error
    except StorageError:
        raise
    except OSError as error:
        raise durable.storage_error(error, target, "the ledger cannot be copied") from error
    finally:
        for path in (aside, aside.with_name(f"{aside.name}-journal")):
            path.unlink(missing_ok=True)


def sweep_copies(source: Path) -> None:
    """Remove the halves of copies that were being made when an owner of ``source`` was killed."""
    for file in source.parent.glob(f".{source.name}.*.copy*"):
        file.unlink(missing_ok=True)


def _copy(source: Path, aside: Path) -> None:
    old = sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)
    try:
        old.execute(CACHE)
        new = sqlite3.connect(aside, isolation_level=None)
        try:
            new.execute(CACHE)
            old.backup(new)
            new.execute("PRAGMA journal_mode = DELETE")
            (sound,) = new.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":  # pages are copied as they are
                raise damaged(source, "the ledger is damaged", str(sound))
        finally:
            new.close()
    finally:
        old.close()


def chunks(file: IO[bytes]) -> Iterator[bytes]:
    """A file's bytes from here on."""
    while data := file.read(CHUNK):
        yield data
