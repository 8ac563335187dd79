"""Rows of a JSONL file by number, in memory that does not grow with the file.

One pass finds the lines and hashes the bytes; blank lines are no rows. Offsets of line starts are kept in an array of
at most :data:`MAX_STARTS` entries: beyond it only every 2nd, 4th, 8th ... start is kept and the rest is found again by
reading on from there. Rows are read with plain reads, never through a mapping, so a file that is cut short while it is
in use is an error and not a crash.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.data.rows import DataRows
from slime_core.data.strict import HINT, converted, parse_line
from slime_core.errors import DataError
from slime_core.notices import notice

BLOCK = 4 << 20
STEP = 1 << 14  # read at once to find a line
MAX_STARTS = 1 << 22  # 32 MiB of int64
MAX_BLANKS = 1 << 20
BOM = b"\xef\xbb\xbf"
PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -c <"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc <"),
    b"BZh": ("bzip2", "bunzip2 -c <"),
}
UTF16 = (b"\xff\xfe", b"\xfe\xff")


class JsonlRows(DataRows):
    """The objects of a JSONL file by row number; pins the bytes that were there at opening, or the first ``size``.

    Reading a row raises DataError DAT37 where those bytes are no longer there.

    Example:
        rows = JsonlRows(Path("train.jsonl"), max_line_bytes=8 << 20)
        rows[0]["question"], rows.where(0)   # 'train.jsonl:1'
    """

    def __init__(self, path: Path, *, max_line_bytes: int, size: int | None = None) -> None:
        self.path = path
        self.root = path.parent
        self._cap = max_line_bytes
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)  # called, or when nothing holds the rows any more
        try:
            status = os.fstat(self._fd)
            self._size = status.st_size if size is None else min(size, status.st_size)
            self._check_kind(os.pread(self._fd, 4, 0))
            index = _Index()
            digest = hashlib.sha256()
            for start, block in self._blocks():
                digest.update(block)
                index.add(start, block)
            index.finish(self._size)
        except BaseException:
            self.close()
            raise
        self._starts, self._stride = index.starts(), index.stride
        self._blanks = np.asarray(index.blanks, dtype=np.int64)
        self._count = index.count
        self._last = -1, 0  # the row that was read last, and its start
        self._pin = Pin(path, status, size=self._size, digest=digest.hexdigest())

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> dict[str, Any]:
        self._pin.check()
        try:
            start, raw = self._line(row)
        except OSError as error:
            raise self._pin.lost("cannot be read", str(error)) from error
        if start == 0 and raw.startswith(BOM):
            raw = raw[len(BOM) :]
            start = len(BOM)
        return parse_line(raw, file=str(self.path), line=self.line_of(row), offset=start)

    def where(self, row: int) -> str:
        """``file:line``, the line counted from 1 with blank ones."""
        return f"{self.path}:{self.line_of(row)}"

    def raw(self, row: int) -> bytes:
        """The line unchanged, cut at the cap."""
        try:
            return self._line(row)[1]
        except DataError:
            return b""

    def line_of(self, row: int) -> int:
        """The 1-based line number of a row."""
        return row + 1 + int(np.searchsorted(self._blanks, row, side="right"))

    def fingerprint(self) -> str:
        """Hash and size of the bytes that were indexed."""
        return f"sha256:{self._pin.digest}:{self._size}"

    def mark(self) -> dict[str, Any] | None:
        """Bytes, rows and hash of what was indexed."""
        return {"bytes": self._size, "rows": self._count, "sha256": self._pin.digest}

    def close(self) -> None:
        """See `DataRows`."""
        self._close()

    def _check_kind(self, head: bytes) -> None:
        for magic, (name, command) in PACKED.items():
            if head.startswith(magic):
                raise DataError(
                    f"{self.path.name} is compressed with {name}",
                    code="DAT30",
                    where=str(self.path),
                    why="rows are read by number, which a compressed stream does not allow",
                    fix=converted(command, self.path, "unpacked"),
                )
        if head.startswith(UTF16):
            raise DataError(
                f"{self.path.name} is UTF-16, not UTF-8",
                code="DAT20",
                where=f"{self.path}:1, byte 0",
                fix=converted("iconv -f UTF-16 -t UTF-8", self.path, "utf8"),
            )

    def _blocks(self) -> Any:
        place = 0
        buffer = bytearray(BLOCK)
        while place < self._size:
            view = memoryview(buffer)[: min(BLOCK, self._size - place)]
            count = os.preadv(self._fd, [view], place)
            if not count:
                raise self._cut_short(place)
            yield place, view[:count]
            place += count

    def _line(self, row: int) -> tuple[int, bytes]:
        """Start and bytes of a row's line, without its newline."""
        if not 0 <= row < self._count:
            raise IndexError(row)
        near, start = row - row % self._stride, int(self._starts[row // self._stride])
        if near < self._last[0] <= row:
            near, start = self._last  # rows are mostly read one after the other
        if near < row:
            start = self._skip(start, row - near)
        self._last = row, start
        return self._read_line(row, start)

    def _read_line(self, row: int, start: int) -> tuple[int, bytes]:
        pieces: list[bytes] = []
        have = 0
        step = STEP
        while start + have < self._size:
            piece = os.pread(self._fd, min(step, self._size - start - have), start + have)
            if not piece:
                raise self._cut_short(start + have)
            end = piece.find(b"\n")
            pieces.append(piece if end < 0 else piece[:end])
            have += len(pieces[-1])
            if have > self._cap:
                raise DataError(
                    f"line {self.line_of(row)} is longer than {self._cap} bytes",
                    code="DAT21",
                    where=self.where(row),
                    fix=f"raise data.max_line_bytes, or {HINT}",
                )
            if end >= 0:
                break
            step = BLOCK
        return start, b"".join(pieces)

    def _skip(self, start: int, count: int) -> int:
        """The start of the row ``count`` rows after the one that starts at ``start``."""
        place, begin, head = start, start, b""  # of the line that is looked at: its start and first bytes
        while place < self._size:
            piece = os.pread(self._fd, min(STEP, self._size - place), place)
            if not piece:
                raise self._cut_short(place)
            at = 0
            while at < len(piece):
                end = piece.find(b"\n", at)
                head = (head + piece[at : at + 3 if end < 0 else min(end, at + 3)])[:3]
                if len(head) > 2 or (end >= 0 and head.strip()):
                    if not count:
                        return begin
                    count -= end >= 0
                if end < 0:
                    break
                at, begin, head = end + 1, place + end + 1, b""
            place += len(piece)
        if not count and head.strip():
            return begin
        raise self._cut_short(place)

    def _cut_short(self, place: int) -> DataError:
        return DataError(
            f"{self.path.name} was cut short during the run",
            code="DAT37",
            where=f"{self.path}, byte {place}",
            why=f"expected {self._size} bytes, it ends at byte {place}",
            fix=BACK,
        )


class _Index:
    """Line starts found block by block: rows are lines of more than two bytes, or with something but white space."""

    def __init__(self) -> None:
        self.stride = 1
        self.count = 0
        self.blanks: list[int] = []  # row number that follows each blank line
        self._chunks: list[NDArray[np.int64]] = []
        self._total = 0
        self._open = 0  # where the unfinished line starts
        self._tail = b""  # its first bytes

    def add(self, start: int, block: memoryview) -> None:
        """Take the next block of the file."""
        data = np.frombuffer(block, dtype=np.uint8)
        ends = np.flatnonzero(data == 10).astype(np.int64) + start
        if not len(ends):
            self._tail = (self._tail + bytes(block[:3]))[:3]
            return
        starts = np.empty_like(ends)
        starts[0], starts[1:] = self._open, ends[:-1] + 1
        keep = ends > starts
        for i in np.flatnonzero(keep & (ends - starts <= 2)).tolist():
            begin, end = int(starts[i]), int(ends[i])
            line = (self._tail if begin < start else b"") + bytes(block[max(begin - start, 0) : end - start])
            keep[i] = bool(line.strip())
        self._add_starts(starts, keep)
        self._open = int(ends[-1]) + 1
        self._tail = bytes(block[self._open - start :][:3])

    def finish(self, size: int) -> None:
        """Take the last line, which may lack its newline."""
        if self._open < size and (size - self._open > 2 or self._tail.strip()):
            self._add_starts(np.asarray([self._open], dtype=np.int64), np.ones(1, dtype=bool))

    def starts(self) -> NDArray[np.int64]:
        """The kept starts: of rows 0, stride, 2 stride ..."""
        return np.concatenate([*self._chunks, np.empty(0, dtype=np.int64)])

    def _add_starts(self, starts: NDArray[np.int64], keep: NDArray[np.bool_]) -> None:
        if not keep.all():
            before = self.count + np.concatenate([[0], np.cumsum(keep)])
            self.blanks.extend(int(before[i]) for i in np.flatnonzero(~keep))
            if len(self.blanks) > MAX_BLANKS:
                raise DataError(f"the file has more than {MAX_BLANKS} blank lines", code="DAT19")
        rows = starts[keep]
        first = -self.count % self.stride
        self.count += len(rows)
        self._chunks.append(rows[first :: self.stride].copy())
        self._total += len(self._chunks[-1])
        while self._total > MAX_STARTS:
            self._chunks = [self.starts()[::2].copy()]
            self._total = len(self._chunks[0])
            self.stride *= 2


BACK = "put the file back as it was, then: slime run --resume RUN_DIR"


class Pin:
    """The first ``size`` bytes of a file.

    Example:
        pin = Pin(path, os.fstat(fd), size=1200, digest="9f86...")
        pin.check()
    """

    def __init__(self, path: Path, status: os.stat_result, *, size: int, digest: str) -> None:
        self.path, self.size, self.digest = path, size, digest
        self._file_key = _key(status)

    def check(self) -> None:
        """Look at the file.

        Raises:
            DataError: DAT37 with the path, what was expected and what was found.
        """
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise self.lost("is gone", f"found nothing: {error.strerror}") from error
        if _key(status) == self._file_key:
            return
        if status.st_size < self.size:
            raise self.lost("was cut short", f"found {status.st_size} bytes")
        same_file = self._file_key[:2] == _key(status)[:2]
        if not same_file or status.st_size == self.size:
            self._compare("was changed" if same_file else "was replaced", status.st_size)
        if status.st_size > self.size:
            notice(
                ("appended", str(self.path)),
                f"{self.path}: {status.st_size - self.size} bytes were appended since it was opened; "
                f"this run reads the first {self.size} bytes only",
            )
        self._file_key = _key(status)

    def lost(self, what: str, detail: str) -> DataError:
        """The error of a file that has changed."""
        return DataError(
            f"{self.path.name} {what} during the run",
            code="DAT37",
            where=str(self.path),
            why=f"expected {self.size} bytes, sha256 {self.digest}; {detail}",
            fix=BACK,
        )

    def _compare(self, what: str, size: int) -> None:
        try:
            digest = digest_of(self.path, self.size)
        except OSError as error:
            raise self.lost(what, f"it cannot be read: {error.strerror}") from error
        if digest != self.digest:
            raise self.lost(what, f"found {size} bytes, sha256 of the first {self.size}: {digest}")


def digest_of(path: Path, size: int) -> str:
    """sha256 of a file's first ``size`` bytes, in hex."""
    digest = sha256()
    with path.open("rb", buffering=0) as file:
        while size > 0 and (block := file.read(min(BLOCK, size))):
            digest.update(block)
            size -= len(block)
    return digest.hexdigest()


def _key(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
