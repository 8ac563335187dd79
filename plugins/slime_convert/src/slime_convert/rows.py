"""Tensors that are read by rows: where each row of one comes from in others, a few at a time, never a whole tensor.

    safetensors file --Stored--+                      +-- Moved (join: a Megatron tensor)      --Cast--> a file
    torch_dist folder --Whole--+--> rows of a tensor -+-- Moved (part: a Hugging Face tensor)  --Cast--> a file

A row is an index of the first axis. Which row goes where is what `bridge.join` does to row numbers, so the table of
a bridge is the only description of a layout.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch

from slime_convert.bridge import Entry, Kind, Sizes, join
from slime_core.errors import DataError
from slime_core.weights.shards import TORCH_NAMES, Shards
from slime_core.weights.tensor_info import TensorInfo

BLOCK = 1 << 20  # bytes that are read, cast, hashed and written at once: they stay in the processor's cache
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class TensorRows(Protocol):
    """A tensor whose rows can be read in any order, from any thread.

    Example:
        buffer = bytearray(4 * row_bytes(rows))
        rows.read(0, 4, memoryview(buffer))            # the bytes of the first four rows
    """

    @property
    def name(self) -> str:
        """What it is called where it lies."""

    @property
    def shape(self) -> tuple[int, ...]:
        """All axes; the first one counts rows."""

    @property
    def dtype(self) -> torch.dtype:
        """Of each element."""

    def read(self, first: int, count: int, into: memoryview) -> None:
        """Fill ``into`` with ``count`` rows from ``first`` on; it has exactly their bytes.

        Raises:
            DataError: the file is not what its header or metadata says.
        """


def row_bytes(rows: TensorRows) -> int:
    """Bytes of one row."""
    return math.prod(rows.shape[1:]) * rows.dtype.itemsize


def nbytes(rows: TensorRows) -> int:
    """Bytes of all rows."""
    return rows.shape[0] * row_bytes(rows)


def blocks(rows: TensorRows, first: int = 0, count: int | None = None) -> Iterator[memoryview]:
    """The bytes of ``count`` rows in order, about `BLOCK` at a time; a block is freed at the next one."""
    one = row_bytes(rows)
    end = rows.shape[0] if count is None else first + count
    step = max(1, BLOCK // max(one, 1))
    buffer = memoryview(bytearray(min(step, end - first) * one))
    for begin in range(first, end, step):
        now = min(step, end - begin)
        block = buffer[: now * one]
        rows.read(begin, now, block)
        yield block


def read_whole(rows: TensorRows) -> torch.Tensor:
    """The tensor, in memory.

    Raises:
        DataError: as `TensorRows.read`.
    """
    tensor = torch.empty(rows.shape, dtype=rows.dtype)
    if tensor.numel():
        rows.read(0, rows.shape[0], memoryview(tensor.view(-1).view(torch.uint8).numpy().data))
    return tensor


def read_at(file: Path, offset: int, into: memoryview, what: str, code: str) -> None:
    """Fill ``into`` with the bytes of a file from ``offset`` on.

    Raises:
        DataError: ``code``, the file cannot be read or ends before, with ``what`` and the numbers.
    """
    done = 0
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < len(into):
                count = os.preadv(fd, [into[done:]], offset + done)
                if not count:
                    size = os.fstat(fd).st_size
                    raise DataError(
                        f"{file.name} ends inside {what}",
                        code=code,
                        where=str(file),
                        why=f"bytes {offset} to {offset + len(into)} are needed, the file has {size}",
                        fix="fetch or save the file again",
                    )
                done += count
        finally:
            os.close(fd)
    except OSError as error:
        reason = f"{what}: {error.strerror or error}"
        raise DataError(f"{file.name} cannot be read", code=code, where=str(file), why=reason) from error


@dataclass(slots=True, frozen=True)
class StoredRows:
    """A tensor in a safetensors file; of a quantised weight the values, in bfloat16."""

    info: TensorInfo
    name: str = field(init=False)
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.info.name)
        object.__setattr__(self, "shape", self.info.shape or (1,))
        object.__setattr__(self, "dtype", getattr(torch, TORCH_NAMES[self.info.dtype]))

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `TensorRows`; TOK47 where the file is damaged."""
        if self.info.stored is not None:
            begin = first - first % self.info.stored.form.height
            values = Shards({self.name: self.info.rows(begin, first - begin + count)})[self.name]
            torch.frombuffer(into, dtype=self.dtype).copy_(values[first - begin :].reshape(-1))
            return
        read_at(self.info.file, self.info.begin + first * row_bytes(self), into, f"tensor {self.name}", "TOK47")


@dataclass(slots=True, frozen=True)
class MemoryRows:
    """The rows of a tensor in memory."""

    name: str
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As in `TensorRows`."""
        return tuple(self.tensor.shape) or (1,)

    @property
    def dtype(self) -> torch.dtype:
        """As in `TensorRows`."""
        return self.tensor.dtype

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `TensorRows`."""
        rows = self.tensor.reshape(self.shape)[first : first + count].contiguous()
        into[:] = rows.view(-1).view(torch.uint8).numpy().data


@dataclass(slots=True, frozen=True)
class Move:
    """``count`` rows: from ``first`` of source number ``source`` to ``to``; source -1 is zeros."""

    to: int
    count: int
    source: int
    first: int


@dataclass(slots=True, frozen=True)
class Moved:
    """A tensor made of rows of others, which are alike in all but their number of rows."""

    name: str
    sources: Sequence[TensorRows]
    moves: Sequence[Move]  # in the order of ``to``, without gaps
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        last = self.moves[-1]
        object.__setattr__(self, "shape", (last.to + last.count, *self.sources[0].shape[1:]))
        object.__setattr__(self, "dtype", self.sources[0].dtype)

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `TensorRows`."""
        one = row_bytes(self)
        place, end = first, first + count
        number = bisect_right(self.moves, first, key=lambda move: move.to) - 1
        while place < end:
            move = self.moves[number]
            now = min(end, move.to + move.count) - place
            view = into[(place - first) * one : (place - first + now) * one]
            if move.source < 0:
                view[:] = bytes(len(view))
            else:
                self.sources[move.source].read(move.first + place - move.to, now, view)
            place, number = place + now, number + 1


@dataclass(slots=True, frozen=True)
class Cast:
    """The same tensor in another dtype."""

    source: TensorRows
    dtype: torch.dtype
    name: str = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.source.name)
        object.__setattr__(self, "shape", self.source.shape)

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `TensorRows`; rounds to nearest even, as torch does."""
        if not len(into):
            return
        buffer = bytearray(count * row_bytes(self.source))
        self.source.read(first, count, memoryview(buffer))
        torch.frombuffer(into, dtype=self.dtype).copy_(torch.frombuffer(buffer, dtype=self.source.dtype))


@dataclass(slots=True, frozen=True)
class SwappedHalves:
    """The same tensor, its left and right columns in each other's place."""

    name: str
    source: TensorRows
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", self.source.shape)
        object.__setattr__(self, "dtype", self.source.dtype)

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `TensorRows`."""
        self.source.read(first, count, into)
        if count:
            rows = torch.frombuffer(into, dtype=torch.uint8).view(count, 2, -1)
            rows.copy_(rows.flip(1))


def cast(rows: TensorRows, dtype: torch.dtype | None) -> TensorRows:
    """The rows in ``dtype``; None keeps each dtype; other than floating-point tensors always keep theirs."""
    return rows if dtype is None or dtype == rows.dtype or rows.dtype not in FLOATS else Cast(rows, dtype)


def joined(entry: Entry, tensors: Sequence[TensorRows], sizes: Sizes) -> TensorRows:
    """The whole Megatron tensor of an entry, of its Hugging Face tensors."""
    if entry.kind == "halves":
        return SwappedHalves(entry.megatron, tensors[0])
    moves = _moves(entry.kind, tuple(t.shape[0] for t in tensors), sizes)
    return Moved(entry.megatron, tuple(tensors), moves)


def parted(entry: Entry, whole: TensorRows, sizes: Sizes) -> list[TensorRows]:
    """The Hugging Face tensors of an entry, of its whole Megatron tensor; the inverse of :func:`joined`."""
    if entry.kind == "halves":
        return [SwappedHalves(entry.hf[0], whole)]
    heights = tuple(shape[0] for shape in entry.shapes)
    moves = _moves(entry.kind, heights, sizes)
    parts: list[TensorRows] = []
    for number, name in enumerate(entry.hf):
        part_moves = sorted((m for m in moves if m.source == number), key=lambda move: move.first)
        parts.append(Moved(name, (whole,), tuple(Move(m.first, m.count, 0, m.to) for m in part_moves)))
    return parts


@lru_cache(maxsize=1024)
def _moves(kind: Kind, rows: tuple[int, ...], sizes: Sizes) -> tuple[Move, ...]:
    """What `join` does to row numbers: 1 and up through all sources, 0 for filling."""
    numbers = torch.arange(1, sum(rows) + 1).split(list(rows))
    whole = join(Entry("", ("",) * len(rows), kind), numbers, sizes)
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    return tuple(_runs(whole, starts))


def _runs(numbers: torch.Tensor, starts: Sequence[int]) -> Iterator[Move]:
    """Runs of rows that stay together; ``starts`` are the first numbers of the sources, less one."""
    step = numbers.diff()
    follows = (step == 1) & ~torch.isin(numbers[1:], torch.tensor(starts) + 1)
    follows |= (numbers[1:] == 0) & (numbers[:-1] == 0)
    firsts = [0, *((~follows).nonzero().flatten() + 1).tolist(), len(numbers)]
    for begin, end in pairwise(firsts):
        number = int(numbers[begin]) - 1
        source = bisect_right(starts, number) - 1 if number >= 0 else -1
        yield Move(begin, end - begin, source, number - starts[source] if number >= 0 else 0)


def moves_of(numbers: torch.Tensor) -> tuple[Move, ...]:
    """Rows of one source by number from 0 on, in the order in which they are wanted."""
    return tuple(_runs(numbers.flatten() + 1, [0, int(numbers.max()) + 1]))


def first_difference(
    one: TensorRows, other: TensorRows, moved: Callable[[int], None] = lambda count: None
) -> int | None:
    """The first row, or rows near it, whose bytes differ; None where all are equal."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return 0
    row = 0
    for left, right in zip(blocks(one), blocks(other)):
        if left != right:
            return row
        row += len(left) // max(1, row_bytes(one))
        moved(len(left))
    return None
