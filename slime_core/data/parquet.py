"""Rows of a Parquet file by number: one row group is decoded at a time, and a few are kept.

The whole file is hashed when it is opened: a footer's figures may be equal for other values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.data.jsonl import Pin, digest_of
from slime_core.data.rows import DataRows
from slime_core.errors import DataError

MAX_GROUP_BYTES = 1 << 30  # decoded size that a row group's footer may claim
KEPT_BYTES = 256 << 20  # of decoded row groups


class ParquetRows(DataRows):
    """The rows of a Parquet file as dicts of the wanted columns (all of them where none are wanted by name).

    Example:
        rows = ParquetRows(Path("train.parquet"), columns={"question", "answer"})
        rows[0]["question"], rows.where(0)   # 'train.parquet[0]'
    """

    def __init__(self, path: Path, *, columns: Collection[str] = ()) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path = path
        self.root = path.parent
        try:
            status = path.stat()
            self._pin = Pin(path, status, size=status.st_size, digest=digest_of(path, status.st_size))
            self._file = pyarrow.parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        meta = self._file.metadata
        self.keys = tuple(self._file.schema_arrow.names)
        self._columns = [name for name in self.keys if name in columns] or list(self.keys)
        counts = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        for i in range(meta.num_row_groups):
            _check_group(path, i, meta.row_group(i).total_byte_size)
        self._ends = np.cumsum(np.asarray(counts, dtype=np.int64))
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        self._pin.check()
        number = int(np.searchsorted(self._ends, row, side="right"))
        table = self._group(number)
        place = row - (int(self._ends[number - 1]) if number else 0)
        values: dict[str, Any] = table.slice(place, 1).to_pylist()[0]
        return {key: without_nulls(value) for key, value in values.items()}

    def where(self, row: int) -> str:
        """``file[row]``, counted from 0."""
        return f"{self.path}[{row}]"

    def fingerprint(self) -> str:
        """Hash and size of the file."""
        return f"parquet:{self._pin.digest}:{self._pin.size}"

    def mark(self) -> dict[str, Any] | None:
        """Bytes, rows and hash of the file."""
        return {"bytes": self._pin.size, "rows": len(self), "sha256": self._pin.digest}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _group(self, number: int) -> Any:
        import pyarrow

        if number in self._groups:
            self._groups.move_to_end(number)
            return self._groups[number]
        try:
            table = self._file.read_row_group(number, columns=self._columns, use_threads=False)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise _damaged(self.path, f"row group {number}: {error}") from error
        self._groups[number] = table
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > KEPT_BYTES:
            self._groups.popitem(last=False)
        return table


def without_nulls(value: Any) -> Any:
    """Arrow gives every struct of a list all keys of all structs; absent ones come as None and are left out again.

    ``content`` keeps its None: a message that only calls tools says so.
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _check_group(path: Path, number: int, size: int) -> None:
    if size > MAX_GROUP_BYTES:
        raise DataError(
            f"row group {number} of {path.name} takes {size >> 20} MiB, more than {MAX_GROUP_BYTES >> 20}",
            code="DAT30",
            where=str(path),
            why="a row group is decoded whole",
            fix="write it with smaller groups: pyarrow.parquet.write_table(table, PATH, row_group_size=10000)",
        )


def _damaged(path: Path, why: str) -> DataError:
    size = path.stat().st_size if path.exists() else 0
    return DataError(
        f"{path.name} is not a readable Parquet file ({size} bytes)",
        code="DAT30",
        where=str(path),
        why=why.splitlines()[0] if why else "",
        fix="write or fetch the file again",
    )
