"""What histograms of a step are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import Batch


def step_arrays(batch: Batch) -> dict[str, NDArray[Any]]:
    """Rewards and response lengths [S], advantages and log-prob gaps of trained tokens; finite values alone."""
    trained, columns = batch.loss_mask > 0, batch.columns
    arrays = {
        "histograms/reward": batch.reward,
        "histograms/response_length": np.diff(batch.response_offsets),
    }
    if "advantages" in columns:
        arrays["histograms/advantages"] = columns["advantages"][trained]
    if {"policy", "rollout_log_probs"} <= columns.keys():
        arrays["histograms/logprob_gap"] = (columns["policy"] - columns["rollout_log_probs"])[trained]
    finite = {name: values[np.isfinite(values)] for name, values in arrays.items()}
    return {name: values for name, values in finite.items() if values.size}
