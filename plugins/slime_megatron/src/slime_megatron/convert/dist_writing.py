"""Writing of a torch_dist folder, whose every offset is known before a byte is written.

A tensor of a layer, or of an expert, is a chunk of its own, so nothing is stacked in memory; large ones are several.
What megatron-core's modules look for beside weights (`_extra_state`) are keys that share one empty object.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from slime_convert.job import Mark, PlannedFile
from slime_convert.rows import TensorRows, blocks, nbytes, row_bytes
from slime_core import durable
from slime_core.errors import DataError
from slime_megatron.convert.archive import archive, frame
from slime_megatron.convert.dist import BACKEND, MANIFEST, METADATA, TRACKER
from slime_megatron.convert.dist_keys import DistPlace, extra_states
from slime_megatron.dist_files import WrittenChunk, common, empty_state, metadata

CHUNK, FILE, LEAST = 512 << 20, 1 << 30, 64 << 20  # bytes of a chunk, and of a file: at most and at least, about
SEVERAL = 8  # files that a small folder has too, so that they are made at once
RELEASE = "release"


@dataclass(slots=True, frozen=True)
class WriteTarget:
    """A tensor, and the places it is found at: bytes are written once."""

    places: Sequence[DistPlace]
    rows: TensorRows


@dataclass(slots=True)
class _Plan:
    limit: int  # bytes of a file
    files: list[list[tuple[int, bytes | partial[Iterator[bytes | memoryview]]]]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    chunks: list[WrittenChunk] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # keys of empty states

    def add(self, size: int, content: bytes | partial[Iterator[bytes | memoryview]]) -> tuple[str, int]:
        """Put something at the end of the last file, or of a new one; the file, and where it begins."""
        if not self.files or self.sizes[-1] + size > self.limit:
            self.files.append([])
            self.sizes.append(0)
        begin = self.sizes[-1]
        self.files[-1].append((size, content))
        self.sizes[-1] += size
        return f"__0_{len(self.files) - 1}.distcp", begin


class DistWriting:
    """The files of a folder, and what is put beside them at the end.

    Example:
        writing = DistWriting(targets, layers_apart=False)
        with Job(path, plan, writing.files, workers=4) as job:
            job.write()
            writing.finish(job.aside, job.marks)
            job.publish()
    """

    def __init__(self, targets: Sequence[WriteTarget], *, layers_apart: bool, folder: str = RELEASE) -> None:
        self._folder, self._apart = folder, layers_apart
        total = sum(nbytes(target.rows) for target in targets)
        self._layouts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._planned = plan = _Plan(min(FILE, max(LEAST, total // SEVERAL)))
        self._empty = empty_state()
        plan.add(len(self._empty), self._empty)
        for target in targets:
            self._add(target)
            plan.states += filter(None, map(extra_states, target.places))
        self.files = [
            PlannedFile(name=f"{folder}/__0_{n}.distcp", size=size, parts=partial(_parts, items))
            for n, (items, size) in enumerate(zip(plan.files, plan.sizes))
        ]

    def _add(self, target: WriteTarget) -> None:
        rows, first_place = target.rows, target.places[0]
        shape, keys = (*first_place.of, *rows.shape), tuple(place.key for place in target.places)
        for key in keys:
            written = self._layouts.setdefault(key, (shape, rows.dtype))
            if written != (shape, rows.dtype):
                raise DataError(
                    f"the layers' {key} is {list(written[0])} {written[1]} and {list(shape)} {rows.dtype}",
                    code="TOK46",
                    where=rows.name,
                    why="layers that are stacked are alike",
                    fix="--dtype bfloat16 or --dtype float32, where dtypes differ",
                )
        step = max(1, CHUNK // max(1, row_bytes(rows)))
        for first in range(0, rows.shape[0], step):
            count = min(step, rows.shape[0] - first)
            sizes = (*(1 for _ in first_place.index), count, *rows.shape[1:])
            offsets = (*first_place.index, first, *(0 for _ in rows.shape[1:]))
            length = frame(sizes, rows.dtype).total
            file, begin = self._planned.add(length, partial(_archive, rows, first, count, sizes))
            self._planned.chunks.append(WrittenChunk(keys, shape, rows.dtype, offsets, sizes, file, begin, length))

    def finish(self, path: Path, marks: Mapping[str, Mark]) -> None:
        """Write metadata, tracker and manifest into a folder that has all files; the tracker comes last.

        Raises:
            OSError: it cannot be written.
        """
        folder, plan = path / self._folder, self._planned
        small = {METADATA: metadata(plan.chunks, plan.states, ("__0_0.distcp", len(self._empty)))}
        small |= common(self._apart, 0)
        for name in (MANIFEST, *small):
            (folder / name).unlink(missing_ok=True)
        listed: dict[str, dict[str, Any]] = {
            name.removeprefix(f"{self._folder}/"): {"size": mark.size, "xxh128": mark.xxh128}
            for name, mark in marks.items()
        }
        for name, data in small.items():
            durable.write_file(folder / name, [data])
            listed[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        text = json.dumps({"format": BACKEND, "files": dict(sorted(listed.items()))}, indent=1) + "\n"
        durable.write_file(folder / MANIFEST, [text.encode()])
        durable.replace_file(path / TRACKER, self._folder.encode())


def _archive(rows: TensorRows, first: int, count: int, sizes: tuple[int, ...]) -> Iterator[bytes | memoryview]:
    return archive(sizes, rows.dtype, blocks(rows, first, count))


def _parts(items: Sequence[tuple[int, bytes | partial[Iterator[bytes | memoryview]]]]) -> Iterator[bytes | memoryview]:
    for _, content in items:
        if isinstance(content, bytes):
            yield content
        else:
            yield from content()
