"""Restricted reading of torch's pickles: only the few classes of a checkpoint's metadata are built.

Two kinds are read: the `.metadata` of a torch.distributed.checkpoint folder, and the record that tells dtype, shape
and place of a tensor in what `torch.save` wrote. Nothing else in slime reads a pickle (docs/security.md). Any other
name in a pickle, and with it any call, is an error before anything runs.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from slime_core.errors import DataError

METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
}
MODULES = {module.__name__: module for module in (metadata, filesystem, planner)}
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}  # fmt: skip


class Inert:
    """Stands for a class of megatron-core that carries nothing that is read here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class StorageRecord(NamedTuple):
    """What `torch.save` says of one tensor: which storage, where in it and how; counted in elements."""

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Forbidden(pickle.UnpicklingError):
    """A name that is not on the list."""


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes, globals_: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._globals = globals_

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._globals:
            return self._globals[module, name]
        if module in METADATA and name in METADATA[module]:
            return getattr(MODULES[module], name)
        if module.startswith("megatron.core.dist_checkpointing.") and name.startswith("MCore"):
            return Inert
        raise Forbidden(f"{module}.{name}")

    def persistent_load(self, reference: Any) -> Any:
        kind, dtype, key, *_ = reference
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"a stored object of kind {kind!r}")
        return str(key), dtype


def read_metadata(data: bytes, where: str) -> metadata.Metadata:
    """The metadata of a folder that torch.distributed.checkpoint wrote.

    Raises:
        DataError: TOK203 it names something else than metadata, TOK201 it is damaged.
    """
    allowed = {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _layout,
        ("collections", "OrderedDict"): OrderedDict,
        **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
    }
    contents = _load(data, allowed, where)
    if not isinstance(contents, metadata.Metadata) or not isinstance(contents.storage_data, dict):
        raise _damaged(where, "it holds no metadata of a distributed checkpoint")
    return contents


def read_record(data: bytes, where: str) -> StorageRecord:
    """What `torch.save` says of the one tensor in an archive.

    Raises:
        DataError: TOK203, TOK201 as :func:`read_metadata`.
    """
    allowed = {
        ("torch._utils", "_rebuild_tensor_v2"): _record,
        ("collections", "OrderedDict"): OrderedDict,
        **{("torch", name): dtype for name, dtype in STORAGES.items()},
    }
    record = _load(data, allowed, where)
    if not isinstance(record, StorageRecord):
        raise _damaged(where, "it holds no tensor")
    return record


def _load(data: bytes, allowed: Mapping[tuple[str, str], Any], where: str) -> Any:
    try:
        return _Restricted(data, allowed).load()
    except Forbidden as error:
        raise DataError(
            f"the pickle names {error}, which no checkpoint's metadata is made of",
            code="TOK203",
            where=where,
            why="a pickle can run any code; nothing of this one was run",
            fix="fetch the checkpoint again from where it was written; do not load this file with other tools",
        ) from None
    except Exception as error:  # whatever a broken pickle raises: no code of its own can
        raise _damaged(where, f"its pickle cannot be read: {type(error).__name__}: {error}") from error


def _record(storage: tuple[str, torch.dtype], offset: int, shape: Any, stride: Any, *_: Any) -> StorageRecord:
    return StorageRecord(storage[0], storage[1], int(offset), tuple(map(int, shape)), tuple(map(int, stride)))


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"layout {name!r}")
    return torch.strided


def _damaged(where: str, why: str) -> DataError:
    return DataError("a checkpoint file is damaged", code="TOK201", where=where, why=why, fix="save it again")
