"""`slime.backends.megatron_utils.loss`: its functions for ``--custom-tis-function-path``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime_core.algorithms.shared.corrections import engine_gap, importance_weights

Tensors = Sequence[torch.Tensor]
Corrected = tuple[torch.Tensor, Tensors, dict[str, torch.Tensor]]
"""The loss [R] after its weights, the masks, and metrics [R]."""


def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    loss_masks: Tensors,
    **kwargs: Any,
) -> Corrected:
    """Weights clipped to [``args.tis_clip_low``, ``args.tis_clip``]."""
    return _corrected(args, "clip", pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Tensors,
    rollout_log_probs: Tensors,
    loss_masks: Tensors,
    **kwargs: Any,
) -> Corrected:
    """Weights that are 0 outside [``args.tis_clip_low``, ``args.tis_clip``]."""
    return _corrected(args, "mask", pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _corrected(
    args: Any, mode: str, loss: torch.Tensor, trainer: Tensors, engine: Tensors, masks: Tensors
) -> Corrected:
    mask = torch.cat(list(masks))
    gap = engine_gap(torch.cat(list(trainer)), torch.cat(list(engine)), mask)
    bounds = {"lower": args.tis_clip_low, "upper": args.tis_clip}
    weights = importance_weights(gap, mask, None, mode=mode, **bounds)
    ratio = gap.exp()
    metrics = {"tis": ratio, "tis_clipfrac": weights.clipped.to(ratio.dtype), "tis_abs": (ratio - 1).abs()}
    return loss * weights.value, masks, metrics


__all__ = ["icepop_function", "vanilla_tis_function"]
