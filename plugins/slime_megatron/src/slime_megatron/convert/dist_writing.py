"""Tensors by rows in, the files of a torch_dist folder out, whose every offset is known before a byte is written.

A tensor of a layer, or of an expert, is a chunk of its own, so nothing is stacked in memory; large ones are several.
What megatron-core's modules look for beside weights (`_extra_state`) are keys that share one empty object.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from slime_core import durable
from slime_core.errors import DataError
from slime_core.weights.job import File, Mark
from slime_core.weights.rows import Rows, blocks, nbytes, row_bytes
from slime_megatron.convert.archive import archive, frame
from slime_megatron.convert.dist import BACKEND, COMMON, FORMAT, MANIFEST, METADATA, TRACKER
from slime_megatron.convert.dist_keys import Place, extra_states

CHUNK, FILE, LEAST = 512 << 20, 1 << 30, 64 << 20  # bytes of a chunk, and of a file: at most and at least, about
SEVERAL = 8  # files that a small folder has too, so that they are made at once
RELEASE = "release"


@dataclass(slots=True, frozen=True)
class Target:
    """A tensor, and the places it is found at: bytes are written once."""

    places: Sequence[Place]
    rows: Rows


@dataclass(slots=True)
class _Plan:
    limit: int  # bytes of a file
    files: list[list[tuple[int, bytes | partial[Iterator[bytes | memoryview]]]]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    stored: list[WriteResult] = field(default_factory=list)

    def add(self, size: int, content: bytes | partial[Iterator[bytes | memoryview]]) -> _StorageInfo:
        """Put something at the end of the last file, or of a new one."""
        if not self.files or self.sizes[-1] + size > self.limit:
            self.files.append([])
            self.sizes.append(0)
        info = _StorageInfo(f"__0_{len(self.files) - 1}.distcp", self.sizes[-1], size)
        self.files[-1].append((size, content))
        self.sizes[-1] += size
        return info


class _Writer(FileSystemWriter):
    """Writes the metadata; says nothing of where."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class DistWriting:
    """The files of a folder, and what is put beside them at the end.

    Example:
        writing = DistWriting(targets, layers_apart=False)
        with Job(path, plan, writing.files, workers=4) as job:
            job.write()
            writing.finish(job.aside, job.marks)
            job.publish()
    """

    def __init__(self, targets: Sequence[Target], *, layers_apart: bool, folder: str = RELEASE) -> None:
        self._folder, self._apart = folder, layers_apart
        total = sum(nbytes(target.rows) for target in targets)
        self._planned = plan = _Plan(min(FILE, max(LEAST, total // SEVERAL)))
        empty = io.BytesIO()
        torch.save([None], empty)
        nothing = plan.add(len(empty.getvalue()), empty.getvalue())
        for target in targets:
            self._add(target)
            for key in filter(None, map(extra_states, target.places)):
                plan.tensors[key] = BytesStorageMetadata()
                plan.stored.append(WriteResult(MetadataIndex(key), nothing.length, nothing))
        self.files = [
            File(name=f"{folder}/__0_{n}.distcp", size=size, parts=partial(_parts, items))
            for n, (items, size) in enumerate(zip(plan.files, plan.sizes))
        ]

    def _add(self, target: Target) -> None:
        rows, lead = target.rows, target.places[0].index
        step = max(1, CHUNK // max(1, row_bytes(rows)))
        for first in range(0, rows.shape[0], step):
            count = min(step, rows.shape[0] - first)
            sizes = (*(1 for _ in lead), count, *rows.shape[1:])
            made = partial(_archive, rows, first, count, sizes)
            info = self._planned.add(frame(sizes, rows.dtype).total, made)
            for place in target.places:
                offsets = torch.Size((*place.index, first, *(0 for _ in rows.shape[1:])))
                self._chunk(place, rows, ChunkStorageMetadata(offsets, torch.Size(sizes)), info)

    def _chunk(self, place: Place, rows: Rows, chunk: ChunkStorageMetadata, info: _StorageInfo) -> None:
        plan, size = self._planned, torch.Size((*place.of, *rows.shape))
        held = plan.tensors.setdefault(place.key, TensorStorageMetadata(TensorProperties(dtype=rows.dtype), size, []))
        assert isinstance(held, TensorStorageMetadata)
        if held.properties.dtype != rows.dtype or held.size != size:
            raise DataError(
                f"the layers' {place.key} is {list(held.size)} {held.properties.dtype} and {list(size)} {rows.dtype}",
                code="TOK46",
                where=rows.name,
                why="layers that are stacked are alike",
                fix="--dtype bfloat16 or --dtype float32, where dtypes differ",
            )
        index = MetadataIndex(place.key, chunk.offsets, len(held.chunks))
        held.chunks.append(chunk)
        plan.stored.append(WriteResult(index, info.length, info))

    def finish(self, path: Path, marks: Mapping[str, Mark]) -> None:
        """Write metadata, tracker and manifest into a folder that has all files; the tracker comes last.

        Raises:
            OSError: it cannot be written.
        """
        folder = path / self._folder
        about = {"singleton_local_shards": False, "non_homogeneous_layers": self._apart}
        common = io.BytesIO()
        torch.save({"content_metadata": about, "checkpoint_version": 3.0, "iteration": 0}, common)
        small = {COMMON: common.getvalue()}
        small[FORMAT] = json.dumps(
            {
                "sharded_backend": BACKEND,
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
        ).encode()
        for name in (METADATA, MANIFEST, *small):
            (folder / name).unlink(missing_ok=True)
        metadata = Metadata(state_dict_metadata=dict(self._planned.tensors), planner_data={})
        _Writer(str(folder)).finish(metadata, [self._planned.stored])
        listed: dict[str, dict[str, Any]] = {
            name.removeprefix(f"{self._folder}/"): {"size": mark.size, "xxh128": mark.xxh128}
            for name, mark in marks.items()
        }
        for name, data in small.items():
            durable.write_file(folder / name, [data])
        for name in (METADATA, *small):
            data = (folder / name).read_bytes()
            listed[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        text = json.dumps({"format": BACKEND, "files": dict(sorted(listed.items()))}, indent=1) + "\n"
        durable.write_file(folder / MANIFEST, [text.encode()])
        durable.replace_file(path / TRACKER, self._folder.encode())


def _archive(rows: Rows, first: int, count: int, sizes: tuple[int, ...]) -> Iterator[bytes | memoryview]:
    return archive(sizes, rows.dtype, blocks(rows, first, count))


def _parts(items: Sequence[tuple[int, bytes | partial[Iterator[bytes | memoryview]]]]) -> Iterator[bytes | memoryview]:
    for _, content in items:
        if isinstance(content, bytes):
            yield content
        else:
            yield from content()
