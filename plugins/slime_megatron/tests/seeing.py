"""Micro-batches with pictures of odd sizes and a video, for models that see; and what transformers makes of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from megatron_ranks import micro_batch

TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
SEES = ("qwen2_5_vl", "qwen3_vl")


def seeing_packs(config):
    """Two micro-batches: one, two and no pictures, and a video; and a prompt with a picture that two continue."""
    from slime_core.media.positions import MediaLayout, following
    from slime_core.trainers.media import PackMedia, PlacedItem

    layout, draw = MediaLayout.of(config), np.random.default_rng(5)
    first = micro_batch([17, 31, 5, 16], [3, 6, 2, 4], seed=1, vocab=90)
    second = micro_batch([20, 14, 3, 5], [11, 0, 3, 5], seed=2, vocab=90)
    grids = {
        (0, 0): {"images": [(1, 4, 6)]},
        (0, 1): {"images": [(1, 2, 6), (1, 6, 6)]},
        (0, 3): {"videos": [(2, 2, 4)]},
        (1, 1): {"images": [(1, 6, 4), (1, 2, 2)]},
    }
    packs = []
    for number, micro in enumerate((first, second)):
        tokens, media, positions, placed = micro.tokens.copy(), [], [], []
        parts = np.split(tokens, micro.cu_seqlens[1:-1])
        for segment, part in enumerate(parts):
            media.append(_media(config, grids.get((number, segment)), part, layout, draw))
            items = layout.items(media[-1] or {})
            starts = layout.starts(part, items)
            positions.append(layout.positions(part, items, starts))
            begin = int(micro.cu_seqlens[segment])
            placed += [PlacedItem(item, begin + at, media[-1]) for at, item in zip(starts, items, strict=True)]
        pictures = PackMedia(sorted(placed, key=lambda one: one.row), Path())
        micro = replace(micro, tokens=tokens, media=pictures, position_ids=np.concatenate(positions, axis=1))
        packs.append(replace(micro, target=tokens[micro.predict + 1]))
    predict = packs[1].predict.copy()
    predict[11] = 33  # the first token after the prompt, as of the sequence before
    positions = packs[1].position_ids.copy()
    positions[:, 34:] += following(positions[:, 20:34])
    prefix = np.array([-1, -1, 1, 1], np.int32)
    packs[1] = replace(packs[1], prefix=prefix, position_ids=positions, predict=predict)
    return packs


def _media(config, grids, part, layout, draw):
    """Arrays of a segment, whose placeholders are put behind its first token, text between the runs."""
    if grids is None:
        return None
    tower, arrays, at = config.vision_config, {}, 1
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    for kind, prefix, name in (("images", "pixel_values", "image"), ("videos", "pixel_values_videos", "video")):
        if kind in grids:
            grid = np.array(grids[kind])
            pixels = draw.normal(size=(int(grid.prod(axis=1).sum()), width)).astype(np.float32)
            arrays |= {prefix: pixels, f"{name}_grid_thw": grid}
    for item in layout.items(arrays):
        part[at : at + item.tokens] = layout.placeholders[item.kind]
        at += item.tokens + 1
    return arrays


def arrays_of(micro, segment):
    """The arrays of a segment's sample; none where it has no pictures."""
    begin, end = micro.cu_seqlens[segment : segment + 2]
    return next((one.arrays for one in micro.media.items if begin <= one.row < end), None) if micro.media else None


def inputs(tokens, media):
    """What transformers' forward takes."""
    kinds = np.where(tokens == 90, 1, np.where(tokens == 91, 2, 0))
    arrays = {name: torch.from_numpy(array) for name, array in (media or {}).items()}
    if arrays:
        arrays["mm_token_type_ids"] = torch.from_numpy(kinds)[None]
    return {"input_ids": torch.from_numpy(tokens)[None], **arrays}
