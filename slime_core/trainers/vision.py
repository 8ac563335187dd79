"""The part of a model that sees, in a pass of packs: its tower over all pictures of a pack, once.

    pixels --tower--> features --in the places of placeholders--> embeddings, deeper features --> text model

Pictures and videos pass together. A tower that is sharded or learns is passed for a pack without any too, over a
picture of zeros: every rank passes it once a pack, so that all take part in its collectives, and a tower without
pictures has a gradient of 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slime_core.media.features import Features, embed, features, tower
from slime_core.media.positions import GRIDS, PIXELS, MediaLayout
from slime_core.trainers.media import PackMedia
from slime_core.trainers.optimizer_step import to_device

Arrays = dict[str, torch.Tensor]


class PackPixels:
    """Arrays of a pack's pictures and videos; which features are which rows. No dataclass, which FSDP would cast."""

    __slots__ = ("arrays", "features", "rows")

    def __init__(self, arrays: Arrays, features: torch.Tensor, rows: torch.Tensor) -> None:
        self.arrays = arrays
        self.features = features  # [n]
        self.rows = rows  # [n], ascending

    @classmethod
    def of(cls, media: PackMedia | None, device: torch.device, size: int = 1, number: int = 0) -> PackPixels | None:
        """Read a pack's pictures to the device, for a rank that has every ``size``-th row from ``number`` on."""
        if media is None:
            return None
        arrays = {name: to_device(array, device) for name, array in media.arrays().items()}
        rows = media.rows()
        features = np.flatnonzero(rows % size == number)
        return cls(arrays, to_device(features, device), to_device(rows[features] // size, device))


class VisionTower:
    """Embeddings of packs by a vision model's tower and embedding; a ``frozen`` tower has no gradients."""

    def __init__(self, hf: Any, layout: MediaLayout) -> None:
        self._hf, self.layout = hf, layout
        self.frozen = False
        self.sharded = False

    def freeze(self) -> None:
        """Let the tower and its projector keep their weights."""
        self.frozen = True
        for module in tower(self._hf):
            module.requires_grad_(False)

    def embeddings(self, tokens: torch.Tensor, pixels: PackPixels | None) -> tuple[torch.Tensor, dict[str, Any]]:
        """Embeddings of tokens [T] as [1, T, hidden], and what else the text model takes."""
        no_rows = tokens[:0]
        if pixels is None and self.frozen and not self.sharded:
            return embed(self._hf, tokens, no_rows, None)
        if pixels is None:
            pixels = PackPixels(smallest(self._hf.config, self.layout, tokens.device), no_rows, no_rows)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            values = features(self._hf, "images", pixels.arrays)
        parts = (one.index_select(0, pixels.features) for one in (values.rows, *values.deep))
        embeddings, options = embed(self._hf, tokens, pixels.rows, Features(next(parts), list(parts)))
        if not len(pixels.rows):
            unused = sum((one.sum() for one in (values.rows, *values.deep)), start=embeddings.new_zeros(()))
            embeddings = embeddings + 0 * unused
        return embeddings, options


def tower_of(hf: Any) -> VisionTower | None:
    """Of a vision model; None for one of text alone."""
    layout = MediaLayout.of(hf.config)
    return None if layout is None else VisionTower(hf, layout)


def smallest(config: Any, layout: MediaLayout, device: torch.device) -> Arrays:
    """Arrays of a picture of zeros: one of a single token, or a crop."""
    vision = config.vision_config
    if not layout.merge:
        size = int(vision.image_size)
        pixels = torch.zeros(1, 3, size, size, device=device)
        mask = torch.ones(1, size, size, dtype=torch.long, device=device)
        return {PIXELS["images"]: pixels, "pixel_attention_mask": mask}
    grid = torch.tensor([[1, layout.merge, layout.merge]], device=device)
    width = int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
    return {PIXELS["images"]: torch.zeros(int(grid.prod()), width, device=device), GRIDS["images"]: grid}
