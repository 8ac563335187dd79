"""A Hugging Face folder to a torch_dist folder and back, by a bridge: no model is built, no tensor is ever whole.

    read headers | compare names and shapes with the bridge | make files, several at once | [compare all] | one rename

Everything that can be wrong with names, shapes, dtypes, formats and room is found before a byte is written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from slime_core.durable import storage_error
from slime_core.errors import ConfigError, DataError, PluginError, StorageError
from slime_core.weights.bridge import Bridge, Entry, Sizes, check_tensors, whole_shape
from slime_core.weights.build import Fit, misfit
from slime_core.weights.dist import METADATA, DistFolder, Whole
from slime_core.weights.dist_keys import BESIDE, OPTIMIZER, Place, apart, forms, places
from slime_core.weights.dist_writing import RELEASE, DistWriting, Target
from slime_core.weights.folder import read_config
from slime_core.weights.hf_writing import SHARD, HfWriting
from slime_core.weights.job import File, Job
from slime_core.weights.rows import Move, Moved, Rows, Stored, blocks, cast, joined, parted, read_whole, row_bytes
from slime_core.weights.shards import Shards

DType = Literal["keep", "bfloat16", "float32", "float16"]
FindBridge = Callable[[Any], Bridge]


@dataclass(slots=True, frozen=True, kw_only=True)
class How:
    """What the user chose.

    ``divisible_by`` rows of the vocabulary are filled up to a multiple of it; ``shard`` is in bytes.
    ``moved`` is called with bytes, ``total`` with all that will be; ``note`` with lines.
    """

    dtype: DType = "keep"
    workers: int = 2
    verify: bool = False
    force: bool = False
    divisible_by: int = 128
    shard: int = SHARD
    trusted: bool = False
    moved: Callable[[int], None] = lambda count: None
    total: Callable[[int], None] = lambda count: None
    note: Callable[[str], None] = lambda text: None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None where each tensor keeps its own."""
        return None if self.dtype == "keep" else getattr(torch, self.dtype)


@dataclass(slots=True, frozen=True, kw_only=True)
class Done:
    """What was made: ``kept`` files are from an earlier try."""

    path: Path
    tensors: int
    size: int
    files: int
    kept: int
    verified: bool


def hf_to_dist(source: Path, target: Path, find: FindBridge, how: How) -> Done:
    """Write ``target/release`` and the tracker file, from a model folder; loadable at any layout.

    Raises:
        DataError: TOK46 to TOK49 tensors that do not fit, or damaged files. ConfigError: CFG200 no bridge, CFG12 the
            target is there. StorageError: STO109 and others, STO112 what was written reads back otherwise.
    """
    config = read_config(source)
    bridge, shards = find(config), Shards.open(source)
    check_apart(target, {info.file for info in shards.infos.values()} | {source / "config.json"})
    sizes, entries = bridge.sizes(config, how.divisible_by), _entries(bridge, config)
    check_tensors(entries, sizes, {name: info.shape for name, info in shards.infos.items()}, source)
    tensors = {name: cast(Stored(info), how.torch_dtype) for name, info in shards.infos.items()}
    _check_tied(entries, tensors, sizes, source)
    layers_apart = apart(bridge.megatron(config))
    writing = DistWriting(
        [_target(entry, tensors, sizes, bridge, layers_apart) for entry in entries], layers_apart=layers_apart
    )
    plan = _plan("hf-to-dist", how, writing.files, {info.file for info in shards.infos.values()}, source)

    def check(job: Job) -> list[tuple[Rows, Rows]]:
        folder = DistFolder.open(job.aside / RELEASE)
        made = _hf_rows(entries, folder, sizes, bridge)
        return [(rows, tensors[rows.name]) for rows in made]

    return _run(
        target, plan, writing.files, how, lambda job: writing.finish(job.aside, job.marks), check, len(entries)
    )


def dist_to_hf(source: Path, target: Path, origin: Path, find: FindBridge, how: How) -> Done:
    """Write a model folder from a torch_dist folder; config and tokenizer are those of ``origin``.

    Raises:
        DataError: TOK46 tensors that do not fit, TOK201 to TOK203 a folder that is damaged, of another format, or
            whose metadata is not trusted. Others as :func:`hf_to_dist`.
    """
    config = read_config(origin)
    bridge = find(config)
    sizes, entries = bridge.sizes(config), _entries(bridge, config)
    folder = DistFolder.open(source, trusted=how.trusted)
    stored = _hf_rows(entries, folder, sizes, bridge, str(origin / "config.json"))
    tensors = [cast(rows, how.torch_dtype) for rows in stored]
    used = {chunk.file for tensor in folder.tensors.values() for chunk in tensor.chunks}
    return to_hf("dist-to-hf", tensors, target, origin, used | {folder.path / METADATA}, how)


class DistTensors(Mapping[str, torch.Tensor]):
    """Tensors of a torch_dist folder by the names of a model folder; each is read when it is asked for.

    Example:
        tensors = DistTensors.open(Path("Qwen3-4B_torch_dist"), config, bridge)
        tensors["model.norm.weight"]
    """

    def __init__(self, rows: Sequence[Rows]) -> None:
        self._rows = {one.name: one for one in rows}

    @classmethod
    def open(cls, source: Path, config: Any, bridge: Bridge) -> DistTensors:
        """Find the folder, and compare names and shapes with those of a config.

        Its metadata is read by `unpickle`, which builds nothing but metadata, and is compared with a manifest where
        there is one.

        Raises:
            DataError: TOK46, TOK201, TOK202, TOK203 as :func:`dist_to_hf`.
        """
        folder = DistFolder.open(source, trusted=True)
        against = str(Path(config.name_or_path) / "config.json") if config.name_or_path else ""
        return cls(_hf_rows(_entries(bridge, config), folder, bridge.sizes(config), bridge, against))

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_whole(self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def to_hf(kind: str, tensors: Sequence[Rows], target: Path, origin: Path, used: set[Path], how: How) -> Done:
    """Write a model folder of tensors that are cast already; ``used`` are the files that they come from."""
    check_apart(target, used | {origin / "config.json"})
    writing = HfWriting(tensors, origin=origin, shard=how.shard)

    def check(job: Job) -> list[tuple[Rows, Rows]]:
        made = Shards.open(job.aside)
        return [(Stored(made.infos[rows.name]), rows) for rows in tensors]

    plan = _plan(kind, how, writing.files, used, origin)
    return _run(target, plan, writing.files, how, lambda job: writing.finish(job.aside), check, len(tensors))


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


def _entries(bridge: Bridge, config: Any) -> list[Entry]:
    entries = bridge.entries(config)
    for entry in entries:
        if len(entry.shapes) != len(entry.hf):
            raise PluginError(
                f"the bridge of {bridge.family} does not say the shape of {', '.join(entry.hf)}",
                code="PLG57", where=entry.megatron, fix='give the row a shape: Row(..., shape="hidden ffn")',
            )  # fmt: skip
    return entries


def _target(entry: Entry, tensors: Mapping[str, Rows], sizes: Sizes, bridge: Bridge, layers_apart: bool) -> Target:
    sources = [tensors[name] for name in entry.hf]
    if len({rows.dtype for rows in sources}) > 1:
        kinds = ", ".join(f"{rows.name} is {rows.dtype}" for rows in sources)
        raise DataError(
            f"{entry.megatron} is made of tensors of several dtypes",
            code="TOK48", where=kinds,
            fix="--dtype bfloat16 or --dtype float32" if all(rows.dtype.is_floating_point for rows in sources)
            else "save the model unquantised: model.to(torch.bfloat16).save_pretrained(FOLDER)",
        )  # fmt: skip
    return Target(places(entry, sizes, bridge.attention, layers_apart), joined(entry, sources, sizes))


def _check_tied(entries: Sequence[Entry], tensors: Mapping[str, Rows], sizes: Sizes, folder: Path) -> None:
    """A copy of a tied output matrix is left out, where it is a copy."""
    copy = tensors.get("lm_head.weight")
    embedding = next(entry for entry in entries if entry.kind == "vocabulary").hf[0]
    if sizes.tied and copy is not None and (row := _first_difference(copy, tensors[embedding])) is not None:
        raise DataError(
            f"lm_head.weight and {embedding} are tied by the config, but are stored twice and differ in row {row}",
            code="TOK49",
            where=str(folder / "config.json"),
            why="one of the two would be lost",
            fix='set "tie_word_embeddings": false in config.json, or save the model again',
        )


def _hf_rows(
    entries: Sequence[Entry], folder: DistFolder, sizes: Sizes, bridge: Bridge, against: str = ""
) -> list[Rows]:
    """Every Hugging Face tensor of a torch_dist folder, after all names and shapes were compared.

    Raises:
        DataError: TOK46.
    """
    met, used, found = Fit(), set[str](), list[Rows]()
    for entry in entries:
        here = [form for form in forms(entry, sizes, bridge.attention) if _is_there(form, folder)]
        if not here:
            _note_missing(met, entry, folder, sizes, bridge)
            continue
        used.update(place.key for form in here for place in form)
        parts = [Whole(folder, place.key, place.index) for place in here[0]]
        whole, expected = _above(entry.megatron, parts), whole_shape(entry, sizes)
        is_, rows = whole.shape, sizes.vocab if entry.kind == "vocabulary" else expected[0]
        if is_[1:] != expected[1:] or (is_[0] != rows and not (entry.kind == "vocabulary" and is_[0] > rows)):
            met.shapes.append((here[0][0].key, is_, (rows, *expected[1:])))
        else:
            found += parted(entry, whole, sizes)
    shown = {key for key, _, _ in met.shapes}
    others = {key for key in folder.tensors if OPTIMIZER.match(key) or key.startswith(BESIDE)}
    met.extra = sorted(folder.tensors.keys() - used - shown - others)
    if not met:
        raise misfit(met, folder.path, against)
    return found


def _is_there(form: Sequence[Place], folder: DistFolder) -> bool:
    tensors = folder.tensors
    return all(p.key in tensors and tensors[p.key].shape[: len(p.lead)] == p.of for p in form)


def _note_missing(met: Fit, entry: Entry, folder: DistFolder, sizes: Sizes, bridge: Bridge) -> None:
    """Missing, or of another number of layers or experts."""
    for form in forms(entry, sizes, bridge.attention):
        for place in form:
            if place.lead and place.key in folder.tensors:
                line = (place.key, folder.tensors[place.key].shape, (*place.of, *whole_shape(entry, sizes)))
                met.shapes += [line] if line not in met.shapes else []
                return
    met.missing.append(entry.megatron)


def _above(name: str, parts: Sequence[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    moves, place = [], 0
    for number, rows in enumerate(parts):
        moves.append(Move(place, rows.shape[0], number, 0))
        place += rows.shape[0]
    return Moved(name, parts, moves)


def _plan(kind: str, how: How, files: Sequence[File], used: set[Path], config: Path) -> dict[str, Any]:
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


def _run(
    target: Path,
    plan: Mapping[str, Any],
    files: Sequence[File],
    how: How,
    finish: Callable[[Job], None],
    pairs: Callable[[Job], list[tuple[Rows, Rows]]],
    tensors: int,
) -> Done:
    size = sum(file.size for file in files)
    how.total(size * (2 if how.verify else 1))
    chosen: dict[str, Any] = {"workers": how.workers, "force": how.force, "moved": how.moved, "note": how.note}
    with Job(target, plan, files, **chosen) as job:
        job.write()
        try:
            finish(job)
        except OSError as error:
            raise storage_error(error, job.aside, f"{target.name} cannot be finished") from error
        if how.verify:
            _forget(job.aside / file.name for file in files)
            job.run([_comparison(job, made, meant, how) for made, meant in pairs(job)])
        job.publish()
        return Done(path=job.target, tensors=tensors, size=size, files=len(files), kept=job.kept, verified=how.verify)


def _forget(files: Iterator[Path]) -> None:
    """Let the system drop what it has in memory of files, so that they are read from the disk."""
    for file in files:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _comparison(job: Job, made: Rows, meant: Rows, how: How) -> Callable[[], None]:
    def compare() -> None:
        job.check_stop()
        row = _first_difference(made, meant, how.moved)
        if row is not None:
            raise StorageError(
                f"{meant.name} was written otherwise than it was meant: row {row} of {list(made.shape)} {made.dtype}",
                code="STO112",
                where=str(job.aside),
                why=f"it was compared with {list(meant.shape)} {meant.dtype} of the source",
                fix=f"look at the disk (dmesg); remove {job.aside}; then give the same command again",
            )

    return compare


def _first_difference(one: Rows, other: Rows, moved: Callable[[int], None] = lambda count: None) -> int | None:
    """The first row, or rows near it, whose bytes differ; None where all are equal."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return 0
    row = 0
    for left, right in zip(blocks(one), blocks(other)):
        if left != right:
            return row
        row += len(left) // max(1, row_bytes(one))
        moved(len(left))
    return None
