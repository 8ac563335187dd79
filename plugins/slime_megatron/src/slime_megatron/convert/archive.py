"""One tensor as `torch.save` writes it: the bytes around its elements, and where the elements lie when it is read.

    data.pkl byteorder version | elements, from a multiple of 64 bytes on | sum, directory       a zip, nothing packed

A `.distcp` file is a row of these, one a chunk. Written here because `torch.save` wants the tensor whole, holds the
interpreter while it works, and does not say beforehand how long the result is.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from io import RawIOBase
from pathlib import Path

import torch

from slime_convert.rows import read_at
from slime_core.errors import DataError
from slime_megatron.convert.unpickle import STORAGES, StorageRecord, read_record

ALIGNED = 64
LARGEST = (1 << 32) - (1 << 20)  # a zip without its 64-bit form holds less than 4 GiB
STREAMED = 0x0808  # sums follow the bytes; names are UTF-8
Piece = bytes | memoryview
NAMES = {dtype: name for name, dtype in STORAGES.items()}
DATA = "archive/data/0"


def _int(value: int) -> bytes:
    """A pickled int."""
    if value < 1 << 8:
        return b"K" + struct.pack("<B", value)
    if value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
    return b"\x8a" + struct.pack("<B", len(raw)) + raw


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _tuple(values: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(_int, values)) + b"t"


@lru_cache(maxsize=1024)
def _pickled(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """The call that rebuilds a contiguous tensor on the CPU, in pickle's protocol 2."""
    stride = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
    storage = b"(" + _text("storage") + b"ctorch\n" + NAMES[dtype].encode() + b"\n" + _text("0") + _text("cpu")
    storage += _int(math.prod(shape)) + b"tQ"
    body = storage + _int(0) + _tuple(shape) + _tuple(stride) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + body + b"tR."


def _local(name: str, aligned: int = 0) -> bytes:
    """The header before a record; ``aligned``, its place in the archive, makes it end at a multiple of `ALIGNED`."""
    raw = name.encode()
    extra = b""
    if aligned:
        gap = -(aligned + 30 + len(raw) + 4) % ALIGNED
        extra = struct.pack("<2sH", b"FB", gap) + b"Z" * gap
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, STREAMED, 0, 0, 0, 0, 0, 0, len(raw), len(extra)) + raw + extra


def _after(crc: int, size: int) -> bytes:
    return struct.pack("<4sIII", b"PK\7\x08", crc, size, size)


def _entry(name: str, crc: int, size: int, place: int) -> bytes:
    raw = name.encode()
    head = (b"PK\1\2", 0, 0, STREAMED, 0, 0, 0, crc, size, size, len(raw), 0, 0, 0, 0, 0, place)
    return struct.pack("<4sHHHHHHIIIHHHHHII", *head) + raw


@dataclass(slots=True, frozen=True)
class ArchiveFrame:
    """The bytes around a tensor's elements."""

    head: bytes
    size: int  # of the elements
    place: int  # of their own header
    records: tuple[tuple[str, int, int, int], ...]  # name, sum, size, place of those before the elements

    @property
    def total(self) -> int:
        """Bytes of the whole archive."""
        return len(self.head) + self.size + len(self.tail(0))

    def tail(self, crc: int) -> bytes:
        """What follows the elements; ``crc`` is their CRC-32."""
        directory = b"".join(_entry(*record) for record in (*self.records, (DATA, crc, self.size, self.place)))
        start = len(self.head) + self.size + 16
        count = len(self.records) + 1
        end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(directory), start, 0)
        return _after(crc, self.size) + directory + end


@lru_cache(maxsize=1024)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> ArchiveFrame:
    """The frame of a tensor.

    Raises:
        ValueError: it is larger than this form of zip holds.
    """
    size = math.prod(shape) * dtype.itemsize
    if size > LARGEST:
        raise ValueError(f"{size} bytes do not fit: {LARGEST} at most")
    head, records = b"", []
    for name, content in (("data.pkl", _pickled(shape, dtype)), ("byteorder", b"little"), ("version", b"3\n")):
        crc = zlib.crc32(content)
        records.append((f"archive/{name}", crc, len(content), len(head)))
        head += _local(f"archive/{name}") + content + _after(crc, len(content))
    return ArchiveFrame(head + _local(DATA, len(head)), size, len(head), tuple(records))


def archive(shape: tuple[int, ...], dtype: torch.dtype, elements: Iterable[memoryview]) -> Iterator[Piece]:
    """The archive of a tensor, piece by piece; the bytes of ``elements`` must be all of its elements, in order."""
    around, crc = frame(shape, dtype), 0
    yield around.head
    for piece in elements:
        crc = zlib.crc32(piece, crc)
        yield piece
    yield around.tail(crc)


class _Slice(RawIOBase):
    """Some bytes of a file as a file of its own, for `zipfile`."""

    def __init__(self, file: Path, begin: int, length: int, what: str) -> None:
        self._file, self._begin, self._length, self._subject, self._place = file, begin, length, what, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._length)[whence]
        return self._place

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(into), self._length - self._place))
        read_at(self._file, self._begin + self._place, memoryview(into)[:count], self._subject, "TOK201")
        self._place += count
        return count


def locate(file: Path, begin: int, length: int, what: str) -> tuple[int, StorageRecord]:
    """Where in ``file`` the elements of the archive at ``begin`` lie, and what it says of them.

    Raises:
        DataError: TOK201 it is damaged, TOK203 it names something that no tensor is made of.
    """
    where = f"{file}, {what}, bytes {begin} to {begin + length}"
    try:
        with zipfile.ZipFile(_Slice(file, begin, length, what)) as packed:  # type: ignore[arg-type]
            inner = {entry.filename.partition("/")[2]: entry for entry in packed.infolist()}
            record = read_record(packed.read(inner["data.pkl"]), where)
            if "byteorder" in inner and packed.read(inner["byteorder"]) != b"little":
                raise _damaged(where, "its numbers are big-endian")
            entry = inner[f"data/{record.storage}"]
    except (zipfile.BadZipFile, KeyError, ValueError, NotImplementedError) as error:
        if isinstance(error, DataError):
            raise
        raise _damaged(where, f"it is not a tensor as torch.save writes it: {error}") from error
    header = memoryview(bytearray(30))
    read_at(file, begin + entry.header_offset, header, what, "TOK201")
    names, extra = struct.unpack_from("<HH", header, 26)
    needed = (record.offset + math.prod(record.shape)) * record.dtype.itemsize
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < needed:
        raise _damaged(where, f"it has {entry.file_size} bytes for {list(record.shape)} of {record.dtype}")
    start = begin + entry.header_offset + 30 + names + extra
    if start + needed > begin + length:
        raise _damaged(where, "its elements lie outside of it")
    return start + record.offset * record.dtype.itemsize, record


def _damaged(where: str, why: str) -> DataError:
    return DataError("a checkpoint file is damaged", code="TOK201", where=where, why=why, fix="save it again")
