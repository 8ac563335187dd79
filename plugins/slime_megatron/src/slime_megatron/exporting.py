"""A worker's weights as a model folder: shards, index, config and tokenizer, one whole tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime_convert.hf_writing import HfWriting
from slime_core import durable
from slime_core.durable import storage_error
from slime_core.errors import StorageError
from slime_core.weights.transports.buckets import TensorPart, stream

if TYPE_CHECKING:
    from slime_megatron.worker import MegatronWorker


class _Current:
    """The tensor that the stream has come to; a file asks for its tensors in the stream's order."""

    def __init__(self, tensors: Iterator[tuple[tuple[TensorPart, ...], torch.Tensor]]) -> None:
        self._tensors = tensors
        self._parts: dict[str, torch.Tensor] = {}

    def bytes_of(self, name: str) -> torch.Tensor:
        """The bytes of a part."""
        while name not in self._parts:
            parts, tensor = next(self._tensors)
            self._parts = {p.name: p.cut(tensor).contiguous().cpu().reshape(-1).view(torch.uint8) for p in parts}
        return self._parts[name]


@dataclass(slots=True, frozen=True)
class _Streamed:
    """A tensor of the stream; `Rows`, read once and in order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    current: _Current

    def read(self, first: int, count: int, into: memoryview) -> None:
        """As in `Rows`."""
        one = len(into) // max(1, count)
        data = self.current.bytes_of(self.name)[first * one : (first + count) * one]
        into[:] = data.numpy().data


@torch.no_grad()
def export(worker: MegatronWorker, path: Path) -> None:
    """Write a model folder in the dtype of the parameters; a collective, whole tensors on rank 0 one after another.

    Raises:
        StorageError: it cannot be written.
    """
    worker.actor.settle()
    sources = worker.policy.sources(rounded=True)
    dtypes = _dtypes(worker)
    tensors = stream(sources)
    failed: OSError | None = None
    if worker.rank == 0:
        current = _Current(tensors)
        rows = [
            _Streamed(part.name, part.shape, dtypes[part.name], current) for source in sources for part in source.parts
        ]
        try:
            path.mkdir(parents=True, exist_ok=True)
            for old in path.glob("model*.safetensors*"):  # of an export before
                old.unlink()
            writing = HfWriting(rows, origin=worker.folder.path)
            for file in writing.files:
                durable.write_file(path / file.name, file.parts())
            writing.finish(path)
        except OSError as error:
            failed = error
    for _ in tensors:  # also where rank 0 has failed: no rank waits for one that gave up
        pass
    everyone: list[Any] = [None] * worker.world
    dist.all_gather_object(everyone, str(failed) if failed else "")
    if failed is not None:
        raise storage_error(failed, path, "the model folder cannot be written") from failed
    if everyone[0]:
        raise StorageError("the model folder cannot be written", where=str(path), why=everyone[0])


def _dtypes(worker: MegatronWorker) -> dict[str, torch.dtype]:
    """Of each tensor of the model folder."""
    dtypes = {name: held_tensor.tensor.dtype for name, held_tensor in worker.policy.tensors.by_name.items()}
    everyone: list[Any] = [None] * worker.world
    dist.all_gather_object(everyone, dtypes)
    by_name = {name: dtype for held_tensor in everyone for name, dtype in held_tensor.items()}
    return {name: by_name[entry.megatron] for entry in worker.policy.tensors.entries for name in entry.hf}
