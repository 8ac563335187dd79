"""Pictures and videos of a batch's samples: which samples share them, where they lie in a pack, their arrays.

    Batch.multimodal --samples with the same--> shared prompts --items, positions--> MicroBatch.media --read--> arrays

A sample's arrays lie in segment files of the run, or in memory. Grids are read when packs are made, pixels when a pass
needs them, each by the rank that passes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import TrainerError
from slime_core.ledger.segments import read_array
from slime_core.media.positions import GRIDS, PIXELS, SECONDS, MediaItem, MediaLayout
from slime_core.types import ArrayRef, Batch

Arrays = Mapping[str, ArrayRef | NDArray[Any]]
MASK = "pixel_attention_mask"
SMALL = (*GRIDS.values(), SECONDS)  # arrays that say where pictures lie


@dataclass(slots=True, frozen=True)
class PlacedItem:
    """An item whose placeholders are the pack's rows from ``row`` on; ``arrays`` are all of its sample's."""

    item: MediaItem
    row: int
    arrays: Arrays


@dataclass(slots=True, frozen=True)
class PackMedia:
    """Items of a pack in the order of its rows, and the folder of arrays that are not in memory."""

    items: list[PlacedItem]
    folder: Path

    def rows(self) -> NDArray[np.int64]:
        """The pack's rows of all placeholders, ascending."""
        return np.concatenate([placed.row + np.arange(placed.item.tokens) for placed in self.items])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of all items in order, pictures and videos end to end, for one pass of the tower.

        They have the names of pictures': a tower makes no difference between the kinds.

        Raises:
            StorageError: as `ledger.segments.read_array`.
        """
        first = self.items[0]
        arrays = {PIXELS["images"]: self._joined([PIXELS[placed.item.kind] for placed in self.items])}
        if first.item.grid is not None:
            arrays[GRIDS["images"]] = np.array([placed.item.grid for placed in self.items], dtype=np.int64)
        elif MASK in first.arrays:
            arrays[MASK] = self._joined([MASK] * len(self.items))
        return arrays

    def _joined(self, names: list[str]) -> NDArray[Any]:
        """Rows of each item of its array: patches [n, width], crops [n, 3, h, w], masks [n, h, w]; read once."""
        by_storage: dict[int, NDArray[Any]] = {}
        parts = []
        for placed, name in zip(self.items, names, strict=True):
            stored, item = placed.arrays[name], placed.item
            if id(stored) not in by_storage:
                by_storage[id(stored)] = _read(self.folder, stored)
            inner = 1 if item.grid is not None else 2 if name == MASK else 3
            array = by_storage[id(stored)]
            parts.append(array.reshape(-1, *array.shape[-inner:])[item.begin : item.end])
        return np.concatenate(parts)


@dataclass(slots=True, frozen=True)
class BatchMedia:
    """Where the pictures of batches lie, for a model with this ``layout``; ``folder`` is the run's of arrays."""

    layout: MediaLayout
    folder: Path

    @classmethod
    def of(cls, config: Any, folder: Path) -> BatchMedia | None:
        """Of a transformers config; None for a model of text alone."""
        layout = MediaLayout.of(config)
        return None if layout is None else cls(layout, folder)

    def places(self, batch: Batch, sample: int) -> tuple[list[tuple[int, MediaItem]], NDArray[np.int64] | None]:
        """Items of a sample, each with the place of its first token, and positions [3, T] for models of three axes.

        Raises:
            DataError: DAT38, pictures that do not match the placeholders.
        """
        arrays = batch.multimodal[sample] if batch.multimodal is not None else None
        if not arrays:
            return [], None
        tokens = batch.tokens[batch.offsets[sample] : batch.offsets[sample + 1]]
        stored: Any = {n: _read(self.folder, a) if n in SMALL else a for n, a in arrays.items()}
        items = self.layout.items(stored)
        starts = self.layout.starts(tokens, items, where=f"sample {batch.sample_ids[sample]}")
        positions = self.layout.positions(tokens, items, starts) if self.layout.three_axes else None
        return sorted(zip(starts, items, strict=True), key=lambda pair: pair[0]), positions

    def of_sample(self, batch: Batch, sample: int) -> tuple[PackMedia, NDArray[np.int64] | None]:
        """The pictures of a sample alone, and its positions as in :meth:`places`."""
        places, positions = self.places(batch, sample)
        arrays = batch.multimodal[sample] if batch.multimodal is not None else None
        return PackMedia([PlacedItem(item, row, arrays or {}) for row, item in places], self.folder), positions


def check_media(batch: Batch, media: BatchMedia | None) -> None:
    """Refuse pictures that a model does not see, or that do not match the placeholders of their sample.

    Raises:
        TrainerError: TRN115, the model sees none.
        DataError: DAT38.
    """
    for sample, arrays in enumerate(batch.multimodal or ()):
        if arrays and media is None:
            raise TrainerError(
                f"sample {batch.sample_ids[sample]} has pictures ({', '.join(arrays)}), and the model sees none",
                code="TRN115",
                where=f"sample {batch.sample_ids[sample]}",
                fix="name a model of pictures and text, or leave data.multimodal_keys empty",
            )
        if arrays and media is not None:
            media.places(batch, sample)


def media_keys(batch: Batch) -> list[tuple[Any, ...]]:
    """Of each sample what its arrays are: samples with equal keys have the same pictures."""
    if batch.multimodal is None:
        return [()] * len(batch)
    digests: dict[int, bytes] = {}

    def key(array: ArrayRef | NDArray[Any]) -> Any:
        if isinstance(array, ArrayRef):
            return array.segment, array.offset
        if id(array) not in digests:
            digests[id(array)] = hashlib.blake2b(np.ascontiguousarray(array).data).digest()
        return digests[id(array)]

    return [tuple((n, key(arrays[n])) for n in sorted(arrays)) if arrays else () for arrays in batch.multimodal]


def _read(folder: Path, array: ArrayRef | NDArray[Any]) -> NDArray[Any]:
    return read_array(folder, array) if isinstance(array, ArrayRef) else array
