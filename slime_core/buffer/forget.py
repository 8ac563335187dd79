"""Pruning: payloads that nobody will ask for again are forgotten, rows never.

First the rows stop naming their payloads, durably; then segment files in which nothing lives any more are removed. A
crash between the two leaves files that the next pruning removes.
"""

from __future__ import annotations

import sqlite3

from slime_core import durable
from slime_core.buffer.schema import DROPPED, TRAINED
from slime_core.buffer.segments import Segments
from slime_core.durable import storage_error

OLD = f"(state = {DROPPED} AND coalesce(newest, -1) < ?1 OR state = {TRAINED} AND step < ?1)"
"""Samples that no version from ``?1`` on had a part in."""


def forget_payloads(db: sqlite3.Connection, before_version: int) -> None:
    """Rows of samples that were dropped or trained before a version name no payload any more, and no turns."""
    for table in ("turns", "arrays"):
        of_old = f"SELECT 1 FROM samples WHERE samples.serial = {table}.serial AND {OLD}"
        db.execute(f"DELETE FROM {table} WHERE EXISTS ({of_old})", (before_version,))
    db.execute(
        "UPDATE samples SET segment = NULL, offset = NULL, length = NULL, crc32 = NULL "
        f"WHERE segment IS NOT NULL AND {OLD}",
        (before_version,),
    )


def living(db: sqlite3.Connection) -> set[int]:
    """Numbers of the segments in which a payload, a suspended turn or an array of a stored sample lies."""
    found: set[int] = set()
    number = -1
    while True:  # one step of the index a segment, however many rows name it
        query = "SELECT min(segment) FROM samples WHERE segment IS NOT NULL AND segment > ?"
        (number,) = db.execute(query, (number,)).fetchone()
        if number is None:
            break
        found.add(number)
    found |= {number for (number,) in db.execute("SELECT DISTINCT segment FROM turns")}
    return found | {number for (number,) in db.execute("SELECT DISTINCT segment FROM arrays")}


def remove_segments(segments: Segments, kept: set[int]) -> int:
    """Remove the files that are neither in ``kept`` nor may still be written to; the answer is their count.

    Raises:
        StorageError: a file that cannot be removed.
    """
    dead = segments.ended() - kept
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
