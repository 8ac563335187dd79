"""Features of pictures and videos by a model's own tower, and the rows of its text model that they replace.

pixels, grids --tower--> features [n, hidden], one row a placeholder --> embeddings [N, hidden] -> text model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.media.positions import GRIDS, PIXELS, Kind, MediaItem, MediaLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class Features:
    """What stands for ``n`` placeholders; ``deep`` is added to the output of the first layers (Qwen3-VL)."""

    rows: torch.Tensor  # n, hidden
    deep: list[torch.Tensor] = field(default_factory=list)  # n, hidden each

    def take(self, begin: int, end: int) -> Features:
        """Features of placeholders [begin, end)."""
        return Features(self.rows[begin:end], [one[begin:end] for one in self.deep])

    @classmethod
    def joined(cls, parts: Sequence[Features]) -> Features:
        """Features of several, end to end."""
        deep = zip(*(part.deep for part in parts), strict=True)
        return cls(torch.cat([part.rows for part in parts]), [torch.cat(list(layer)) for layer in deep])


def text_model(model: Any) -> Any:
    """The part of a vision model's module that takes embeddings, decoder layers and last norm; any other as it is."""
    inner = getattr(model, "model", None)
    return getattr(inner, "language_model", None) or getattr(inner, "text_model", None) or model


def tower(model: Any) -> list[Any]:
    """The modules that turn pixels into features: vision layers and the projector after them."""
    inner = model.model
    modules = [getattr(inner, name, None) for name in ("visual", "vision_tower", "vision_model", "connector")]
    return [module for module in (*modules, getattr(inner, "multi_modal_projector", None)) if module is not None]


def features(model: Any, kind: Kind, arrays: Mapping[str, torch.Tensor]) -> Features:
    """Features of all items of a kind, in order.

    Args:
        arrays: by the names of the model's forward, on its device; those of another kind are not looked at.
    """
    pixels = arrays[PIXELS[kind]]
    if GRIDS[kind] in arrays:  # patches [n, width of a patch] and grids [items, 3]
        call = model.model.get_image_features if kind == "images" else model.model.get_video_features
        out = call(pixels, arrays[GRIDS[kind]], return_dict=True)
        return Features(torch.cat(list(out.pooler_output)), list(getattr(out, "deepstack_features", None) or []))
    mask = arrays.get("pixel_attention_mask")
    crops = pixels.view(1, -1, *pixels.shape[-3:])
    options = {} if mask is None else {"pixel_attention_mask": mask.view(1, -1, *mask.shape[-2:])}
    out = model.model.get_image_features(crops, return_dict=True, **options)
    return Features(out.pooler_output.flatten(0, 1))


def picture_probe(config: Any, layout: MediaLayout) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    """Tokens between text, and the arrays, of a random picture that is not square, to try a model with."""
    vision, draws = config.vision_config, np.random.default_rng(0)
    if layout.merge:
        grid = np.array([[1, layout.merge, 3 * layout.merge]])
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        arrays = {PIXELS["images"]: draws.standard_normal((int(grid.prod()), width)), GRIDS["images"]: grid}
    else:
        arrays = {PIXELS["images"]: draws.standard_normal((1, 1, 3, vision.image_size, vision.image_size))}
    arrays[PIXELS["images"]] = arrays[PIXELS["images"]].astype(np.float32)
    (item,) = layout.items(arrays)
    text = [token for token in range(3, 13) if token not in layout.ids]
    return np.array([*text[:4], *[layout.placeholders["images"]] * item.tokens, *text[4:]]), arrays


@torch.no_grad()
def own_logits(
    model: Any, layout: MediaLayout, tokens: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]
) -> torch.Tensor:
    """Logits [T, V] of one sequence by a model's own forward."""
    device = model.get_input_embeddings().weight.device
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    if layout.three_axes:
        kinds = np.zeros(len(tokens), dtype=np.int64)
        items = layout.items(arrays)
        for begin, item in zip(layout.starts(tokens, items), items, strict=True):
            kinds[begin : begin + item.tokens] = 1 if item.kind == "images" else 2
        tensors["mm_token_type_ids"] = torch.from_numpy(kinds)[None].to(device)
    ids = torch.from_numpy(tokens)[None].to(device)
    return model(input_ids=ids, use_cache=False, **tensors).logits[0]  # type: ignore[no-any-return]


def item_arrays(arrays: Mapping[str, Any], item: MediaItem) -> dict[str, Any]:
    """The arrays of one item, as :func:`features` takes them."""
    pixels = arrays[PIXELS[item.kind]]
    if item.grid is not None:
        grid = [list(item.grid)]
        grids = torch.tensor(grid, device=pixels.device) if isinstance(pixels, torch.Tensor) else grid
        return {PIXELS[item.kind]: pixels[item.begin : item.end], GRIDS[item.kind]: grids}
    out = {PIXELS[item.kind]: pixels.reshape(-1, *pixels.shape[-3:])[item.begin : item.end]}
    if (mask := arrays.get("pixel_attention_mask")) is not None:
        out["pixel_attention_mask"] = mask.reshape(-1, *mask.shape[-2:])[item.begin : item.end]
    return out


def embed(
    model: Any, tokens: torch.Tensor, at: torch.Tensor | None, values: Features | None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Embeddings [1, N, hidden] of ``tokens`` [N], those at ``at`` [n] replaced, and what else the text model takes.

    ``at`` ascends in the order of ``values``.
    """
    embeddings = model.get_input_embeddings()(tokens)
    if values is None or at is None:
        return embeddings[None], {}
    embeddings = embeddings.index_copy(0, at, values.rows.to(embeddings.dtype))[None]
    if not values.deep:
        return embeddings, {}
    mask = torch.zeros(1, len(tokens), dtype=torch.bool, device=tokens.device)
    mask[0, at] = True
    return embeddings, {"visual_pos_masks": mask, "deepstack_visual_embeds": values.deep}
