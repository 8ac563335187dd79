"""Copies of a ledger's database while it is in use, for checkpoints."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from slime_core import durable
from slime_core.buffer.schema import damaged, sqlite_error
from slime_core.durable import FileMark
from slime_core.errors import StorageError

CHUNK = 64 << 10
CACHE = "PRAGMA cache_size = -32"  # KiB: pages pass once, and are not kept


def copy_database(source: Path, target: Path) -> FileMark:
    """A new durable file with everything that is committed, without a write-ahead log of its own.

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
        for left in (aside, aside.with_name(f"{aside.name}-journal")):
            left.unlink(missing_ok=True)


def sweep_copies(source: Path) -> None:
    """Remove the halves of copies that were being made when an owner of ``source`` was killed."""
    for left in source.parent.glob(f".{source.name}.*.copy*"):
        left.unlink(missing_ok=True)


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
