"""Pictures and videos of requests: what stands for them among the tokens, and what a pass needs of them.

    request -> MediaReader -> JobMedia: ids, positions -> RowMedia of a pass: positions, features at some of its rows

A sequence is known by its ids. Placeholders get ids of their own, made of the picture's bytes and their number in it:
sequences share keys and values where tokens and pictures agree, and nowhere else.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.errors import EngineError
from slime_core.media.features import Features, features, item_arrays
from slime_core.media.positions import PIXELS, MediaItem, MediaLayout, following

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import Media

MARK = 1 << 61
"""Ids from here on stand for features."""

FEATURES = 8192
"""Placeholders whose features are kept for requests with the same pictures."""


@dataclass(slots=True, frozen=True)
class HashedItem:
    """An item, its arrays and the digest of their bytes."""

    item: MediaItem
    arrays: Mapping[str, Any]
    digest: bytes


@dataclass(slots=True, eq=False)
class JobMedia:
    """The media of a request of P tokens."""

    items: Sequence[HashedItem]
    starts: Sequence[int]  # where the placeholders of each begin
    ids: NDArray[np.int64]  # P, the tokens, those of placeholders replaced
    axes: NDArray[np.int64] | None  # [3, P], of a model with three axes

    @property
    def shift(self) -> int:
        """Positions of the tokens that follow, less their places in the sequence."""
        return 0 if self.axes is None else following(self.axes) - len(self.ids)

    def positions(self, begin: int, end: int) -> NDArray[np.int64]:
        """[3, end - begin], also of tokens that follow the request's."""
        after = np.arange(max(begin, len(self.ids)), end) + self.shift
        head = np.arange(begin, min(end, len(self.ids)))[None] if self.axes is None else self.axes[:, begin:end]
        return np.concatenate([np.broadcast_to(head, (3, head.shape[1])), np.broadcast_to(after, (3, len(after)))], 1)

    def within(self, begin: int, end: int) -> Iterator[tuple[HashedItem, int, int, int]]:
        """Items with placeholders at [begin, end): the item, its features [first, last) there, their first place."""
        for start, hashed in sorted(zip(self.starts, self.items, strict=True), key=lambda pair: pair[0]):
            first, last = max(begin, start), min(end, start + hashed.item.tokens)
            if first < last:
                yield hashed, first - start, last - start, first


@dataclass(slots=True)
class RowMedia:
    """What a pass of N rows has of media: positions, [N] or [3, N], and features at the rows ``at`` [n]."""

    positions: torch.Tensor | None = None  # None where every row's is its place in the sequence
    at: torch.Tensor | None = None
    features: Features | None = None

    def position_ids(self, places: torch.Tensor) -> torch.Tensor:
        """Positions as a model takes them, [1, N] or [3, 1, N]; ``places`` [N] are those in the sequences."""
        positions = places if self.positions is None else self.positions
        return positions[None] if positions.ndim == 1 else positions[:, None]


class MediaReader:
    """Reads the media of requests for one model."""

    def __init__(self, layout: MediaLayout | None, kind: str) -> None:
        self.layout, self._kind = layout, kind
        self._digests: dict[int, tuple[Any, list[bytes]]] = {}  # of items, by id of the pixels, which a group shares

    def read(self, tokens: NDArray[np.int64], media: Media | None, where: str) -> JobMedia | None:
        """The media of ``tokens``; None where there are none.

        Raises:
            EngineError: ENG07 media that this model does not take, or without arrays.
            DataError: DAT38 media that do not match the placeholders.
        """
        if media is None or not (media.arrays or media.images or media.videos or media.audios):
            return None
        if self.layout is None:
            raise _refused(f"{self._kind} takes no pictures", where, "name a model that does")
        items = self._items(media.arrays)
        if not items:
            raise _refused(
                "pictures came without the arrays of a processor", where, "encode with slime_core.media.processor"
            )
        parts = [hashed.item for hashed in items]
        starts = self.layout.starts(tokens, parts, where)
        ids = tokens.copy()
        for start, hashed in zip(starts, items, strict=True):
            ids[start : start + hashed.item.tokens] = _ids(hashed)
        if ids[-1] >= MARK:
            raise _refused("the tokens end with a placeholder", where, "end with text, such as the end of the picture")
        axes = self.layout.positions(tokens, parts, starts) if self.layout.three_axes else None
        return JobMedia(items, starts, ids, axes)

    def _items(self, arrays: Mapping[str, NDArray[Any]]) -> list[HashedItem]:
        assert self.layout is not None
        hashed: list[HashedItem] = []
        for kind, pixels in ((kind, arrays.get(PIXELS[kind])) for kind in self.layout.placeholders):
            if pixels is None:
                continue
            items = [item for item in self.layout.items(arrays) if item.kind == kind]
            parts = [_arrays_of(item, arrays) for item in items]
            key = id(pixels)
            if key not in self._digests:
                callback = partial(self._forget, key)
                self._digests[key] = weakref.ref(pixels, callback), [_digest(part) for part in parts]
            hashed += map(HashedItem, items, parts, self._digests[key][1])
        return hashed

    def _forget(self, key: int, _: object) -> None:
        self._digests.pop(key, None)

    def plain(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids of ``ids``, any placeholder for those that stand for features."""
        return ids if self.layout is None else np.where(ids >= MARK, self.layout.ids[0], ids)


class Sight:
    """Runs the tower of a model: every item alone, so that its features depend on nothing beside it.

    Features of the last FEATURES placeholders are kept until other weights come.
    """

    def __init__(self, model: Any, reader: MediaReader, device: str) -> None:
        self._model, self._reader, self._device = model, reader, device
        self._features: OrderedDict[bytes, Features] = OrderedDict()

    @property
    def three_axes(self) -> bool:
        """Whether the model gives tokens positions on three axes."""
        return self._reader.layout is not None and self._reader.layout.three_axes

    def forget(self) -> None:
        """Other weights."""
        self._features.clear()

    def rows(self, spans: Sequence[tuple[JobMedia | None, int, int]], count: int) -> RowMedia:
        """What a pass of ``count`` rows has of media: places [begin, end) of sequences one after another, padding."""
        axes = np.zeros((3, count), dtype=np.int64)
        places: list[NDArray[np.int64]] = []
        parts: list[Features] = []
        row = 0
        for media, begin, end in spans:
            axes[:, row : row + end - begin] = np.arange(begin, end) if media is None else media.positions(begin, end)
            for hashed, first, last, place in media.within(begin, end) if media else ():
                places.append(row + place - begin + np.arange(last - first))
                parts.append(self._of(hashed).take(first, last))
            row += end - begin
        positions = torch.from_numpy(axes).to(self._device) if self.three_axes else None
        if not parts:
            return RowMedia(positions)
        return RowMedia(positions, torch.from_numpy(np.concatenate(places)).to(self._device), Features.joined(parts))

    def _of(self, hashed: HashedItem) -> Features:
        if hashed.digest in self._features:
            self._features.move_to_end(hashed.digest)
        else:
            tensors = {name: torch.from_numpy(array).to(self._device) for name, array in hashed.arrays.items()}
            self._features[hashed.digest] = features(self._model, hashed.item.kind, tensors)
            while len(self._features) > 1 and sum(len(one.rows) for one in self._features.values()) > FEATURES:
                self._features.popitem(last=False)
        return self._features[hashed.digest]


def _arrays_of(item: MediaItem, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(array) for name, array in item_arrays(arrays, item).items()}


def _digest(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _ids(hashed: HashedItem) -> NDArray[np.int64]:
    first = int.from_bytes(hashed.digest, "little") % MARK
    return MARK + (first + np.arange(hashed.item.tokens)) % MARK


def _refused(what: str, where: str, fix: str) -> EngineError:
    return EngineError(what, code="ENG07", where=where, fix=fix)
