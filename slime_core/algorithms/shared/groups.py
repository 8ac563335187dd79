"""Statistics of rewards over groups of rollouts: baselines, deviations, means. Numbers only; no model, no config.

Statistics are over the **rollouts** of a group, found by id and never by position: fan-out siblings share a rollout
id, count once, and their rollout's reward is the mean of theirs. Group sizes may differ. Samples whose mask is 0
(``remove_sample``) still count. Everything is float64 and two-pass; rewards that tie give exactly 0.

The same statistics serve whole responses (here), turns and tokens (`credit`), whose values take the rewards' place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Std = Literal["none", "group", "batch"]

STD_EPSILON = 1e-6  # added to a standard deviation, as THUDM/slime and Chen et al.'s code do; TRL adds 1e-4
TIE = 1e-12  # rollouts that differ by less, relatively, tie: means of siblings round differently


@dataclass(slots=True, frozen=True)
class Comparison:
    """What each value is compared with: its advantage is (value - baseline) / scale."""

    baseline: Floats  # [N]
    scale: Floats  # [N], 1 where nothing divides

    def of(self, value: Floats) -> Floats:
        """The advantages of ``value`` [N]."""
        return np.asarray((value - self.baseline) / self.scale)


def compare(
    value: Floats, group: Ints, rollout: Ints, *, std: Std = "none", leave_one_out: bool = False
) -> Comparison:
    """Baseline and scale of values that compete in groups, found by id.

    The baseline is the mean over the group's rollouts or, with ``leave_one_out``, over its **other** rollouts. The
    scale is 1, or the sample standard deviation (ddof 1) plus 1e-6 of the rollouts of the ``group`` or of the whole
    ``batch``. A group of one rollout has its own value for a baseline. Where there is no deviation (one rollout, or
    rollouts that tie while their siblings differ) nothing divides.

    Args:
        value: [N]
        group: [N], any id a group
        rollout: [N], any id a rollout; unique over groups

    Raises:
        ValueError: a rollout id that occurs in two groups.
    """
    value = np.asarray(value, dtype=np.float64)
    if len(value) == 0:
        return Comparison(np.zeros(0), np.ones(0))
    rollout_of, group_of_rollout = numbered(group, rollout)
    score = means(value, rollout_of)
    count = np.bincount(group_of_rollout)[group_of_rollout]
    mean = means(score, group_of_rollout)[group_of_rollout]
    baseline, scale = mean, np.ones_like(mean)
    if leave_one_out:
        baseline = mean - (score - mean) / np.maximum(count - 1, 1)
    if std != "none":
        scale = _scale(score, group_of_rollout if std == "group" else np.zeros_like(group_of_rollout))
    return Comparison(baseline[rollout_of], scale[rollout_of])


def _scale(score: Floats, place: Ints) -> Floats:
    """The standard deviation plus epsilon at each value's place; 1 where one value or ties leave none."""
    low, high = np.full(place.max() + 1, np.inf), np.full(place.max() + 1, -np.inf)
    np.minimum.at(low, place, score)
    np.maximum.at(high, place, score)
    tied = high - low <= TIE * np.maximum(abs(low), abs(high))
    count = np.bincount(place)
    centred = score - means(score, place)[place]
    deviation = np.sqrt(np.bincount(place, centred**2) / np.maximum(count - 1, 1))
    return np.where(tied, 1.0, deviation + STD_EPSILON)[place]


def means(value: Floats, place: Ints) -> Floats:
    """The mean at each place 0..n-1 of values [N] that lie there, in two passes: exact where all are equal."""
    count = np.bincount(place)
    rough = np.bincount(place, value) / count
    return np.asarray(rough + np.bincount(place, value - rough[place]) / count)


def numbered(group: Ints, rollout: Ints) -> tuple[Any, Any]:
    """Ids to numbers from 0: the rollout of each value, and the group of each rollout."""
    _, first, rollout_of = np.unique(rollout, return_index=True, return_inverse=True)
    strays = np.flatnonzero(group != group[first][rollout_of])
    if strays.size:
        stray = int(strays[0])
        raise ValueError(
            f"rollout {rollout[stray]} belongs to groups {group[first][rollout_of[stray]]} and {group[stray]}"
        )
    return rollout_of, np.unique(group[first], return_inverse=True)[1]


def spread(comparison: Comparison, reward: Floats, sample_of_token: Ints) -> NDArray[np.float32]:
    """The advantage of each sample at each of its tokens, float32 [R]."""
    advantages = comparison.of(np.asarray(reward, dtype=np.float64))
    return np.asarray(advantages[sample_of_token], dtype=np.float32)
