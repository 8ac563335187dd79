"""Writing of a model folder: safetensors in shards, their index, config and tokenizer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from slime_convert.job import PlannedFile
from slime_convert.rows import TensorRows, blocks, nbytes
from slime_core import durable
from slime_core.weights.shards import INDEX, file_names, header

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf", "*.h5")
SHARD = 2 << 30


class HfWriting:
    """The files of a folder, and what is put beside them at the end.

    Example:
        writing = HfWriting(tensors, origin=Path("Qwen3-4B"))
        with Job(path, plan, writing.files, workers=4) as job:
            job.write()
            writing.finish(job.aside)
            job.publish()

    Args:
        tensors: in the order of the files; each is cast already
        origin: the folder that config and tokenizer come from
        shard: bytes of tensors in a file, at most, where one tensor is not larger
    """

    def __init__(self, tensors: Sequence[TensorRows], *, origin: Path, shard: int = SHARD) -> None:
        self._origin = origin
        groups: list[list[TensorRows]] = [[]]
        for rows in tensors:
            if groups[-1] and sum(map(nbytes, groups[-1])) + nbytes(rows) > shard:
                groups.append([])
            groups[-1].append(rows)
        self._groups = dict(zip(file_names(len(groups)), groups))
        self.dtype = _dtype(tensors)
        self.files = [
            PlannedFile(name=name, size=len(_header(group)) + sum(map(nbytes, group)), parts=partial(_parts, group))
            for name, group in self._groups.items()
        ]

    def finish(self, path: Path) -> None:
        """Write the index and copy everything but weights from the origin; config.json says the dtype that is stored.

        Raises:
            OSError: it cannot be written, or read.
        """
        small = {
            file.name: file.read_bytes()
            for file in sorted(self._origin.iterdir())
            if file.is_file() and not any(file.match(form) for form in WEIGHTS)
        }
        config = json.loads(small["config.json"])
        quantised = config.pop("quantization_config", None)  # what is written is not
        if quantised or config.get("dtype", config.get("torch_dtype")) != self.dtype:
            config.pop("torch_dtype", None)
            small["config.json"] = (json.dumps({**config, "dtype": self.dtype}, indent=2) + "\n").encode()
        if len(self._groups) > 1:
            names = {rows.name: name for name, group in self._groups.items() for rows in group}
            total = sum(nbytes(rows) for group in self._groups.values() for rows in group)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
            small[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
        for name, data in small.items():
            (path / name).unlink(missing_ok=True)
            durable.write_file(path / name, [data])


def _dtype(tensors: Sequence[TensorRows]) -> str:
    """What most bytes are."""
    sizes = Counter[torch.dtype]()
    for rows in tensors:
        sizes[rows.dtype] += nbytes(rows)
    return str(sizes.most_common(1)[0][0]).removeprefix("torch.")


def _header(group: Sequence[TensorRows]) -> bytes:
    return header(((rows.name, rows.dtype, rows.shape) for rows in group), {"format": "pt"})


def _parts(group: Sequence[TensorRows]) -> Iterator[bytes | memoryview]:
    yield _header(group)
    for rows in group:
        yield from blocks(rows)
