"""Where pictures and videos lie in a sequence, and the positions of its tokens for models that have three axes.

    arrays of a processor -> items -> the run of placeholders of each -> positions [3, T]

An item is what has one run of placeholders: a picture, a video, a frame (Qwen3-VL), a crop of a picture (SmolVLM).
A run is given to the next item of its kind when it is as long as that item; any other run is text, such as a
placeholder that a model drew: it keeps its own embedding and takes one position a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import DataError

Kind = Literal["images", "videos"]
Arrays = Mapping[str, NDArray[Any]]

PIXELS: dict[Kind, str] = {"images": "pixel_values", "videos": "pixel_values_videos"}
GRIDS: dict[Kind, str] = {"images": "image_grid_thw", "videos": "video_grid_thw"}
SECONDS = "second_per_grid_ts"
"""Of every video: seconds between two rows of its grid in time."""

FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "idefics3"})
"""Model types whose pictures this room knows."""

SINGLE = {"qwen3_vl", "qwen3_vl_moe"}
"""Model types whose videos are frames with a run of placeholders each, text between them."""


@dataclass(slots=True, frozen=True)
class MediaItem:
    """One run of placeholders: ``tokens`` of them, from rows [begin, end) of the kind's pixels."""

    kind: Kind
    tokens: int
    begin: int
    end: int
    grid: tuple[int, int, int] | None = None  # patches in time, height and width; None for a crop
    interval: int = 1  # positions between two rows in time


@dataclass(slots=True, frozen=True)
class MediaLayout:
    """What a model's config says about its placeholders."""

    placeholders: dict[Kind, int]  # token ids
    merge: int  # patches a side that become one token; 0 for a model without grids
    crop_tokens: int  # tokens of a crop, for a model without grids
    seconds: int  # positions a second of video, 0 where videos are frames
    three_axes: bool

    @classmethod
    def of(cls, config: Any) -> MediaLayout | None:
        """The layout of a transformers config; None for a model of text alone, or one of no family of FAMILIES."""
        if config.model_type not in FAMILIES:
            return None
        vision = config.vision_config
        placeholders: dict[Kind, int] = {"images": int(config.image_token_id)}
        if getattr(config, "video_token_id", None) is not None:
            placeholders["videos"] = int(config.video_token_id)
        merge = int(getattr(vision, "spatial_merge_size", 0) or 0)
        crop = 0 if merge else (vision.image_size // vision.patch_size // config.scale_factor) ** 2
        seconds = 0 if config.model_type in SINGLE else int(getattr(vision, "tokens_per_second", 0) or 1)
        rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
        return cls(placeholders, merge, int(crop), seconds, "mrope_section" in rope)

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of placeholders, which no response is trained on."""
        return tuple(self.placeholders.values())

    def items(self, arrays: Arrays) -> list[MediaItem]:
        """The items of a processor's arrays, pictures before videos, each kind in its order."""
        items: list[MediaItem] = []
        for kind in self.placeholders:
            if not self.merge:
                items += [MediaItem(kind, self.crop_tokens, i, i + 1) for i in range(_crops(arrays.get(PIXELS[kind])))]
                continue
            grids, seconds = arrays.get(GRIDS[kind]), arrays.get(SECONDS)
            begin = 0
            for number, grid in enumerate(() if grids is None else np.asarray(grids).tolist()):
                interval = 1
                if kind == "videos" and self.seconds:
                    interval = self.seconds * int(1 if seconds is None else seconds[number])
                for part in self._parts(kind, grid):
                    end = begin + int(np.prod(part))
                    items.append(MediaItem(kind, (end - begin) // self.merge**2, begin, end, part, interval))
                    begin = end
        return items

    def count(self, kind: Kind, arrays: Mapping[str, Any]) -> int:
        """Pictures or videos of a processor's arrays; crops, for a model without grids."""
        if not self.merge:
            return _crops(arrays.get(PIXELS[kind]))
        return int(arrays[GRIDS[kind]].shape[0]) if GRIDS[kind] in arrays else 0

    def _parts(self, kind: Kind, grid: Sequence[int]) -> list[tuple[int, int, int]]:
        time, height, width = grid
        single = kind == "videos" and not self.seconds
        return [(1, height, width)] * time if single else [(time, height, width)]

    def starts(self, tokens: NDArray[Any], items: Sequence[MediaItem], where: str = "") -> list[int]:
        """Where in ``tokens`` [T] the run of each item begins.

        Raises:
            DataError: DAT38 an item without a run of its length.
        """
        starts = [-1] * len(items)
        for kind, placeholder in self.placeholders.items():
            numbers = [number for number, item in enumerate(items) if item.kind == kind]
            places = runs(np.asarray(tokens) == placeholder)
            remaining = iter(numbers)
            number = next(remaining, None)
            for begin, end in places:
                if number is not None and items[number].tokens == end - begin:
                    starts[number] = begin
                    number = next(remaining, None)
            if number is not None:
                raise _mismatch(kind, [items[n].tokens for n in numbers], [b - a for a, b in places], where)
        return starts

    def positions(
        self, tokens: NDArray[Any], items: Sequence[MediaItem], starts: Sequence[int] | None = None
    ) -> NDArray[np.int64]:
        """Positions [3, T] in time, height and width: text counts on all axes, from one past what came before it.

        The first token after the sequence has :func:`following` of them on all axes.
        """
        starts = self.starts(tokens, items) if starts is None else starts
        out = np.empty((3, len(tokens)), dtype=np.int64)
        at = position = 0
        for begin, item in sorted(zip(starts, items, strict=True), key=lambda pair: pair[0]):
            out[:, at:begin] = position + np.arange(begin - at)
            position += begin - at
            assert item.grid is not None
            time, height, width = item.grid[0], item.grid[1] // self.merge, item.grid[2] // self.merge
            axes = np.meshgrid(np.arange(time) * item.interval, np.arange(height), np.arange(width), indexing="ij")
            out[:, begin : begin + item.tokens] = position + np.stack(axes).reshape(3, -1)
            at, position = begin + item.tokens, position + max(height, width)
        out[:, at:] = position + np.arange(len(tokens) - at)
        return out


def following(positions: NDArray[np.int64]) -> int:
    """Position, on all axes, of the token after a sequence with ``positions`` [3, T] that ends with text."""
    return int(positions[0, -1]) + 1


def _crops(pixels: NDArray[Any] | None) -> int:
    """Crops in [crops, channels, height, width], or in that of a batch of one."""
    return 0 if pixels is None else int(pixels.shape[-4])


def runs(where: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs of True in [T], as (begin, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], where.astype(np.int8), [0]]))).tolist()
    return [(begin, end) for number, (begin, end) in enumerate(pairwise(edges)) if number % 2 == 0]


def _mismatch(kind: str, counts: Sequence[int], runs: Sequence[int], where: str) -> DataError:
    return DataError(
        f"{len(counts)} {kind} do not match the placeholders among the tokens",
        code="DAT38",
        where=where,
        why=f"the {kind} take {list(counts)} tokens, the tokens have runs of {list(runs)} placeholders",
        fix="make tokens and arrays with the model folder's processor, from the same text and the same files",
    )
