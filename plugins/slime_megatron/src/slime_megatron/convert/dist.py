"""Tensors of a torch_dist folder by rows: no model is built, and no layout of ranks is needed.

    .metadata     which bytes of which file are which part of which tensor (a pickle: read by `unpickle` alone)
    __R_N.distcp  the parts, one archive each
    common.pt     what is no tensor (a pickle: never read here)      metadata.json     the format's name

Written by megatron-core's `dist_checkpointing.save` at any layout, or by `dist_writing`. Of megatron nothing is
imported: torch.distributed.checkpoint's classes are all that a folder is made of.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from slime_convert.rows import read_at
from slime_convert.source import newest_step
from slime_core.errors import DataError
from slime_megatron.convert.archive import locate
from slime_megatron.convert.unpickle import read_metadata

METADATA, COMMON, FORMAT, MANIFEST = ".metadata", "common.pt", "metadata.json", "MANIFEST.json"
TRACKER = "latest_checkpointed_iteration.txt"
BACKEND = "torch_dist"


@dataclass(slots=True)
class Chunk:
    """A box of a tensor, and the bytes of its archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    begin: int
    length: int


@dataclass(slots=True)
class Tensor:
    """One key of a folder."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[Chunk]
    by_lead: dict[tuple[int, ...], list[Chunk]] = field(default_factory=dict)

    def of(self, index: tuple[int, ...]) -> list[Chunk]:
        """The chunks that hold something at an index of the first axes."""
        if not self.by_lead:
            groups: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
            for chunk in self.chunks:
                spans = (range(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes[: len(index)]))
                for one in product(*spans):
                    groups[one].append(chunk)
            self.by_lead = groups
        return self.by_lead.get(index, [])


class DistFolder:
    """A checked folder: every part's file is there and long enough, every tensor is covered.

    Example:
        folder = DistFolder.open(Path("checkpoints/release"), trusted=True)
        folder.tensors["decoder.final_layernorm.weight"].shape
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self.tensors = dict(tensors)
        self._starts: dict[tuple[Path, int], int] = {}  # where the elements of a chunk begin, once it was looked at
        self._lock = Lock()

    @classmethod
    def open(cls, path: Path, *, trusted: bool = False) -> DistFolder:
        """Find and check the folder of ``path``: itself, or what its tracker file or `trainer` names; a run's newest.

        Raises:
            DataError: TOK201 incomplete or damaged, TOK202 another format, TOK203 its metadata is not to be trusted.
        """
        folder = find(path)
        check_format(folder)
        data = _trusted_bytes(folder, trusted)
        metadata: Any = read_metadata(data, str(folder / METADATA))
        sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        try:
            tensors = {
                str(key): _tensor(folder, key, tensor, metadata.storage_data, sizes)
                for key, tensor in metadata.state_dict_metadata.items()
                if isinstance(tensor, TensorStorageMetadata)
            }
        except (TypeError, AttributeError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise _damaged(folder / METADATA, f"its values are none of a checkpoint's: {error}") from error
        return cls(folder, tensors)

    def start_of(self, chunk: Chunk, key: str, dtype: torch.dtype) -> int:
        """The byte in its file where a chunk's elements begin.

        Raises:
            DataError: TOK201 the archive there is damaged, or of another tensor.
        """
        place = (chunk.file, chunk.begin)
        if place not in self._starts:
            subject = f"tensor {key} at {list(chunk.offsets)}"
            start, record = locate(chunk.file, chunk.begin, chunk.length, subject)
            stride = tuple(math.prod(record.shape[n + 1 :]) for n in range(len(record.shape)))
            plain = all(a == b or size == 1 for a, b, size in zip(record.stride, stride, record.shape))
            if (record.shape, record.dtype) != (chunk.sizes, dtype) or not plain:
                raise _damaged(
                    chunk.file,
                    f"{subject} is {list(chunk.sizes)} of {dtype} in {METADATA}, and in the file {list(record.shape)} "
                    f"of {record.dtype} with strides {list(record.stride)}",
                )
            with self._lock:
                self._starts[place] = start
        return self._starts[place]


@dataclass(slots=True, frozen=True)
class Whole:
    """The tensor at an index of the axes in front, by rows; `Rows` of a folder."""

    folder: DistFolder
    key: str
    index: tuple[int, ...] = ()
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        tensor = self.folder.tensors[self.key]
        object.__setattr__(self, "shape", tensor.shape[len(self.index) :])
        object.__setattr__(self, "dtype", tensor.dtype)

    @property
    def name(self) -> str:
        """The key, with the index."""
        return f"{self.key}{list(self.index)}" if self.index else self.key

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `Rows`; TOK201 where a file is damaged, or no part of the folder holds a row."""
        target = torch.frombuffer(into, dtype=self.dtype).view(count, *self.shape[1:]) if len(into) else None
        filled, lead = 0, len(self.index)
        for chunk in self.folder.tensors[self.key].of(self.index):
            row, rows = chunk.offsets[lead], chunk.sizes[lead]
            begin, end = max(first, row), min(first + count, row + rows)
            if begin >= end or target is None:
                continue
            rest, inner = chunk.offsets[lead + 1 :], chunk.sizes[lead + 1 :]
            one = math.prod(inner)
            place = self._element(chunk, lead) * rows * one + (begin - row) * one
            offset = self.folder.start_of(chunk, self.key, self.dtype) + place * self.dtype.itemsize
            needed, subject = (end - begin) * one, f"tensor {self.name}"
            if inner == self.shape[1:]:
                size = one * self.dtype.itemsize
                read_at(chunk.file, offset, into[(begin - first) * size : (end - first) * size], subject, "TOK201")
            else:
                part = bytearray(needed * self.dtype.itemsize)
                read_at(chunk.file, offset, memoryview(part), subject, "TOK201")
                box = (slice(begin - first, end - first), *(slice(o, o + s) for o, s in zip(rest, inner)))
                target[box] = torch.frombuffer(part, dtype=self.dtype).view(end - begin, *inner)
            filled += needed
        if target is not None and filled != target.numel():
            raise _damaged(self.folder.path, f"{filled} of {target.numel()} elements of {self.name} are in its files")

    def _element(self, chunk: Chunk, lead: int) -> int:
        """Which of the chunk's tensors this one is, where a chunk holds several layers or experts."""
        number = 0
        for index, offset, size in zip(self.index, chunk.offsets, chunk.sizes[:lead]):
            number = number * size + index - offset
        return number


def is_dist(path: Path) -> bool:
    """Whether a path means a torch_dist folder, whole or damaged, and no model folder."""
    return not (path / "config.json").is_file() and any(_marked(folder) for folder in _candidates(path))


def find(path: Path) -> Path:
    """The torch_dist folder that a path means.

    Raises:
        DataError: TOK201 there is none, TOK202 it holds a checkpoint of another format.
    """
    for folder in _candidates(path):
        if _marked(folder):
            return folder
    names = sorted(file.name for file in path.iterdir()) if path.is_dir() else []
    inside = [name for name in names if (path / name / METADATA).is_file()]
    if any(name.startswith("mp_rank_") for name in names):
        raise _other(path, "it has a file for each rank of one layout (mp_rank_..), which only that layout reads")
    if any(name.startswith("__") and name.endswith((METADATA, ".distcp")) for name in names):
        raise DataError(
            f"{path.name} has parts of tensors and no {METADATA}",
            code="TOK201",
            where=str(path),
            why="only that file says which bytes belong to which tensor, at this or any other layout",
            fix="its save did not end: take the checkpoint before it",
        )
    raise DataError(
        f"{path} is not a torch_dist checkpoint" if names else f"there is no folder {path}, or it is empty",
        code="TOK201",
        where=str(path),
        why=f"it has no {METADATA}, and no {TRACKER} that names a folder with one",
        fix="name one of: " + ", ".join(inside[:5]) if inside else f"name the folder that holds {METADATA}",
    )


def _candidates(path: Path) -> list[Path]:
    newest = newest_step(path)
    return [path, path / "trainer", *_tracked(path), *([newest / "trainer"] if newest else [])]


def _marked(folder: Path) -> bool:
    return (folder / METADATA).is_file() or (folder / FORMAT).is_file()


def _tracked(path: Path) -> list[Path]:
    """What Megatron's tracker file names."""
    try:
        word = (path / TRACKER).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return []
    return [path / f"iter_{int(word):07d}"] if word.isdecimal() else [path / "release"]


def check_format(folder: Path) -> None:
    """Refuse a folder that is not of this format.

    Raises:
        DataError: TOK201 it is incomplete, TOK202 of another format.
    """
    try:
        settings = json.loads((folder / FORMAT).read_bytes())
        backend = str(settings["sharded_backend"])
    except OSError:
        reason = f"it has no {FORMAT}, which a save writes last"
        raise _damaged(folder, reason, "its save did not end: take the checkpoint before it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(folder / FORMAT, f"it does not name the format: {error!r}") from error
    if backend != BACKEND:
        raise _other(folder, f"{FORMAT} says {backend}")
    if not (folder / METADATA).is_file():
        raise _damaged(folder, f"it has no {METADATA}, which says which bytes belong to which tensor at any layout")


def _trusted_bytes(folder: Path, trusted: bool) -> bytes:
    """The bytes of the metadata, compared with the manifest that slime wrote beside it or above it."""
    file = folder / METADATA
    data = file.read_bytes()
    for above in (folder, *list(folder.parents)[:3]):
        mark = _marks(above / MANIFEST).get(file.relative_to(above).as_posix())
        if mark is None:
            continue
        digest = hashlib.sha256(data).hexdigest()
        if digest == mark.get("sha256"):
            return data
        raise _damaged(file, f"its sha256 is {digest}, {above / MANIFEST} says {mark.get('sha256')}")
    if trusted:
        return data
    raise DataError(
        f"{folder.name} was not written by slime, and its {METADATA} is a pickle",
        code="TOK203",
        where=str(file),
        why=f"no {MANIFEST} there or above lists it with a hash",
        fix="where you know who wrote it: --trust-metadata (it is read with a list of allowed classes all the same)",
    )


def _marks(manifest: Path) -> dict[str, dict[str, Any]]:
    try:
        files = json.loads(manifest.read_bytes())["files"]
        return {str(name): dict(mark) for name, mark in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _tensor(folder: Path, key: str, metadata: TensorStorageMetadata, stored: Mapping[Any, Any], files: Any) -> Tensor:
    """A tensor's chunks, after each was found in a file that is long enough, and all together fill it."""
    shape, chunks = tuple(metadata.size), []
    for box in metadata.chunks:
        info = stored.get(MetadataIndex(key, box.offsets))
        subject = f"tensor {key} at {list(box.offsets)}"
        if info is None:
            raise _damaged(folder / METADATA, f"it does not say where {subject} is")
        name, end = str(info.relative_path), info.offset + info.length
        if getattr(info, "transform_descriptors", None):
            raise _other(folder, f"{subject} is packed by {', '.join(info.transform_descriptors)}")
        if Path(name).name != name or name not in files:
            raise _damaged(folder, f"{subject} is in {name}, which is not there")
        if files[name] < end:
            raise _damaged(
                folder / name, f"it has {files[name]} bytes, {subject} ends at byte {end}: it was cut short"
            )
        chunks.append(Chunk(tuple(box.offsets), tuple(box.sizes), folder / name, info.offset, info.length))
    _check_cover(folder, key, shape, chunks)
    return Tensor(key, shape, metadata.properties.dtype, chunks)


def _check_cover(folder: Path, key: str, shape: tuple[int, ...], chunks: Sequence[Chunk]) -> None:
    inside = all(
        len(chunk.offsets) == len(chunk.sizes) == len(shape)
        and all(o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(chunk.offsets, chunk.sizes, shape))
        for chunk in chunks
    )
    count = sum(math.prod(chunk.sizes) for chunk in chunks)
    if not inside or count != math.prod(shape):
        message = f"the parts of {key} hold {count} elements, {list(shape)} has {math.prod(shape)}"
        raise _damaged(
            folder / METADATA, message, "its save did not end, or ranks are missing: take the one before it"
        )


def _damaged(where: Path, why: str, fix: str = "copy or save the checkpoint again") -> DataError:
    return DataError("the torch_dist checkpoint is damaged", code="TOK201", where=str(where), why=why, fix=fix)


def _other(folder: Path, why: str) -> DataError:
    return DataError(
        f"{folder.name} is not a checkpoint in the {BACKEND} format",
        code="TOK202",
        where=str(folder),
        why=why,
        fix="load it with what wrote it, at the layout it was written at, and save it with --ckpt-format torch_dist",
    )
