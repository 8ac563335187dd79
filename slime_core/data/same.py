"""Rows beside others: equal ones by 64-bit hashes, columns that are nowhere, a key that one row alone lacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.data.prompts import Keys, Parsed, parse_row
from slime_core.data.rows import Rows
from slime_core.errors import DataError, nearest

SHOWN = 5
Hashes = NDArray[np.uint64]


def hash_of(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def equal_pairs(hashes: Hashes) -> list[tuple[int, int]]:
    """Each place whose hash stood at an earlier place, with the last of those, in order of the earlier ones.

    Example:
        equal_pairs(np.array([5, 7, 5, 5], dtype=np.uint64)) == [(0, 2), (2, 3)]
    """
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
    return sorted((int(order[i]), int(order[i + 1])) for i in same)


def duplicate_ids(pairs: Sequence[str], where: str) -> DataError:
    """DAT22, with the first pairs."""
    return DataError(
        f"{len(pairs)} ids occur more than once: {'; '.join(pairs[:SHOWN])}",
        code="DAT22",
        where=where,
        fix="give every row its own id, or unset data.id_key: rows are then known by file and line",
    )


def check_columns(rows: Rows, keys: Keys) -> None:
    """Of rows that have columns, refuse ones that lack a wanted column.

    Raises:
        DataError: DAT18.
    """
    names: tuple[str, ...] | None = getattr(rows, "keys", None)
    if names is None:
        return
    for name, setting in keys.required:
        if name not in names:
            hint = nearest(name, names)
            raise DataError(
                f"there is no column {name!r}",
                code="DAT18",
                where=rows.where(0),
                why=f"the columns are {', '.join(map(repr, names[:20]))}",
                fix=f"set {setting} to one of them" + (f" ({hint})" if hint else ""),
            )


def parse_of(rows: Rows, index: int, keys: Keys, row: dict[str, Any] | None = None) -> Parsed:
    """`parse_row` of row ``index``, which ``row`` is where it was read before.

    Raises:
        DataError: as `parse_row`; DAT18 blames the row where a neighbour has the key that it lacks.
    """
    row = rows[index] if row is None else row
    try:
        return parse_row(row, keys, rows.where(index), rows.root)
    except DataError as error:
        lacking = [name for name, _ in keys.required if name not in row]
        if error.code == "DAT18" and lacking and len(rows) > 1:
            with suppress(DataError):  # the neighbour is broken in another way, and tells so itself
                if lacking[0] in rows[index - 1 if index else 1]:
                    error.why += f"; other rows have {lacking[0]!r}"
                    error.fix = "complete the row, or leave such rows out: data.max_bad_rows=1"
        raise
