"""A rank's .distcp file and the folder's .metadata, and boxes of any shape read back.

The format is that of torch.distributed.checkpoint, as megatron-core's `torch_dist` has it. The bytes are written by
`offload`, not by torch's own writer: that forks processes, or copies and writes in one go, syncs no folder and tells
no hash; ours returns when the state is copied, and every file's size is known before its first byte.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
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

from slime_convert.rows import read_at
from slime_core.trainers.offload import FileLayout
from slime_megatron.convert.archive import archive, frame
from slime_megatron.convert.dist import BACKEND, COMMON, FORMAT, DistFolder

VERSION = 3.0  # Megatron-LM's of a checkpoint


@dataclass(slots=True, frozen=True)
class WrittenChunk:
    """A chunk of a tensor: its box, under each name that the tensor has, and where its archive lies."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(slots=True)
class Archives(FileLayout):
    """A rank's file: an archive for each tensor, in order, and in front of them those that are no tensor."""

    first: bytes = b""
    chunks: list[WrittenChunk] = field(default_factory=list)

    def add(self, keys: Sequence[str], shape: Sequence[int], offsets: Any, sizes: Any, dtype: torch.dtype) -> str:
        """Plan a chunk; the answer is what its bytes are called in :meth:`starts`."""
        begin = self.chunks[-1].begin + self.chunks[-1].length if self.chunks else len(self.first)
        chunk = WrittenChunk(
            tuple(keys), tuple(shape), dtype, tuple(offsets), tuple(sizes), self.name, begin,
            frame(tuple(sizes), dtype).total,
        )  # fmt: skip
        self.chunks.append(chunk)
        name = str(len(self.chunks) - 1)
        self.tensors[name] = (torch.Size(chunk.sizes), dtype)
        return name

    def parts(self, read: Callable[[int, int], Iterator[memoryview]]) -> Iterator[bytes | memoryview]:
        """As in `FileLayout`."""
        yield self.first
        place = self.begin
        for chunk in self.chunks:
            end = place + math.prod(chunk.sizes) * chunk.dtype.itemsize
            yield from archive(chunk.sizes, chunk.dtype, read(place, end))
            place = end


def empty_state() -> bytes:
    """What a module's `_extra_state` is where it has none."""
    buffer = io.BytesIO()
    torch.save([None], buffer)
    return buffer.getvalue()


class _Memory(FileSystem):
    """Where torch writes metadata: to memory, so that its bytes are known before they are on the disk."""

    def __init__(self) -> None:
        self.data = b""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        stream = io.BytesIO()
        yield stream
        self.data = stream.getvalue()

    def exists(self, path: Any) -> bool:
        return False

    def rename(self, path: Any, new_path: Any) -> None:
        pass

    def mkdir(self, path: Any) -> None:
        pass


class _Writer(FileSystemWriter):
    """Says nothing of where it writes."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def metadata(chunks: Sequence[WrittenChunk], states: Sequence[str], first: tuple[str, int]) -> bytes:
    """The content of .metadata: all ranks' chunks, and the names of empty states, which lie first in a file."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored = []
    for chunk in chunks:
        box = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        info = _StorageInfo(chunk.file, chunk.begin, chunk.length)
        for key in chunk.keys:
            metadata = tensors.get(key)
            if metadata is None:
                properties = TensorProperties(dtype=chunk.dtype)
                metadata = tensors[key] = TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
            assert isinstance(metadata, TensorStorageMetadata)
            stored.append(WriteResult(MetadataIndex(key, box.offsets, len(metadata.chunks)), chunk.length, info))
            metadata.chunks.append(box)
    file, length = first
    for key in states:
        tensors[key] = BytesStorageMetadata()
        stored.append(WriteResult(MetadataIndex(key), length, _StorageInfo(file, 0, length)))
    writer, memory = _Writer(".", sync_files=False), _Memory()
    writer.fs = memory
    writer.finish(Metadata(state_dict_metadata=tensors, planner_data={}), [stored])
    return memory.data


def common(layers_apart: bool, iteration: int) -> dict[str, bytes]:
    """The small files that megatron-core looks for beside tensors."""
    about = {"singleton_local_shards": False, "non_homogeneous_layers": layers_apart}
    buffer = io.BytesIO()
    torch.save({"content_metadata": about, "checkpoint_version": VERSION, "iteration": iteration}, buffer)
    form = {"sharded_backend": BACKEND, "sharded_backend_version": 1}
    form |= {"common_backend": "torch", "common_backend_version": 1}
    return {COMMON: buffer.getvalue(), FORMAT: json.dumps(form).encode()}


def read_box(
    folder: DistFolder, key: str, index: tuple[int, ...], offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """A box of the tensor at ``index`` of the axes in front, of whichever ranks wrote it; what lies outside is 0.

    Raises:
        DataError: TOK201 a file is damaged.
    """
    tensor, lead = folder.tensors[key], len(index)
    box = torch.zeros(tuple(sizes), dtype=tensor.dtype)
    for chunk in tensor.of(index):
        starts, size = chunk.offsets[lead:], chunk.sizes[lead:]
        low = [max(a, b) for a, b in zip(offsets, starts)]
        high = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, starts, size)]
        if any(a >= b for a, b in zip(low, high)):
            continue
        stride = [math.prod(size[axis + 1 :]) for axis in range(len(size))]
        number = 0
        for one, offset, of in zip(index, chunk.offsets, chunk.sizes[:lead]):
            number = number * of + one - offset
        first = number * math.prod(size) + sum((a - b) * s for a, b, s in zip(low, starts, stride))
        last = first + sum((b - 1 - a) * s for a, b, s in zip(low, high, stride))
        data = bytearray((last - first + 1) * tensor.dtype.itemsize)
        begin = folder.start_of(chunk, key, tensor.dtype) + first * tensor.dtype.itemsize
        read_at(chunk.file, begin, memoryview(data), f"tensor {key}", "TOK201")
        shape = [b - a for a, b in zip(low, high)]
        place = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets))
        box[place] = torch.frombuffer(data, dtype=tensor.dtype).as_strided(shape, stride)
    return box
