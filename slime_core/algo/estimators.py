"""Rewards of a whole step in, one advantage a response token out. Numbers only; no model, no config."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STD_EPSILON = 1e-6  # added to the standard deviation, as THUDM/slime does


def grpo(
    reward: NDArray[np.float64],
    group: NDArray[np.int64],
    rollout: NDArray[np.int64],
    sample_of_token: NDArray[np.int64],
    *,
    std: bool,
) -> NDArray[np.float32]:
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, 4.1.2), float32 [R], the same for a sample's tokens.

    The statistics of a group are over its **rollouts**, found by id: fan-out siblings share a rollout id, count once,
    and their rollout's reward is the mean of theirs. A sample's advantage is its own reward minus the mean, divided,
    with ``std``, by the sample standard deviation (ddof 1) plus 1e-6.

    A group of one rollout is centred and never divided, so its advantage is 0 where siblings agree. A group whose
    rewards all tie gives exactly 0. Group sizes may differ. Samples with mask 0 (``remove_sample``) still count.

    Args:
        reward: [S]
        group: [S], any id a group
        rollout: [S], any id a rollout; unique over groups
        sample_of_token: [R], the sample of each response token

    Raises:
        ValueError: a rollout id that occurs in two groups.
    """
    reward = np.asarray(reward, dtype=np.float64)
    per_sample = np.zeros(len(reward), dtype=np.float64)
    if len(reward) == 0:
        return np.zeros(0, dtype=np.float32)
    _, first, rollout_of = np.unique(rollout, return_index=True, return_inverse=True)
    if (group != group[first][rollout_of]).any():
        wrong = int(np.flatnonzero(group != group[first][rollout_of])[0])
        raise ValueError(
            f"rollout {rollout[wrong]} belongs to groups {group[first][rollout_of[wrong]]} and {group[wrong]}"
        )
    rollout_reward = np.bincount(rollout_of, reward) / np.bincount(rollout_of)
    group_of_rollout = group[first]
    for name in np.unique(group):
        mine = rollout_reward[group_of_rollout == name]
        members = group == name
        if reward[members].min() == reward[members].max():
            continue  # ties are exactly 0, whatever the mean rounds to
        centred = reward[members] - mine.mean()
        divide = std and len(mine) > 1
        per_sample[members] = centred / (mine.std(ddof=1) + STD_EPSILON) if divide else centred
    return per_sample[sample_of_token].astype(np.float32)


def sft(sample_of_token: NDArray[np.int64]) -> NDArray[np.float32]:
    """1 for every response token, float32 [R]: supervised training weighs by mask alone."""
    return np.ones(len(sample_of_token), dtype=np.float32)
