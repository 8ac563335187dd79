"""Batches whose samples have pictures of odd sizes, and a video where a family has them, drawn from a seed, and transformers' own forward of one sample."""

import numpy as np
import torch

from slime_core.trainers.batch import make_batch
from slime_core.types import Group, Prompt, Sample, Status

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "smolvlm"]
PATCH_WIDTH = {"qwen2_5_vl": 3 * 2 * 14 * 14, "qwen3_vl": 3 * 2 * 16 * 16}
CROP_TOKENS = 4  # of smolvlm


def arrays_of(family, draw, sizes):
    """What a processor would make of pictures of ``sizes``, (height, width) in tokens; smolvlm makes a crop of each."""
    if family == "smolvlm":
        pixels = draw.normal(size=(1, len(sizes), 3, 32, 32)).astype(np.float32)
        return {"pixel_values": pixels, "pixel_attention_mask": np.ones((1, len(sizes), 32, 32), dtype=np.int64)}
    grids = np.array([(1, 2 * height, 2 * width) for height, width in sizes], dtype=np.int64)
    pixels = draw.normal(size=(int(grids.prod(1).sum()), PATCH_WIDTH[family])).astype(np.float32)
    return {"pixel_values": pixels, "image_grid_thw": grids}


def video_of(family, draw, size):
    """Arrays of a video of one frame in time; a crop for smolvlm, whose videos are pictures."""
    arrays = arrays_of(family, draw, [size])
    if family == "smolvlm":
        return arrays
    return {"pixel_values_videos": arrays["pixel_values"], "video_grid_thw": arrays["image_grid_thw"]}


def joined(arrays):
    """Arrays of several, end to end."""
    axis = 1 if "pixel_attention_mask" in arrays[0] else 0
    names = {name: None for one in arrays for name in one}
    return {name: np.concatenate([one[name] for one in arrays if name in one], axis) for name in names}


def run_of(family, config, size, video=False):
    """The placeholders of a picture or a video."""
    if family == "smolvlm":
        return [config.image_token_id] * CROP_TOKENS
    return [config.video_token_id if video else config.image_token_id] * (size[0] * size[1])


def picture_groups(family, config, seed=0):
    """Groups of three: two pictures, the same with other pixels, words alone, a video and a picture from a tool."""
    draw = np.random.default_rng(seed)
    groups = []

    def words(count):
        return draw.integers(3, 60, count).tolist()

    def group(tokens, arrays, tool=None):
        number = len(groups)
        prompt = Prompt(id=f"main/{number}", position=number, tokens=tokens)
        samples = []
        for k in range(3):
            s = Sample(id=f"{prompt.id}-{k}", tokens=list(tokens), rollout_id=3 * number + k, group_index=number)
            count = int(draw.integers(2, 9))
            s.append_response(words(count), (-draw.random(count) * 4).tolist(), version=0)
            s.multimodal_train_inputs = arrays
            if tool is not None and k:
                s.append_response([*words(1), *run_of(family, config, tool), *words(1)], mask=0)
                s.append_response(words(k), [-1.0] * k, version=0)
                more = arrays_of(family, draw, [tool])
                s.multimodal_train_inputs = joined([arrays, more]) if arrays else more
            s.status, s.reward = Status.COMPLETED, float(draw.integers(0, 3))
            samples.append(s)
        groups.append(
            Group(prompt=prompt, samples=samples, rollouts={s.rollout_id: [i] for i, s in enumerate(samples)})
        )

    sizes = [(1, 3), (2, 1)]
    runs = [run_of(family, config, size) for size in sizes]
    tokens = [*words(2), *runs[0], *words(1), *runs[1], *words(3)]
    group(tokens, arrays_of(family, draw, sizes))
    group(tokens, arrays_of(family, draw, sizes))
    group(words(5), None)
    group([*words(1), *run_of(family, config, (3, 2), video=True), *words(1)], video_of(family, draw, (3, 2)), (1, 2))
    return groups


def picture_batch(family, config, seed=0, groups=picture_groups):
    """The groups' Batch with an ``advantages`` column."""
    batch = make_batch(0, "main", groups(family, config, seed))
    draw = np.random.default_rng(99)
    batch.columns["advantages"] = draw.normal(size=len(batch.loss_mask)).astype(np.float32)
    return batch


def video_groups(family, config, seed=7):
    """Groups of one: a video of four frames behind a picture, the same video alone and faster, words."""
    draw, tile, groups = np.random.default_rng(seed), (1, 2), []
    frames = [[config.video_token_id] * 2] * 2 if family == "qwen3_vl" else [[config.video_token_id] * 4]
    run = [token for one in frames for token in (9, *one)]  # of qwen3_vl each row in time has a run of its own
    picture = arrays_of(family, draw, [tile])
    grids = np.array([[2, 2, 4]], dtype=np.int64)
    pixels = draw.normal(size=(int(grids.prod()), PATCH_WIDTH[family])).astype(np.float32)
    video = {"pixel_values_videos": pixels, "video_grid_thw": grids}
    for number, seconds in enumerate((2.0, 1.0, None)):
        tokens, arrays = draw.integers(3, 60, 3).tolist(), None
        if seconds:
            arrays = video if family == "qwen3_vl" else video | {"second_per_grid_ts": np.array([seconds])}
            tokens += [*run, *draw.integers(3, 60, 2).tolist()]
        if not number:
            tokens, arrays = [5, *run_of(family, config, tile), *tokens], arrays | picture
        s = Sample(id=f"main/{number}-0", tokens=list(tokens), rollout_id=number, group_index=number)
        s.append_response(draw.integers(3, 60, 5).tolist(), (-draw.random(5) * 4).tolist(), version=0)
        s.multimodal_train_inputs, s.status, s.reward = arrays, Status.COMPLETED, float(number)
        prompt = Prompt(id=f"main/{number}", position=number, tokens=tokens)
        groups.append(Group(prompt=prompt, samples=[s], rollouts={number: [0]}))
    return groups


def forward_of(model, batch, sample):
    """Logits [T, vocabulary] of a sample by transformers' own forward, which finds its positions itself."""
    tokens = torch.from_numpy(batch.tokens[batch.offsets[sample] : batch.offsets[sample + 1]].astype(np.int64))[None]
    arrays = (batch.multimodal[sample] if batch.multimodal is not None else None) or {}
    arguments = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if "image_grid_thw" in arguments or "video_grid_thw" in arguments:
        images, videos = (tokens == getattr(model.config, f"{kind}_token_id") for kind in ("image", "video"))
        arguments["mm_token_type_ids"] = images.int() + 2 * videos.int()
    return model(input_ids=tokens, use_cache=False, **arguments).logits[0]
