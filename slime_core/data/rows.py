"""What `data.prompt_data` names in; rows by number out, of whatever kind they are.

PATH.jsonl  PATH.parquet  FOLDER[#CONFIG][:SPLIT]  OWNER/NAME[#CONFIG][:SPLIT]
each with @[a:b] for a slice, as in Python
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from slime_core.config.paths import folder_of_set
from slime_core.data.hub import HubRows, is_hub_name
from slime_core.data.jsonl import JsonlRows
from slime_core.data.parquet import ParquetRows
from slime_core.data.strict import converted
from slime_core.errors import ConfigError, DataError

SLICE = re.compile(r"(?P<path>.*)@\[(?P<inside>[^\]]*)\]", re.DOTALL)
BOUNDS = re.compile(r"\s*(?P<start>[+-]?\d+)?\s*:\s*(?P<stop>[+-]?\d+)?\s*")

TO_LINES = "python3 -c 'import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]' <"


class Rows(Protocol):
    """Rows by number, of one file or set."""

    root: Path | None  # the folder that relative media paths must stay in

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read one row; raises DataError where it cannot be read, IndexError outside the range."""

    def where(self, row: int) -> str:
        """``file:line`` or ``set[row]``, for messages and as the identity of a row without an id."""

    def raw(self, row: int) -> bytes:
        """The row's own bytes where it has some, for rejected.jsonl."""

    def fingerprint(self) -> str:
        """What is equal only for equal rows."""

    def mark(self) -> dict[str, Any] | None:
        """``bytes rows sha256`` of the file that was opened, whole; None where there is no one file."""

    def close(self) -> None:
        """Close files."""


class SlicedRows:
    """Rows ``start`` to ``stop`` of others; messages keep the numbers of the whole."""

    def __init__(self, rows: Rows, start: int, stop: int) -> None:
        self.root = rows.root
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


def open_rows(
    spec: str,
    *,
    max_line_bytes: int,
    columns: Collection[str] = (),
    key: str = "data.prompt_data",
    mark: Mapping[str, Any] | None = None,
) -> Rows:
    """Open what ``spec`` names; ``columns`` are those that a column store needs to decode, ``key`` names the setting.

    With ``mark``, which `Rows.mark` gave to a saved run, a JSONL file is read as far as it reached then.

    Raises:
        ConfigError: CFG03 a malformed slice, CFG05 no such file.
        DataError: DAT17 no rows, DAT19 a JSON array or too many blank lines, DAT20, DAT30 an unreadable file.
    """
    path, inside = split_slice(spec, key)
    rows = _open(path, max_line_bytes, columns, key, mark)
    found = rows
    if inside is not None:
        start, stop, _ = inside.indices(len(rows))
        found = SlicedRows(rows, start, stop)
    if len(found) == 0:
        total = len(rows)
        rows.close()
        raise DataError(
            f"{spec} has no rows" if not total else f"the slice of {spec} is empty: the whole has {total} rows",
            code="DAT17",
            where=f"{key} = {spec}",
            fix="name a file with at least one JSON object a line" if not total else "widen the slice",
        )
    return found


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
            f"@[{match['inside']}] is no slice",
            code="CFG03",
            where=f"{key} = {spec}",
            fix="write @[a:b] with whole numbers, either of which may be left out: @[0:100], @[-50:], @[:10]",
        )
    start, stop = (int(bounds[name]) if bounds[name] else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def _open(spec: str, max_line_bytes: int, columns: Collection[str], key: str, mark: Mapping[str, Any] | None) -> Rows:
    path = Path(spec).expanduser()
    if path.is_file():
        return _open_file(path, max_line_bytes, columns, mark)
    if folder_of_set(spec) is not None:
        return HubRows(spec)
    if is_hub_name(spec) and path.suffix not in (".jsonl", ".json", ".parquet"):
        return HubRows(spec)
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"{spec} is no regular file",
            code="CFG05",
            where=f"{key} = {path.absolute()}",
            why="a pipe can be read once, in order; rows are read in any order, and again when a run goes on",
            fix="write it to a file first",
        )
    raise ConfigError(
        f"there is no data file {spec!r}",
        code="CFG05",
        where=f"{key} = {path.absolute()} (working folder {Path.cwd()})",
        fix=f"set {key} to a JSONL or Parquet file, a folder, or a hub set OWNER/NAME",
    )


def _open_file(path: Path, max_line_bytes: int, columns: Collection[str], mark: Mapping[str, Any] | None) -> Rows:
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise DataError(f"{path.name} cannot be read", code="DAT30", where=str(path), why=str(error)) from error
    if path.suffix in (".parquet", ".pq") or head.startswith(b"PAR1"):
        return ParquetRows(path, columns=columns)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        raise DataError(
            f"{path.name} is one JSON array, not one object a line",
            code="DAT19",
            where=f"{path}:1:1",
            fix=converted(TO_LINES, path, "lines"),
        )
    return JsonlRows(path, max_line_bytes=max_line_bytes, size=int(mark["bytes"]) if mark else None)
