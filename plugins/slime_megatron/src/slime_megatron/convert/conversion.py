"""A Hugging Face folder to a torch_dist folder and back, by a bridge: no model is built, no tensor is ever whole.

    read headers | compare names and shapes with the bridge | make files, several at once | [compare all] | one rename

Everything that can be wrong with names, shapes, dtypes, formats and room is found before a byte is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_convert.bridge import Bridge, Entry, Sizes, check_tensors, whole_shape
from slime_convert.folder_writing import Done, How, check_apart, to_hf, write_folder
from slime_convert.job import Job
from slime_convert.rows import Move, Moved, StoredRows, TensorRows, cast, first_difference, joined, parted, read_whole
from slime_core.errors import DataError, PluginError
from slime_core.weights import prediction_layers
from slime_core.weights.build import Fit, misfit
from slime_core.weights.folder import read_config
from slime_core.weights.prediction_layers import layers
from slime_core.weights.shards import Shards
from slime_megatron.convert.adapters import has_adapters, merged_dist
from slime_megatron.convert.dist import METADATA, DistFolder, Whole
from slime_megatron.convert.dist_keys import AHEAD, BESIDE, OPTIMIZER, DistPlace, apart, forms, places
from slime_megatron.convert.dist_writing import RELEASE, DistWriting, WriteTarget

FindBridge = Callable[[Any], Bridge]


def hf_to_dist(source: Path, target: Path, find: FindBridge, how: How, *, divisible_by: int = 128) -> Done:
    """Write ``target/release`` and the tracker file, from a model folder; loadable at any layout.

    The vocabulary is filled up with rows of zeros to a multiple of ``divisible_by``.

    Raises:
        DataError: TOK46 to TOK49 tensors that do not fit, or damaged files. ConfigError: CFG200 no bridge, CFG12 the
            target is there. StorageError: STO109 and others, STO112 what was written reads back otherwise.
    """
    config = read_config(source)
    bridge, shards = find(config), Shards.open(source)
    used = {info.file for info in shards.infos.values()}
    check_apart(target, used | {source / "config.json"})
    sizes, entries = bridge.sizes(config, divisible_by), _entries(bridge, config)
    check_tensors(entries, sizes, {name: info.shape for name, info in shards.infos.items()}, source)
    tensors = {name: cast(StoredRows(info), how.torch_dtype) for name, info in shards.infos.items()}
    _check_tied(entries, tensors, sizes, source)
    layers_apart = apart(bridge.megatron(config))
    writing = DistWriting(
        [_target(entry, tensors, sizes, bridge, layers_apart) for entry in entries], layers_apart=layers_apart
    )

    def pairs(job: Job) -> list[tuple[TensorRows, TensorRows]]:
        folder = DistFolder.open(job.aside / RELEASE)
        return [(rows, tensors[rows.name]) for rows in _hf_rows(entries, folder, sizes, bridge)]

    return write_folder(
        "hf-to-dist", target, writing.files, how, used=used, config=source, tensors=len(entries),
        finish=lambda job: writing.finish(job.aside, job.marks), pairs=pairs,
    )  # fmt: skip


def dist_to_hf(
    source: Path,
    target: Path,
    origin: Path,
    find: FindBridge,
    how: How,
    *,
    trusted: bool = False,
    adapter: str = "",
    form: str = "",
) -> Done:
    """Write a model folder from a torch_dist folder; config and tokenizer are those of ``origin``.

    Of a run's adapters: their base, which is ``origin``, with one of them merged.

    Args:
        adapter: which of several
        form: of the base that an adapter is merged into, as `train.base_weights`; empty: that of the run

    Raises:
        TrainerError: TRN116 another base than that of the run's adapters.
        DataError: TOK46 tensors that do not fit, TOK201 to TOK203 a folder that is damaged, of another format, or
            whose metadata is not trusted. Others as :func:`hf_to_dist`.
    """
    folder = DistFolder.open(source, trusted=trusted)
    if has_adapters(folder) or adapter or form:
        return merged_dist(folder, target, origin, find, how, adapter, form)
    config = read_config(origin)
    bridge = find(config)
    trained = bridge.ahead and any(key.startswith(AHEAD) for key in folder.tensors)
    sizes, entries = bridge.sizes(config), _entries(bridge, config, layers(config) if trained else 0)
    stored = _hf_rows(entries, folder, sizes, bridge, str(origin / "config.json"))
    names = {rows.name for rows in stored}
    ahead = [info for name, info in prediction_layers.stored(origin, config).items() if name not in names]
    tensors = [cast(rows, how.torch_dtype) for rows in (*stored, *map(StoredRows, ahead))]
    used = {chunk.file for tensor in folder.tensors.values() for chunk in tensor.chunks} | {
        info.file for info in ahead
    }
    return to_hf("dist-to-hf", tensors, target, origin, used | {folder.path / METADATA}, how)


class DistTensors(Mapping[str, torch.Tensor]):
    """Tensors of a torch_dist folder by the names of a model folder; each is read when it is asked for.

    Example:
        tensors = DistTensors.open(Path("Qwen3-4B_torch_dist"), config, bridge)
        tensors["model.norm.weight"]
    """

    def __init__(self, rows: Sequence[TensorRows]) -> None:
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
        if has_adapters(folder):
            raise DataError(
                f"{folder.path.name} holds adapters alone, without the base that they are of",
                code="TOK46",
                where=str(folder.path),
                fix=f"slime convert dist-to-hf {folder.path} FOLDER   merges one into its base",
            )
        against = str(Path(config.name_or_path) / "config.json") if config.name_or_path else ""
        return cls(_hf_rows(_entries(bridge, config), folder, bridge.sizes(config), bridge, against))

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_whole(self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _entries(bridge: Bridge, config: Any, ahead: int = 0) -> list[Entry]:
    entries = bridge.entries(config, ahead)
    for entry in entries:
        if len(entry.shapes) != len(entry.hf):
            raise PluginError(
                f"the bridge of {bridge.family} does not say the shape of {', '.join(entry.hf)}",
                code="PLG57", where=entry.megatron, fix='give the row a shape: Row(..., shape="hidden ffn")',
            )  # fmt: skip
    return entries


def _target(
    entry: Entry, tensors: Mapping[str, TensorRows], sizes: Sizes, bridge: Bridge, layers_apart: bool
) -> WriteTarget:
    sources = [tensors[name] for name in entry.hf]
    if len({rows.dtype for rows in sources}) > 1:
        kinds = ", ".join(f"{rows.name} is {rows.dtype}" for rows in sources)
        raise DataError(
            f"{entry.megatron} is made of tensors of several dtypes",
            code="TOK48", where=kinds,
            fix="--dtype bfloat16 or --dtype float32" if all(rows.dtype.is_floating_point for rows in sources)
            else "save the model unquantised: model.to(torch.bfloat16).save_pretrained(FOLDER)",
        )  # fmt: skip
    return WriteTarget(places(entry, sizes, bridge.attention, layers_apart), joined(entry, sources, sizes))


def _check_tied(entries: Sequence[Entry], tensors: Mapping[str, TensorRows], sizes: Sizes, folder: Path) -> None:
    """A copy of a tied output matrix is left out, where it is a copy."""
    copy = tensors.get("lm_head.weight")
    embedding = next(entry for entry in entries if entry.kind == "vocabulary").hf[0]
    if sizes.tied and copy is not None and (row := first_difference(copy, tensors[embedding])) is not None:
        raise DataError(
            f"lm_head.weight and {embedding} are tied by the config, but are stored twice and differ in row {row}",
            code="TOK49",
            where=str(folder / "config.json"),
            why="one of the two would be lost",
            fix='set "tie_word_embeddings": false in config.json, or save the model again',
        )


def _hf_rows(
    entries: Sequence[Entry], folder: DistFolder, sizes: Sizes, bridge: Bridge, against: str = ""
) -> list[TensorRows]:
    """Every Hugging Face tensor of a torch_dist folder, after all names and shapes were compared.

    Raises:
        DataError: TOK46.
    """
    met, used, hf_rows = Fit(), set[str](), list[TensorRows]()
    for entry in entries:
        places = [form for form in forms(entry, sizes, bridge.attention) if _is_there(form, folder)]
        if not places:
            _note_missing(met, entry, folder, sizes, bridge)
            continue
        used.update(place.key for form in places for place in form)
        parts = [Whole(folder, place.key, place.index) for place in places[0]]
        whole, expected = _above(entry.megatron, parts), whole_shape(entry, sizes)
        is_, rows = whole.shape, sizes.vocab if entry.kind == "vocabulary" else expected[0]
        if is_[1:] != expected[1:] or (is_[0] != rows and not (entry.kind == "vocabulary" and is_[0] > rows)):
            met.shapes.append((places[0][0].key, is_, (rows, *expected[1:])))
        else:
            hf_rows += parted(entry, whole, sizes)
    shown = {key for key, _, _ in met.shapes}
    others = {key for key in folder.tensors if OPTIMIZER.match(key) or key.startswith((*BESIDE, AHEAD))}
    met.extra = sorted(folder.tensors.keys() - used - shown - others)
    if not met:
        raise misfit(met, folder.path, against)
    return hf_rows


def _is_there(form: Sequence[DistPlace], folder: DistFolder) -> bool:
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


def _above(name: str, parts: Sequence[TensorRows]) -> TensorRows:
    if len(parts) == 1:
        return parts[0]
    moves, place = [], 0
    for number, rows in enumerate(parts):
        moves.append(Move(place, rows.shape[0], number, 0))
        place += rows.shape[0]
    return Moved(name, parts, moves)
