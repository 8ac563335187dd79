"""The part of a model that sees, in a pass of packs: its tower over all pictures of a pack, once.

    pixels --tower--> features --in the places of placeholders--> embeddings, deeper features --> text model

A tower that is sharded or learns is passed for a pack without pictures too, over one of zeros, so that every rank
takes part in its collectives and a tower without pictures has a gradient of 0.
"""

from __future__ import annotations

from typing import Any

import torch

from slime_core.media.features import Features, embed, features, tower
from slime_core.media.positions import GRIDS, PIXELS, Kind, MediaLayout
from slime_core.trainers.media import PackMedia
from slime_core.trainers.optimizer_step import to_device


class PackPixels:
    """Arrays of a pack's pictures and its rows of their placeholders. No dataclass, which FSDP would cast."""

    __slots__ = ("kinds",)

    def __init__(self, kinds: dict[Kind, tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        self.kinds = kinds

    @classmethod
    def of(cls, media: PackMedia | None, device: torch.device) -> PackPixels | None:
        """Read what a pack's pictures are, to the device."""
        if media is None:
            return None
        arrays = {kind: {n: to_device(a, device) for n, a in media.arrays(kind).items()} for kind in media.kinds()}
        return cls({kind: (arrays[kind], to_device(media.rows(kind), device)) for kind in arrays})


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
        if pixels is None:
            if self.frozen and not self.sharded:
                return embed(self._hf, tokens, tokens[:0], None)
            values = self._features("images", smallest(self._hf.config, self.layout, tokens.device))
            embeddings, options = embed(self._hf, tokens, tokens[:0], None)
            unused = sum((one.sum() for one in (values.rows, *values.deep)), start=embeddings.new_zeros(()))
            return embeddings + 0 * unused, options
        parts = [self._features(kind, arrays) for kind, (arrays, _) in pixels.kinds.items()]
        rows = torch.cat([rows for _, rows in pixels.kinds.values()])
        values, order = Features.joined(parts), rows.argsort()
        if len(parts) > 1:
            values = Features(values.rows[order], [one[order] for one in values.deep])
        return embed(self._hf, tokens, rows[order], values)

    def _features(self, kind: Kind, arrays: dict[str, torch.Tensor]) -> Features:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return features(self._hf, kind, arrays)


def tower_of(hf: Any) -> VisionTower | None:
    """Of a vision model; None for one of text alone."""
    layout = MediaLayout.of(hf.config)
    return None if layout is None else VisionTower(hf, layout)


def smallest(config: Any, layout: MediaLayout, device: torch.device) -> dict[str, torch.Tensor]:
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
