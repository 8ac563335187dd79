"""Reward shaping in one group: weighed terms, and a punishment of overlong responses.

Pure numpy, float64; no config, no samples. Samples of one rollout (fan-out siblings) share a rollout id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slime_core.algorithms.shared.groups import compare


def soft_overlong(length: NDArray[np.int64], limit: int, buffer: int, factor: float) -> NDArray[np.float64]:
    """What overlong responses lose, float64 [S], between 0 and ``-factor`` (DAPO, Yu et al. 2025, eq. 13).

    With L the length, ``0`` up to ``limit - buffer``, then ``factor * ((limit - buffer) - L) / buffer`` down to
    ``-factor`` at ``limit``, and ``-factor`` beyond.

    Args:
        length: [S], response tokens.
        limit: tokens at which the whole punishment is reached.
        buffer: tokens before ``limit`` over which it grows; 0 is no punishment.
        factor: the whole punishment.

    Raises:
        ValueError: a buffer below 0 or above ``limit``.
    """
    if not 0 <= buffer <= limit:
        raise ValueError(f"a buffer of {buffer} tokens does not fit a limit of {limit}")
    over = np.asarray(length, dtype=np.int64) - (limit - buffer)
    if buffer == 0:
        return np.zeros(len(over), dtype=np.float64)
    lost = np.clip(over, 0, buffer) * (float(factor) / buffer)
    return np.where(over > 0, -lost, 0.0)


def group_normalised(values: NDArray[np.float64], rollout: NDArray[np.int64]) -> NDArray[np.float64]:
    """One term of one group: centred, divided by its standard deviation (ddof 1) plus 1e-6, float64 [S].

    This is the first step of GDPO (Liu et al. 2026, group reward-decoupled normalization): each term is compared
    within its group alone, so that a term of large spread does not drown the others. Statistics are over rollouts, a
    rollout's value being the mean of its samples'. Where all values tie the answer is exactly 0; where only rollouts
    tie (one rollout, or siblings that differ) values are centred and not divided.

    Args:
        values: [S], the term of each sample.
        rollout: [S], any id a rollout.
    """
    values = np.asarray(values, dtype=np.float64)
    return compare(values, np.zeros(len(values), dtype=np.int64), rollout, std="group").of(values)


def weighed(
    terms: NDArray[np.float64], weights: NDArray[np.float64], rollout: NDArray[np.int64], *, normalize: bool
) -> NDArray[np.float64]:
    """Several terms of one group as one reward a sample, float64 [S]: ``sum_k weights[k] * terms[k]``.

    Args:
        terms: [K, S]
        weights: [K]
        rollout: [S], any id a rollout.
        normalize: each term goes through :func:`group_normalised` first.
    """
    terms = np.asarray(terms, dtype=np.float64)
    if normalize:
        terms = np.stack([group_normalised(term, rollout) for term in terms])
    total = np.zeros(terms.shape[1], dtype=np.float64)
    for weight, term in zip(weights, terms, strict=True):
        total += float(weight) * term
    return total
