"""Where the elements of a rank's shard lie: in the whole Megatron tensor, and in the tensors of the model folder.

A rank's shard is counted flat, row by row. Any run of a matrix is at most three boxes of the whole tensor for each run
of rows (the end of a row, whole rows, the begin of a row), and several tensors that lie over each other (gate over up)
have a run of rows each. So what an optimizer shares as flat ranges is written in the coordinates of whole tensors, and
read at any other layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from slime_convert.bridge import Entry, Sizes, join, sections, shard
from slime_core.errors import PluginError

BITS = 40  # of a row number beside the number of its tensor
MOST = 256 << 20  # elements of a box, at most


@dataclass(slots=True, frozen=True)
class Box:
    """A part of a whole tensor that is one run of the shard."""

    begin: int  # its first element in the shard
    offsets: tuple[int, ...]  # in the whole tensor
    sizes: tuple[int, ...]

    @property
    def end(self) -> int:
        """The element of the shard behind it."""
        return self.begin + math.prod(self.sizes)


@dataclass(slots=True, frozen=True)
class ShardPiece:
    """Shard ``rank`` of ``size`` of a tensor; ``shape`` is the shard's. Columns are dealt of matrices alone."""

    entry: Entry
    shape: tuple[int, ...]
    rank: int
    size: int

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        axis = {"whole": -1, "columns": 1}.get(self.entry.kind, 0)
        return tuple(n * self.size if i == axis else n for i, n in enumerate(self.shape))

    @property
    def width(self) -> int:
        """Elements of a row of the shard."""
        return math.prod(self.shape[1:])

    @property
    def column(self) -> int:
        """The column of the whole tensor with which a row of the shard begins."""
        return self.rank * self.width if self.entry.kind == "columns" else 0

    def runs(self) -> list[tuple[int, int, int]]:
        """Rows of the shard that follow each other in the whole tensor: first of the shard, count, first there."""
        rows = self.shape[0]
        if self.size == 1 or self.entry.kind in ("whole", "columns"):
            return [(0, rows, 0)]
        runs, first = [], 0
        for height in sections(self.entry, rows * self.size) or [rows * self.size]:
            count = height // self.size
            runs.append((first, count, first * self.size + self.rank * count))
            first += count
        return runs

    def boxes(self, begin: int, end: int) -> Iterator[Box]:
        """Elements ``begin`` to ``end`` of the shard as boxes of the whole tensor, in order."""
        width = self.width
        for first, count, start in self.runs():
            for box in _boxes(self.shape, max(begin, first * width), min(end, (first + count) * width)):
                row, *inside = box.offsets
                if self.column:  # of a matrix
                    inside[-1] += self.column
                yield Box(box.begin, (start + row - first, *inside), box.sizes)

    def source_rows(self, sizes: Sizes) -> torch.Tensor:
        """For each row of the shard, the tensor of ``entry.hf`` and its row there: number << 40 | row; [rows] int64.

        -1 is filling, which no tensor of the folder has.
        """
        counts = enumerate(shape[0] for shape in self.entry.shapes)
        numbered = [((torch.arange(n) | number << BITS) + 1)[:, None] for number, n in counts]
        rows = join(self.entry, numbered, sizes)
        if self.entry.kind != "columns":
            rows = shard(self.entry, rows, self.rank, self.size)
        return rows[:, 0] - 1


def _boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Elements ``begin`` to ``end`` of an array, counted flat, as boxes of it, in order."""
    if len(shape) == 1 and begin < end:
        yield Box(begin, (begin,), (end - begin,))
        return
    width = math.prod(shape[1:])
    while begin < end:
        row, inside = divmod(begin, width)
        if inside or end - begin < width:  # the end of a row, or the begin of one
            stop = min(end, (row + 1) * width)
            for box in _boxes(shape[1:], inside, stop - row * width):
                yield Box(row * width + box.begin, (row, *box.offsets), (1, *box.sizes))
        else:
            rows = min((end - begin) // width, max(1, MOST // width))
            stop = begin + rows * width
            yield Box(begin, (row, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
        begin = stop


def check_shapes(entries: Sequence[Entry]) -> None:
    """Refuse a bridge that leaves out what places are counted by.

    Raises:
        PluginError: PLG57 with the row.
    """
    for entry in entries:
        if len(entry.shapes) != len(entry.hf):
            raise PluginError(
                f"the bridge does not say the shape of {', '.join(entry.hf)}",
                code="PLG57",
                where=entry.megatron,
                fix='give the row a shape: Row(..., shape="hidden ffn")',
            )


def share(begin: int, end: int, width: int, number: int, count: int) -> tuple[int, int]:
    """Share ``number`` of ``count`` of the elements ``begin`` to ``end``, in whole rows where these divide."""
    rows = -(-(end - begin) // max(width, 1))
    first, last = (begin + rows * n // count * width for n in (number, number + 1))
    return min(first, end), min(last, end)
