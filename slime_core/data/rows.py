"""Rows by number, of whatever kind they are, and slices of them.

PATH.jsonl  PATH.parquet  FOLDER[#CONFIG][:SPLIT]  OWNER/NAME[#CONFIG][:SPLIT]
each with @[a:b] for a slice, as in Python
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError

SLICE = re.compile(r"(?P<path>.*)@\[(?P<inside>[^\]]*)\]", re.DOTALL)
BOUNDS = re.compile(r"\s*(?P<start>[+-]?\d+)?\s*:\s*(?P<stop>[+-]?\d+)?\s*")


class DataRows(ABC):
    """Rows of one file or set."""

    root: Path | None = None  # the folder that relative media paths must stay in
    keys: tuple[str, ...] | None = None  # the columns, where all rows have the same

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read one row; raises DataError where it cannot be read, IndexError outside the range."""

    @abstractmethod
    def where(self, row: int) -> str:
        """``file:line`` or ``set[row]``, for messages and as the identity of a row without an id."""

    @abstractmethod
    def fingerprint(self) -> str:
        """What is equal only for equal rows."""

    def raw(self, row: int) -> bytes:
        """The row's own bytes where it has some, for rejected.jsonl."""
        return b""

    def mark(self) -> dict[str, Any] | None:
        """``bytes rows sha256`` of the file that was opened, whole; None where there is no one file."""
        return None

    def close(self) -> None:  # noqa: B027
        """Close files; a set that maps them has nothing to do."""


class SlicedRows(DataRows):
    """Rows ``start`` to ``stop`` of others; messages keep the numbers of the whole."""

    def __init__(self, rows: DataRows, start: int, stop: int) -> None:
        self.root, self.keys = rows.root, rows.keys
        self._rows, self._start, self._count = rows, start, max(0, stop - start)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._rows[self._of(row)]

    def where(self, row: int) -> str:
        """As the whole says."""
        return self._rows.where(self._of(row))

    def raw(self, row: int) -> bytes:
        """As the whole says."""
        return self._rows.raw(self._of(row))

    def fingerprint(self) -> str:
        """The whole's, and the bounds."""
        return f"{self._rows.fingerprint()}@[{self._start}:{self._start + self._count}]"

    def mark(self) -> dict[str, Any] | None:
        """The whole's."""
        return self._rows.mark()

    def close(self) -> None:
        """Close the whole."""
        self._rows.close()

    def _of(self, row: int) -> int:
        if not 0 <= row < self._count:
            raise IndexError(row)
        return self._start + row


def split_slice(spec: str, key: str = "data.prompt_data") -> tuple[str, slice | None]:
    """``("p.jsonl", slice(0, 5))`` of ``"p.jsonl@[0:5]"``.

    Raises:
        ConfigError: CFG03, a slice that is not ``[a:b]``.
    """
    match = SLICE.fullmatch(spec)
    if match is None:
        return spec, None
    bounds = BOUNDS.fullmatch(match["inside"])
    if bounds is None:
        raise ConfigError(
            f"@[{match['inside']}] is not a slice",
            code="CFG03",
            where=f"{key} = {spec}",
            fix="write @[a:b] with whole numbers, either of which may be left out: @[0:100], @[-50:], @[:10]",
        )
    start, stop = (int(bounds[name]) if bounds[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)
