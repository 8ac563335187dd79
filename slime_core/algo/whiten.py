"""Advantages of a whole step in, the same with mean 0 and variance 1 over its trainable tokens out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-8  # added to the variance, as THUDM/slime does


def whiten(values: NDArray[np.floating], loss_mask: NDArray[np.float32]) -> NDArray[np.float32]:
    """(v - mean) / sqrt(var + 1e-8) over the tokens with mask 1, float32 [R]; 0 where masked.

    The statistics are those of the whole step (Hu et al. 2025, REINFORCE++: global advantage normalisation). The
    driver holds the step, so no split into ranks or micro-batches enters them. The variance has ddof 1 and two passes
    in float64; THUDM/slime's is one pass, E[v^2] - E[v]^2, in float32, which cancels where the mean is large, and it
    raises on a step with nothing to train.

    A step with no trainable token is all 0; one token, or values that all tie, give exactly 0.

    Args:
        values: [R]
        loss_mask: [R], 0 or 1
    """
    trained = np.asarray(loss_mask) > 0
    out = np.zeros(len(trained), dtype=np.float32)
    found = np.asarray(values, dtype=np.float64)[trained]
    if len(found) < 2:
        return out
    centred = found - found.mean()
    centred -= centred.mean()  # what the first mean rounded: values that tie become exactly 0
    out[trained] = centred / np.sqrt(centred @ centred / (len(centred) - 1) + EPSILON)
    return out
