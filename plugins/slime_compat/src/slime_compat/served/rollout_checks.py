"""`slime.observability.rollout_data_utils`: tensors of rollout data, and checks of samples and routed experts.

Its dumps are not here: ``--save-debug-rollout-data`` and ``--load-debug-rollout-data`` have files that are no pickles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slime_core.types import Sample

KEYS: dict[torch.dtype | None, tuple[str, ...]] = {
    torch.int64: ("tokens",),
    torch.int32: ("loss_masks", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    torch.float32: ("rollout_log_probs", "teacher_log_probs"),
    None: ("rollout_routed_experts",),
}
"""The keys whose values become tensors of a type; None leaves the values' own."""


def tensorize_rollout_data_for_training(rollout_data: dict[str, Any]) -> None:
    """Turn the lists of rollout data into contiguous tensors on the CPU, in place."""
    for dtype, keys in KEYS.items():
        for key in rollout_data.keys() & set(keys):
            rollout_data[key] = [_tensor(value, dtype) for value in rollout_data[key]]
    if "multimodal_train_inputs" in rollout_data:
        rollout_data["multimodal_train_inputs"] = [
            media and {name: _tensor(value) if _is_array(value) else value for name, value in media.items()}
            for media in rollout_data["multimodal_train_inputs"]
        ]
    if "rollout_mask_sums" in rollout_data:
        rollout_data["rollout_mask_sums"] = _tensor(rollout_data["rollout_mask_sums"], torch.float32)


def _tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    value = value.copy() if isinstance(value, np.ndarray) else value
    return torch.as_tensor(value, dtype=dtype).detach().cpu().contiguous()


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def validate_rollout_routed_experts_for_replay(routed_experts: Sequence[Any], args: Any) -> None:
    """Check experts [tokens, layers, top k] of each sample before they are replayed.

    Raises:
        ValueError: no sample, another shape, no token, or a layer of experts that nothing was recorded for.
    """
    if not routed_experts:
        raise ValueError("routed experts are replayed, and no sample has any")
    layers, top_k = int(args.num_layers), int(args.moe_router_topk)
    frequency = getattr(args, "moe_layer_freq", None)
    frequency = list(frequency)[:layers] if isinstance(frequency, list | tuple) else [1] * layers
    for number, experts in enumerate(map(torch.as_tensor, routed_experts)):
        if experts.ndim != 3 or experts.shape[1:] != (layers, top_k) or not len(experts):
            raise ValueError(
                f"routed experts of sample {number} have shape {tuple(experts.shape)}, not (tokens, {layers}, {top_k})"
            )
        silent = [layer for layer, moe in enumerate(frequency) if moe and not experts[:, layer].any()]
        if top_k > 1 and silent:
            raise ValueError(f"routed experts of sample {number} are all zero in layers {silent}: not recorded there")


def validate_rollout_id_annotated(node: Any, depth: int = 0) -> None:
    """Check that samples which one rollout made, a list inside a group, have one ``rollout_id``.

    Raises:
        ValueError: siblings without an id, or with different ones.
    """
    if isinstance(node, Sample):
        return
    if not node or not isinstance(node[0], Sample):
        for item in node:
            validate_rollout_id_annotated(item, depth + 1)
    elif depth >= 2 and len(node) > 1:
        ids = [sample.rollout_id for sample in node]
        if None in ids or len(set(ids)) > 1:
            raise ValueError(
                f"{len(node)} samples of one rollout have the rollout_id {ids}; give all of them the same"
            )


__all__ = [
    "tensorize_rollout_data_for_training",
    "validate_rollout_id_annotated",
    "validate_rollout_routed_experts_for_replay",
]
