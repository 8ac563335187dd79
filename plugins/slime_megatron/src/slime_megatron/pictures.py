"""Pictures and videos of a micro-batch: which features a rank needs, where they go, and how they reach later layers.

    pixels of the pictures that a rank's rows stand for --vision tower--> features --> rows of placeholders
                                                          deeper features --> the same rows, behind the first layers

A tower is on the ranks of the first pipeline stage, whole. One that is frozen passes on each rank the pictures of its
own rows alone; of one that learns, tensor-parallel ranks have the same gradient, so they pass the same pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.media.positions import GRIDS, PIXELS, MediaLayout
from slime_core.trainers.optimizer_step import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.trainers.media import PackMedia, PlacedItem
    from slime_core.types import MicroBatch


@dataclass(slots=True, frozen=True)
class Vision:
    """What a config says of pictures."""

    layout: MediaLayout
    patch: int  # numbers of a patch
    levels: int  # layers behind which deeper features are added
    frozen: bool

    @classmethod
    def of(cls, config: Any, *, frozen: bool) -> Vision:
        """Of a model folder's config."""
        tower, layout = config.vision_config, MediaLayout.of(config)
        assert layout is not None
        patch = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        return cls(layout, patch, len(getattr(tower, "deepstack_visual_indexes", ())), frozen)


@dataclass(slots=True)
class Pictures:
    """What a rank puts in the place of the placeholders among its rows.

    ``rows`` [n] are its placeholders, ``features`` [n] which feature of its pictures each stands for. ``load`` gives
    pixels [patches, numbers] and grids [pictures, 3] of these; None where no tower is passed.
    """

    rows: torch.Tensor
    features: torch.Tensor
    load: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    levels: dict[int, torch.Tensor] = field(default_factory=dict)  # [n, h] of each level, once a chunk has them


def make_pictures(
    micro: MicroBatch,
    vision: Vision,
    places: NDArray[np.int64],
    shared: NDArray[np.int64],
    device: torch.device,
    *,
    has_tower: bool,
) -> Pictures:
    """A rank's pictures.

    Args:
        places: rows of the pack that the rank has, in their order there; those behind the tokens are filling
        shared: rows whose pictures it passes where the tower learns
    """
    items: list[PlacedItem] = micro.media.items if micro.media is not None else []
    of_row = np.full(max(places.max(initial=-1), shared.max(initial=-1), len(micro.tokens)) + 1, -1)
    for number, placed in enumerate(items):
        of_row[placed.row : placed.row + placed.item.tokens] = number
    needed = of_row[places if vision.frozen else shared]
    chosen = np.unique(needed[needed >= 0]).tolist()
    before, count = np.zeros(len(items), np.int64), 0
    for number in chosen:
        before[number] = count - items[number].row
        count += items[number].item.tokens
    rows = np.flatnonzero(of_row[places] >= 0)
    features = before[of_row[places[rows]]] + places[rows]
    pictures = Pictures(to_device(rows, device), to_device(features, device))
    if has_tower and chosen:
        pictures.load = partial(_inputs, replace(micro.media, items=[items[number] for number in chosen]), device)
    elif has_tower and not vision.frozen and torch.is_grad_enabled():  # ranks wait for each other's gradients of it
        pictures.load = partial(_blank, vision, device)
    return pictures


def _inputs(media: PackMedia, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels and grids of all items."""
    arrays = media.arrays()
    return to_device(arrays[PIXELS["images"]], device), to_device(arrays[GRIDS["images"]], device)


def _blank(vision: Vision, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One picture of a single feature."""
    merge = vision.layout.merge
    pixels = torch.zeros(merge**2, vision.patch, device=device)
    return pixels, torch.tensor([[1, merge, merge]], device=device)


class _Levels(torch.autograd.Function):
    """Hidden states as they are; features get the gradients of the leaves that layers read, which are dropped then.

    Layers read leaves, not features: a layer whose pass is made again has a backward pass of its own, which must end
    there. All of them are over when the gradient comes to the hidden states before the first.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, pictures: Pictures, first: int, *features: torch.Tensor) -> Any:
        learned = [feature.requires_grad for feature in features]
        ctx.leaves = [one.detach().requires_grad_(learns) for one, learns in zip(features, learned, strict=True)]
        ctx.levels, ctx.first = pictures.levels, first
        ctx.levels.update(enumerate(ctx.leaves, first))
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        leaves, ctx.leaves = ctx.leaves, ()
        for level in range(ctx.first, ctx.first + len(leaves)):
            ctx.levels.pop(level, None)
        return (grads[0], None, None, *(leaf.grad for leaf in leaves))


def keep_levels(
    hidden: torch.Tensor, pictures: Pictures, features: Sequence[torch.Tensor], first: int
) -> torch.Tensor:
    """Give layers from ``first`` on their features [n, h], whose gradients come with those of the hidden states."""
    if not features:
        return hidden
    if torch.is_grad_enabled():
        return _Levels.apply(hidden, pictures, first, *features)  # type: ignore[no-any-return]
    pictures.levels.update(enumerate(features, first))
    return hidden


def add_level(level: int, layer: Any, args: Any, kwargs: Any, output: tuple[torch.Tensor, Any]) -> Any:
    """What a layer gives, its hidden states [T, 1, h] with the features of its level; a hook of the layer."""
    hidden, context = output
    pictures = kwargs["packed_seq_params"].pictures
    features = pictures.levels[level].to(hidden.dtype)
    return hidden.index_add(0, pictures.rows, features[:, None]), context


def joined(hidden: torch.Tensor, pictures: Pictures, levels: range) -> torch.Tensor:
    """Hidden states for the next stage, and behind them the features of levels that its layers add."""
    return torch.cat([hidden, *(pictures.levels[level][:, None].to(hidden.dtype) for level in levels)])


def parted(received: torch.Tensor, pictures: Pictures, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states and features of ``count`` levels, of what the stage before joined."""
    rows = len(pictures.rows)
    hidden, *levels = received.split([len(received) - count * rows, *[rows] * count])
    return hidden, [level[:, 0] for level in levels]
