"""A folder of planned files, written in parallel, verified, and published by one rename.

    plan | make files, several at once | [compare all] | one rename

What the conversions to model folders and to torch_dist folders share.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from slime_convert.hf_writing import SHARD, HfWriting
from slime_convert.job import Job, PlannedFile
from slime_convert.rows import StoredRows, TensorRows, first_difference
from slime_core.durable import storage_error
from slime_core.errors import ConfigError, StorageError
from slime_core.weights.shards import Shards

DType = Literal["keep", "bfloat16", "float32", "float16"]


@dataclass(slots=True, frozen=True, kw_only=True)
class How:
    """What the user chose: ``shard`` is in bytes.

    ``moved`` is called with bytes, ``total`` with all that will be; ``note`` with lines.
    """

    dtype: DType = "keep"
    workers: int = 2
    verify: bool = False
    force: bool = False
    shard: int = SHARD
    moved: Callable[[int], None] = lambda count: None
    total: Callable[[int], None] = lambda count: None
    note: Callable[[str], None] = lambda text: None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None where each tensor keeps its own."""
        return None if self.dtype == "keep" else getattr(torch, self.dtype)


@dataclass(slots=True, frozen=True, kw_only=True)
class Done:
    """Result of a conversion; ``kept`` files are from an earlier attempt."""

    path: Path
    tensors: int
    size: int
    files: int
    kept: int
    verified: bool


def to_hf(kind: str, tensors: Sequence[TensorRows], target: Path, origin: Path, used: set[Path], how: How) -> Done:
    """Write a model folder of tensors that are cast already; ``used`` are the files that they come from."""
    check_apart(target, used | {origin / "config.json"})
    writing = HfWriting(tensors, origin=origin, shard=how.shard)

    def pairs(job: Job) -> list[tuple[TensorRows, TensorRows]]:
        written = Shards.open(job.aside)
        return [(StoredRows(written.infos[rows.name]), rows) for rows in tensors]

    return write_folder(
        kind, target, writing.files, how, used=used, config=origin, tensors=len(tensors),
        finish=lambda job: writing.finish(job.aside), pairs=pairs,
    )  # fmt: skip


def check_apart(target: Path, used: set[Path]) -> None:
    """Refuse a target that has files of the source in it: published with ``force``, it would take their place.

    Raises:
        ConfigError: CFG12, with the first such file.
    """
    place = Path(os.path.realpath(target))
    for file in sorted(used):
        for name in (file.parent.resolve() / file.name, file.resolve()):
            if name.is_relative_to(place):
                raise ConfigError(
                    f"{target} has a file in it that it is made from",
                    code="CFG12",
                    where=str(name),
                    why="the new folder takes the place of all that is there",
                    fix="choose another folder",
                )


def write_folder(
    kind: str,
    target: Path,
    files: Sequence[PlannedFile],
    how: How,
    *,
    used: set[Path],
    config: Path,
    tensors: int,
    finish: Callable[[Job], None],
    pairs: Callable[[Job], list[tuple[TensorRows, TensorRows]]],
) -> Done:
    """Write all files, verify them if ``how.verify`` is set, and publish the folder.

    Args:
        used: the files that it is made from; with config.json of the folder ``config`` they make two tries the same
        finish: writes the files without tensors
        pairs: written and intended content

    Raises:
        ConfigError: CFG12 the target is there. StorageError: STO109 and others, STO112 a written file differs.
    """
    size = sum(file.size for file in files)
    how.total(size * (2 if how.verify else 1))
    plan = _plan(kind, how, files, used, config)
    chosen: dict[str, Any] = {"workers": how.workers, "force": how.force, "moved": how.moved, "note": how.note}
    with Job(target, plan, files, **chosen) as job:
        job.write()
        try:
            finish(job)
        except OSError as error:
            raise storage_error(error, job.aside, f"{target.name} cannot be finished") from error
        if how.verify:
            _forget(job.aside / file.name for file in files)
            job.run([_comparison(job, rows, meant, how) for rows, meant in pairs(job)])
        job.publish()
        return Done(
            path=job.target, tensors=tensors, size=size, files=len(files), kept=job.reused, verified=how.verify
        )


def _plan(kind: str, how: How, files: Sequence[PlannedFile], used: set[Path], config: Path) -> dict[str, Any]:
    """What makes two conversions the same: sources by name, size and time, options, and the files to be made."""
    stats = {str(path.resolve()): path.stat() for path in sorted(used)}
    text = (config / "config.json").read_bytes()
    return {
        "kind": kind,
        "dtype": how.dtype,
        "sources": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "config": hashlib.sha256(text).hexdigest(),
        "files": {file.name: file.size for file in files},
    }


def _forget(files: Iterator[Path]) -> None:
    """Drop files from the page cache, so that they are read from the disk."""
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _comparison(job: Job, rows: TensorRows, meant: TensorRows, how: How) -> Callable[[], None]:
    def compare() -> None:
        job.check_stop()
        row = first_difference(rows, meant, how.moved)
        if row is not None:
            raise StorageError(
                f"{meant.name} was written otherwise than it was meant: row {row} of {list(rows.shape)} {rows.dtype}",
                code="STO112",
                where=str(job.aside),
                why=f"it was compared with {list(meant.shape)} {meant.dtype} of the source",
                fix=f"look at the disk (dmesg); remove {job.aside}; then give the same command again",
            )

    return compare
