"""Placeholders, positions and features, against transformers' own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from slime_core.errors import DataError
from slime_core.media.features import embed, features, item_arrays, text_model
from slime_core.media.positions import MediaLayout, following
from slime_core.testing.vision import tiny_vision_model
from slime_core.weights.folder import ModelFolder

pytestmark = pytest.mark.unit

WORDS = {"images": 21, "videos": 22}
"""A text token beside each kind of placeholder."""


def _model(path: Path, family: Any) -> Any:
    folder = tiny_vision_model(path, family, weights=False)
    return ModelFolder.open(folder, init_weights="random").build_model(seed=0)


def _grids(merge: int) -> dict[str, NDArray[Any]]:
    """Two pictures and a video of three rows in time, none of them square."""
    return {
        "image_grid_thw": np.array([[1, 2 * merge, 3 * merge], [1, merge, merge]]),
        "video_grid_thw": np.array([[3, 3 * merge, 2 * merge]]),
        "second_per_grid_ts": np.array([2.0]),
    }


def _sequence(layout: MediaLayout, arrays: dict[str, NDArray[Any]], order: tuple[int, ...]) -> NDArray[np.int64]:
    """Items in ``order``, each between words, and a placeholder that a model drew at the end of the text."""
    items = layout.items(arrays)
    parts = [[5, 6, 7]]
    for number in order:
        item = items[number]
        word = WORDS[item.kind]
        parts.append([word, *[layout.placeholders[item.kind]] * item.tokens, word, 8])
    parts.append([9, layout.placeholders["images"], 10])
    return np.concatenate(parts).astype(np.int64)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = _model(tmp_path, family)
    layout = MediaLayout.of(model.config)
    assert layout is not None
    assert layout.three_axes
    arrays = _grids(layout.merge)
    frames = len(layout.items(arrays)) - 2
    assert frames == (3 if family == "qwen3_vl" else 1)
    for order in ((0, 1, *range(2, 2 + frames)), (*range(2, 2 + frames), 0, 1)):
        tokens = _sequence(layout, arrays, order)
        items = layout.items(arrays)
        positions = layout.positions(tokens, items)
        kinds = np.zeros(len(tokens), dtype=np.int64)
        for begin, item in zip(layout.starts(tokens, items), items, strict=True):
            kinds[begin : begin + item.tokens] = 1 if item.kind == "images" else 2
        expected, _ = model.model.get_rope_index(
            torch.from_numpy(tokens)[None],
            mm_token_type_ids=torch.from_numpy(kinds)[None],
            **{name: torch.from_numpy(array) for name, array in arrays.items()},
        )
        np.testing.assert_array_equal(positions, expected[:, 0].numpy())
        assert following(positions) == positions[0, -1] + 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
@torch.no_grad()
def test_features_alone_or_together_give_the_logits_of_the_whole_model(tmp_path: Path, family: str) -> None:
    model = _model(tmp_path, family)
    layout = MediaLayout.of(model.config)
    assert layout is not None
    draws = np.random.default_rng(0)
    vision = model.config.vision_config
    if layout.merge:
        arrays = {"image_grid_thw": _grids(layout.merge)["image_grid_thw"]}
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        arrays["pixel_values"] = draws.standard_normal((int(arrays["image_grid_thw"].prod(1).sum()), width))
    else:
        arrays = {"pixel_values": draws.standard_normal((1, 2, 3, vision.image_size, vision.image_size))}
        mask = np.ones((1, 2, vision.image_size, vision.image_size), dtype=np.int64)
        mask[0, 1, :, vision.image_size // 2 :] = 0
        arrays["pixel_attention_mask"] = mask
    tensors = {
        name: torch.from_numpy(a).float() if a.dtype == np.float64 else torch.from_numpy(a)
        for name, a in arrays.items()
    }
    items = layout.items(arrays)
    tokens = _sequence(layout, arrays, (0, 1))[:-2]
    kinds = (tokens == layout.placeholders["images"]).astype(np.int64)
    options = {"mm_token_type_ids": torch.from_numpy(kinds)[None]} if layout.merge else {}
    expected = model(input_ids=torch.from_numpy(tokens)[None], **tensors, **options).logits[0]

    starts = layout.starts(tokens, items)
    at = np.concatenate([start + np.arange(item.tokens) for start, item in zip(starts, items, strict=True)])
    whole = features(model, "images", tensors)
    parts = [features(model, "images", item_arrays(tensors, item)) for item in items]
    torch.testing.assert_close(torch.cat([part.rows for part in parts]), whole.rows)
    positions = layout.positions(tokens, items)[:, None] if layout.three_axes else np.arange(len(tokens))[None]
    embeddings, more = embed(model, torch.from_numpy(tokens), torch.from_numpy(at), type(whole).joined(parts))
    hidden = text_model(model)(inputs_embeds=embeddings, position_ids=torch.from_numpy(positions), **more)
    torch.testing.assert_close(model.lm_head(hidden.last_hidden_state)[0], expected)
    plain = embed(model, torch.from_numpy(tokens), torch.from_numpy(at[:0]), None)[0]
    assert not torch.allclose(plain, embeddings)


def test_items_without_a_run_of_their_length_are_an_error(tmp_path: Path) -> None:
    layout = MediaLayout.of(_model(tmp_path, "qwen2_5_vl").config)
    assert layout is not None
    arrays = {"image_grid_thw": _grids(layout.merge)["image_grid_thw"]}
    items, picture = layout.items(arrays), layout.placeholders["images"]
    with pytest.raises(DataError, match="DAT38") as error:
        layout.starts(np.array([5, *[picture] * 6, 6]), items, "sample grpo/3-1")
    assert error.value.where == "sample grpo/3-1"
    assert error.value.why == "the images take [6, 1] tokens, the tokens have runs of [6] placeholders"
    with pytest.raises(DataError, match="DAT38"):
        layout.starts(np.array([5, *[picture] * 5, 6, picture]), items)
