"""Segments of payloads: append-only files whose every record is framed and checksummed.

    file    "slimeSG1" | record | record | ...
    record  "SLMR" | crc32 of the body, u32 | length of the body, u64 | body            all little endian

Nothing is ever changed in place. Every start of a process writes files of its own, so that what an earlier crash left
half-written stays behind the last record that the ledger names, and is never read. `sync` makes everything written so
far durable and is called before the commit that names it.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slime_core import durable
from slime_core.durable import storage_error
from slime_core.errors import StorageError
from slime_core.types import ArrayRef

FILE_MAGIC = b"slimeSG1"
RECORD_MAGIC = b"SLMR"
FRAME = struct.Struct("<4sIQ")
ROLL_BYTES = 256 << 20  # a file beyond this size is left and a new one begun
JOINED_BYTES = 1 << 20
OPEN_FILES = 16
NAME = re.compile(r"[0-9]{6,}\.seg")
DTYPES = frozenset(["bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))]) | {
    "float16",
    "float32",
    "float64",
}


class RecordPlace(NamedTuple):
    """Where a record's body lies; ``segment`` is the file's number, ``offset`` and ``length`` are bytes."""

    segment: int
    offset: int
    length: int
    crc32: int


class Segments:
    """One writer and any number of readers of a run's ``segments/`` folder; safe to call from several threads.

    Example:
        segments = Segments(run_dir / "segments")
        place = segments.append([b"header", tokens.data])
        segments.sync()
        assert segments.read(place)[:6] == b"header"
    """

    def __init__(self, folder: Path, *, roll_bytes: int = ROLL_BYTES) -> None:
        self.folder = folder
        self._roll_bytes = roll_bytes
        self._lock = threading.RLock()
        self._number = -1  # of the file being written; -1 before the first
        self._fd = -1
        self._end = 0  # of the last whole record in it
        self._dirty = False
        self.losses = 0  # times that records were lost before they were durable
        self._own_files: set[int] = set()  # files that this writer began
        self._arrays: set[int] = set()  # those of them with arrays, whose samples may not be in the ledger yet
        self._readers: OrderedDict[int, int] = OrderedDict()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._earlier = _last(folder)  # files up to here are of processes that have ended
        except OSError as error:
            raise storage_error(error, folder, "the segment folder cannot be made") from error

    def append(self, parts: Sequence[bytes | memoryview]) -> RecordPlace:
        """Write one record whose body is the parts end to end. Durable after :meth:`sync`.

        Raises:
            StorageError: STO109 disk full, STO110 not writable, STO121 the device failed.
        """
        crc, length = 0, 0
        for part in parts:
            crc = zlib.crc32(part, crc)
            length += memoryview(part).nbytes
        with self._lock:
            self._open_for(FRAME.size + length)
            start = self._end
            try:
                self._write(start, [FRAME.pack(RECORD_MAGIC, crc, length), *parts], length)
            except OSError as error:
                self._rescue()
                raise storage_error(error, self.path(self._number), "a segment cannot be written") from error
            self._end = start + FRAME.size + length
            self._dirty = True
            return RecordPlace(segment=self._number, offset=start + FRAME.size, length=length, crc32=crc)

    def sync(self) -> None:
        """Make every record appended so far durable.

        Raises:
            StorageError: STO109, STO110, STO121. The failed file is never written again: what a failed fsync
                did reach is unknown.
        """
        with self._lock:
            if not self._dirty:
                return
            number = self._number
            try:
                durable.disk.sync(self._fd)
            except OSError as error:
                self.losses += 1
                self._abandon()
                raise storage_error(error, self.path(number), "a segment cannot be made durable") from error
            self._dirty = False

    def read(self, place: RecordPlace) -> bytes:
        """The body of a record.

        Raises:
            StorageError: STO112 the bytes are not those that were written; STO111 the file is gone.
        """
        with self._lock:
            body = _read_at(self._reader(place.segment), place.offset, place.length, self.path(place.segment))
        return _verified(body, place, self.path(place.segment))

    def write_array(self, array: NDArray[Any], *, named: bool = False) -> ArrayRef:
        """Store a numeric array; durable after :meth:`sync`.

        With ``named`` the transaction that is open names it in the ledger; else its file stays while the writer lives.

        Raises:
            TypeError: a dtype that has no fixed little-endian form.
            StorageError: as :meth:`append`.
        """
        if array.dtype.name not in DTYPES:
            raise TypeError(f"arrays of dtype {array.dtype} are not stored; use one of {', '.join(sorted(DTYPES))}")
        flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        place = self.append([flat.reshape(-1).view(np.uint8).data])
        if not named:
            self._arrays.add(place.segment)
        return ArrayRef(
            segment=segment_name(place.segment),
            offset=place.offset,
            dtype=array.dtype.name,
            shape=tuple(array.shape),
            crc32=place.crc32,
        )

    def read_array(self, ref: ArrayRef) -> NDArray[Any]:
        """The array of a reference, writable.

        Raises:
            StorageError: STO111, STO112; a reference that is malformed is STO112 too.
        """
        return as_array(self.read(_place_of(self.folder, ref)), ref)

    def path(self, number: int) -> Path:
        """The file of a segment number."""
        return self.folder / segment_name(number)

    def ended(self) -> set[int]:
        """Numbers of the existing files that will be neither written nor referenced any more."""
        with self._lock:
            numbers = {int(p.stem) for p in self.folder.glob("*.seg") if NAME.fullmatch(p.name)}
            written = self._own_files - self._arrays - ({self._number} if self._fd >= 0 else set())
            return {number for number in numbers if number <= self._earlier or number in written}

    def forget(self, number: int) -> None:
        """Close a file that is about to be removed."""
        with self._lock:
            fd = self._readers.pop(number, None)
            if fd is not None:
                os.close(fd)

    def close(self) -> None:
        """Make everything durable and close all files."""
        with self._lock:
            try:
                self.sync()
            finally:
                for fd in self._readers.values():
                    os.close(fd)
                self._readers.clear()
                self._abandon()

    def _open_for(self, size: int) -> None:
        if self._fd >= 0 and self._end + size <= self._roll_bytes:
            return
        if self._fd >= 0:
            self.sync()
            self._abandon()
        try:
            self._number, self._fd = _create(self.folder)
            self._own_files.add(self._number)
            durable.disk.write(self._fd, FILE_MAGIC, 0)
            durable.disk.sync_folder(self.folder)
        except OSError as error:
            self._abandon()
            raise storage_error(error, self.folder, "a segment file cannot be made") from error
        self._end = len(FILE_MAGIC)

    def _write(self, offset: int, parts: Sequence[bytes | memoryview], length: int) -> None:
        for part in [b"".join(parts)] if length < JOINED_BYTES else parts:  # a small record in one call
            durable.disk.write(self._fd, part, offset)
            offset += memoryview(part).nbytes

    def _rescue(self) -> None:
        """Leave a file that cannot be written to, with the whole records in it made durable if that still works."""
        if self._dirty:
            try:
                durable.disk.sync(self._fd)
            except OSError:
                self.losses += 1
        self._abandon()

    def _abandon(self) -> None:
        """Close the file being written; the next record goes to a new one."""
        if self._fd >= 0:
            durable.disk.close(self._fd)
        self._fd, self._dirty = -1, False

    def _reader(self, number: int) -> int:
        if number in self._readers:
            self._readers.move_to_end(number)
            return self._readers[number]
        fd = _open_reader(self.path(number))
        self._readers[number] = fd
        while len(self._readers) > OPEN_FILES:
            os.close(self._readers.popitem(last=False)[1])
        return fd


def segment_name(number: int) -> str:
    """The file name of a segment: six digits or more."""
    return f"{number:06d}.seg"


def read_array(folder: Path, ref: ArrayRef) -> NDArray[Any]:
    """Read one array of a run's ``segments/`` folder from any process; raises as :func:`read_bytes`."""
    return as_array(read_bytes(folder, ref), ref)


def read_bytes(folder: Path, ref: ArrayRef) -> bytes:
    """The little-endian bytes of one array of a run's ``segments/`` folder, from any process.

    Raises:
        StorageError: STO111 the file is gone, STO112 the bytes are not those that were written.
    """
    place = _place_of(folder, ref)
    fd = _open_reader(folder / ref.segment)
    try:
        body = _read_at(fd, place.offset, place.length, folder / ref.segment)
    finally:
        os.close(fd)
    return _verified(body, place, folder / ref.segment)


def _place_of(folder: Path, ref: ArrayRef) -> RecordPlace:
    sound = NAME.fullmatch(ref.segment) and ref.dtype in DTYPES and ref.offset >= 0 and min(ref.shape, default=0) >= 0
    if not sound:
        raise StorageError(
            f"a reference to stored data is malformed: {ref.segment!r} {ref.dtype!r} {ref.shape} at {ref.offset}",
            code="STO112",
            where=str(folder),
        )
    return RecordPlace(segment=int(ref.segment[:-4]), offset=ref.offset, length=ref.nbytes, crc32=ref.crc32)


def as_array(body: bytes, ref: ArrayRef) -> NDArray[Any]:
    """The array of a reference from its stored bytes, writable."""
    stored = np.frombuffer(bytearray(body), dtype=np.dtype(ref.dtype).newbyteorder("<"))
    return stored.astype(ref.dtype, copy=False).reshape(ref.shape)


def _create(folder: Path) -> tuple[int, int]:
    number = _last(folder)
    while True:
        number += 1
        try:
            return number, durable.disk.create(folder / segment_name(number))
        except FileExistsError:  # another process's writer was faster
            continue


def _last(folder: Path) -> int:
    return max((int(p.stem) for p in folder.glob("*.seg") if NAME.fullmatch(p.name)), default=0)


def _open_reader(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        failure = storage_error(error, path, "a segment cannot be read")
        failure.fix = failure.fix or _way_back(path)
        raise failure from error
    if _read_at(fd, 0, len(FILE_MAGIC), path) != FILE_MAGIC:
        os.close(fd)
        raise StorageError(f"{path.name} is not a segment file", code="STO112", where=str(path), fix=_way_back(path))
    return fd


def _read_at(fd: int, offset: int, length: int, path: Path) -> bytes:
    pieces = []
    while length > 0:
        try:
            piece = os.pread(fd, min(length, 1 << 30), offset)
        except OSError as error:
            raise storage_error(error, path, "a segment cannot be read") from error
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)


def _verified(body: bytes, place: RecordPlace, path: Path) -> bytes:
    if len(body) == place.length and zlib.crc32(body) == place.crc32:
        return body
    raise StorageError(
        f"{path.name} holds other bytes than were written",
        code="STO112",
        where=f"{path}: bytes {place.offset} to {place.offset + place.length}",
        why="the checksum differs: the file was cut short, changed, or the disk failed",
        fix=_way_back(path),
    )


def _way_back(path: Path) -> str:
    return f"restore the file, or generate its samples again: slime run --resume {path.parent.parent}"
