"""Tensors that lie in several safetensors files, in each a slice that one rank has: a box of the whole.

Where a slice begins in its tensor stands in the header's metadata, as `torch.distributed.checkpoint` writes and reads
it, with the whole shape beside it. Without metadata a file holds whole tensors.

    DCP_SHARDING_INFO   JSON {name: {saved_offsets: [place by axis], shape: [whole shape]}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slime_core.errors import StorageError
from slime_core.weights.shards import TORCH_NAMES, Shards, damaged, read_header, read_metadata
from slime_core.weights.tensor_info import TensorInfo

KEY, STARTS, SHAPE = "DCP_SHARDING_INFO", "saved_offsets", "shape"

Starts = tuple[int, ...]
"""The place by axis at which a slice begins in the whole tensor."""


def slices_metadata(slices: Mapping[str, tuple[Starts, Sequence[int]]]) -> dict[str, str]:
    """Metadata of a file whose tensors are slices: of each where it begins, and the whole shape."""
    return {KEY: json.dumps({name: {STARTS: list(at), SHAPE: list(whole)} for name, (at, whole) in slices.items()})}


@dataclass(slots=True, frozen=True)
class SavedTensor:
    """A whole tensor by its slices, each with where it begins."""

    name: str
    dtype: str  # as in `TensorInfo`
    shape: tuple[int, ...]
    slices: tuple[tuple[Starts, TensorInfo], ...]

    @property
    def files(self) -> set[Path]:
        """Where its slices lie."""
        return {info.file for _, info in self.slices}

    def read(self, starts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """The box of ``shape`` that begins at ``starts``, by axis; rows outside it are not read.

        Raises:
            DataError: TOK47 a file was cut short.
        """
        box = torch.empty(tuple(shape), dtype=getattr(torch, TORCH_NAMES[self.dtype]))
        for begin, info in self.slices:
            lows = [max(pair) for pair in zip(begin, starts)]
            sizes = [min(b + m, s + n) - low for b, m, s, n, low in zip(begin, info.shape, starts, shape, lows)]
            if any(size <= 0 for size in sizes):
                continue
            part = _read_box(info, [low - b for low, b in zip(lows, begin)], sizes)
            if part.shape == box.shape:
                return part
            box[tuple(slice(low - s, low - s + size) for low, s, size in zip(lows, starts, sizes))] = part
        return box


def _read_box(info: TensorInfo, starts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    if not shape:
        return Shards({info.name: info})[info.name]
    rows = info.rows(starts[0], shape[0])
    if len(shape) > 1 and shape[0] == 1:  # of a stack of matrices one, and rows of that
        return _read_box(replace(rows, shape=rows.shape[1:]), starts[1:], shape[1:])[None]
    part = Shards({info.name: rows})[info.name]
    for axis, (start, size) in enumerate(zip(starts[1:], shape[1:]), 1):
        part = part.narrow(axis, start, size)
    return part.contiguous()


def saved_tensors(files: Iterable[Path]) -> dict[str, SavedTensor]:
    """The tensors of which files hold slices, by name.

    Raises:
        DataError: TOK47 a damaged file. StorageError: STO111 slices are missing.
    """
    tensors: dict[str, SavedTensor] = {}
    for file in files:
        places = _places(file)
        for name, info in read_header(file).items():
            starts, shape = places.get(name, ((0,) * len(info.shape), info.shape))
            one = tensors.get(name) or SavedTensor(name, info.dtype, shape, ())
            tensors[name] = replace(one, slices=(*one.slices, (starts, info)))
    for name, one in tensors.items():
        count, stored = math.prod(one.shape), sum(math.prod(info.shape) for _, info in one.slices)
        if stored != count:
            raise StorageError(
                f"of {count} elements of {name} {stored} are stored",
                code="STO111" if stored < count else "STO112",
                where=str(file.parent),
                fix="fetch the files of all ranks",
            )
    return tensors


def _places(file: Path) -> dict[str, tuple[Starts, tuple[int, ...]]]:
    """Where each slice of a file begins, and the whole shape."""
    try:
        entries = json.loads(read_metadata(file).get(KEY, "{}"))
        return {name: (tuple(entry[STARTS]), tuple(entry[SHAPE])) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(file, f"its {KEY} is not readable: {error!r}") from error
