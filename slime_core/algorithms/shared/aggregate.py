"""Weights of response tokens in the loss of one optimizer step.

The denominators are those of the whole optimizer step, so that no split into micro-batches, packs or ranks changes
the loss or its gradient: the loss is the plain sum of weight times value over all tokens, wherever they lie.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MODES = ("rollout_mean", "token_mean", "rollout_sum", "constant")


def token_weights(
    loss_mask: NDArray[np.float32], rollout_of_token: NDArray[np.int64], rollouts: int, mode: str, divisor: int = 1
) -> NDArray[np.float32]:
    """Weights [R] of the tokens of one optimizer step, float32, computed in float64; masked tokens weigh 0.

    ``rollout_mean``: each of the step's ``rollouts`` weighs 1 / rollouts, shared equally by the trainable tokens of
    all its samples. A rollout with no trainable token still counts, so masking one never makes another heavier.
    ``token_mean``: 1 / (trainable tokens of the step). With nothing trainable all weights are 0.
    ``rollout_sum``: 1 / rollouts, so a rollout weighs by its trainable tokens.
    ``constant``: 1 / (rollouts * divisor), a divisor that no length enters (Liu et al. 2025, Dr. GRPO).

    Args:
        loss_mask: [R], 0 or 1
        rollout_of_token: [R], ids
        rollouts: rollouts in the optimizer step
        mode: "rollout_mean", "token_mean", "rollout_sum" or "constant"
        divisor: tokens, for "constant"

    Example: rollout 0 with 1 token, rollout 1 with 3, of which one is masked
        rollout_mean [1/2, 1/4, 1/4, 0], token_mean [1/3, 1/3, 1/3, 0], rollout_sum [1/2, 1/2, 1/2, 0],
        constant with divisor 8 [1/16, 1/16, 1/16, 0]

    Raises:
        ValueError: another mode.
    """
    mask = np.asarray(loss_mask, dtype=np.float64)
    weights = _weights(mask, rollout_of_token, rollouts, mode, divisor)
    return np.asarray(mask * weights, dtype=np.float32)


def sample_weights(
    trainable: NDArray[np.float64], rollout_of_sample: NDArray[np.int64], rollouts: int, mode: str, divisor: int = 1
) -> NDArray[np.float32]:
    """What :func:`token_weights` gives each trainable token of a sample, [S] float32.

    Args:
        trainable: [S], trainable tokens of each sample of the optimizer step
        rollout_of_sample: [S], ids

    Raises:
        ValueError: another mode.
    """
    return _weights(trainable, rollout_of_sample, rollouts, mode, divisor).astype(np.float32)


def _weights(
    trainable: NDArray[np.float64], rollout_of: NDArray[np.int64], rollouts: int, mode: str, divisor: int
) -> NDArray[np.float64]:
    """The weight of a trainable token in each part of an optimizer step: in a sample, or where the token is alone."""
    if mode == "token_mean":
        return np.full(len(trainable), 1.0 / max(float(trainable.sum()), 1.0))
    if mode in ("rollout_sum", "constant"):
        return np.full(len(trainable), 1.0 / (max(rollouts, 1) * (divisor if mode == "constant" else 1)))
    if mode != "rollout_mean":
        raise ValueError(f"loss aggregation {mode!r} is none of {MODES}")
    if len(trainable) == 0:
        return np.zeros(0)
    _, number = np.unique(rollout_of, return_inverse=True)
    total = np.maximum(np.bincount(number, trainable), 1.0)
    return np.asarray(1.0 / (total[number] * rollouts))
