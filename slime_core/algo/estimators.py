"""Rewards of a whole step in, one advantage a response token out. Numbers only; no model, no config.

Statistics are over the **rollouts** of a group, found by id and never by position: fan-out siblings share a rollout
id, count once, and their rollout's reward is the mean of theirs. Group sizes may differ. Samples whose mask is 0
(``remove_sample``) still count. Everything is float64 and two-pass; rewards that tie give exactly 0.

The same statistics serve whole responses (here), turns and tokens (`credit`), whose values take the rewards' place.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
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
    rollout_of, group_of_rollout = _places(group, rollout)
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


def _places(group: Ints, rollout: Ints) -> tuple[Any, Any]:
    """Ids to numbers from 0: the rollout of each value, and the group of each rollout."""
    _, first, rollout_of = np.unique(rollout, return_index=True, return_inverse=True)
    strays = np.flatnonzero(group != group[first][rollout_of])
    if strays.size:
        stray = int(strays[0])
        raise ValueError(
            f"rollout {rollout[stray]} belongs to groups {group[first][rollout_of[stray]]} and {group[stray]}"
        )
    return rollout_of, np.unique(group[first], return_inverse=True)[1]


def grpo(
    reward: Floats, group: Ints, rollout: Ints, sample_of_token: Ints, *, std: bool, std_scope: str = "group"
) -> NDArray[np.float32]:
    """Group-relative advantages (Shao et al. 2024, DeepSeekMath, 4.1.2), float32 [R], the same for a sample's tokens.

    A_i = (r_i - mean_group r) / (std r + 1e-6), with the mean and the sample standard deviation (ddof 1) over the
    group's rollouts; without ``std`` nothing divides. ``std_scope`` "batch" divides by the standard deviation of all
    rollouts of the step (Liu et al. 2025, "Tricks or Traps?"). GSPO (Zheng et al. 2025) and CISPO (MiniMax 2025) have
    these advantages too; they differ in the loss.

    A sample's own reward is compared, so siblings may differ. A group of one rollout is centred and never divided by
    its own deviation: 0 where siblings agree. A group whose rewards all tie gives exactly 0.

    THUDM/slime finds groups by position and, once samples of a step are missing, makes one group of the whole step;
    a fan-out sibling counts there like a rollout. TRL adds 1e-4 to the deviation.

    Args:
        reward: [S]
        group: [S], any id a group
        rollout: [S], any id a rollout; unique over groups
        sample_of_token: [R], the sample of each response token
        std_scope: "group" or "batch"

    Raises:
        ValueError: a rollout id that occurs in two groups, or another scope.
    """
    if std_scope not in ("group", "batch"):
        raise ValueError(f"the scope of the standard deviation is 'group' or 'batch', not {std_scope!r}")
    scope: Std = "none" if not std else "batch" if std_scope == "batch" else "group"
    return _spread(compare(reward, group, rollout, std=scope), reward, sample_of_token)


def dr_grpo(reward: Floats, group: Ints, rollout: Ints, sample_of_token: Ints) -> NDArray[np.float32]:
    """A_i = r_i - mean_group r (Liu et al. 2025, "Understanding R1-Zero-Like Training", Dr. GRPO), float32 [R].

    Without the standard deviation, easy and hard prompts weigh what their rewards say. It is also the group baseline
    of REINFORCE++-baseline (Hu et al. 2025), which whitens over the step. Arguments and errors as :func:`grpo`.
    """
    return _spread(compare(reward, group, rollout), reward, sample_of_token)


def rloo(reward: Floats, group: Ints, rollout: Ints, sample_of_token: Ints) -> NDArray[np.float32]:
    """A_i = r_i - mean of the group's other rollouts (Kool et al. 2019; Ahmadian et al. 2024, RLOO), float32 [R].

    The baseline does not contain the reward it is subtracted from, so the gradient is unbiased; for n rollouts it is
    n / (n - 1) times :func:`dr_grpo`. A group of one is centred by itself: 0 where siblings agree. THUDM/slime has no
    RLOO; TRL takes the sequence's KL from the reward before the baseline, here KL is taken from the advantages.
    Arguments and errors as :func:`grpo`.
    """
    return _spread(compare(reward, group, rollout, leave_one_out=True), reward, sample_of_token)


def pass_at_k(
    reward: Floats, group: Ints, rollout: Ints, sample_of_token: Ints, *, k: int, std: bool = True
) -> NDArray[np.float32]:
    """Pass@k advantages (Chen et al. 2025, "Pass@k Training", analytical derivation), float32 [R].

    The reward of k rollouts is the best of theirs. A rollout's advantage is the mean reward of all k-subsets of its
    group that hold it, minus the mean over all k-subsets, divided (with ``std``) by their population standard
    deviation plus 1e-6. All C(n, k) subsets are meant, none is drawn. With 0/1 rewards and m failures among n this
    is the paper's form: with R = 1 - C(m, k) / C(n, k) and s = sqrt(R (1 - R)), a success has (1 - R) / s and a
    failure (1 - R - C(m - 1, k - 1) / C(n - 1, k - 1)) / s. Graded rewards have the same definition.

    Where every k-subset has the same best reward (ties, one success in every subset, n = k) it is exactly 0. k = 1
    is GRPO with ddof 0. Siblings share their rollout's advantage.

    Args:
        k: 1 <= k <= rollouts of every group; others as :func:`grpo`

    Raises:
        ValueError: a group with fewer than k rollouts, or a rollout id that occurs in two groups.
    """
    reward = np.asarray(reward, dtype=np.float64)
    if len(reward) == 0:
        return np.zeros(0, dtype=np.float32)
    rollout_of, group_of_rollout = _places(group, rollout)
    score = means(reward, rollout_of)
    names = np.unique(group)
    found = np.zeros_like(score)
    for place, name in enumerate(names):
        mine = np.flatnonzero(group_of_rollout == place)
        if len(mine) < k:
            raise ValueError(f"group {name} has {len(mine)} rollouts, pass_k is {k}")
        found[mine] = _best_of_k(score[mine], k, std)
    return np.asarray(found[rollout_of][sample_of_token], dtype=np.float32)


def _best_of_k(score: Floats, k: int, std: bool) -> Floats:
    """Of one group's rollouts. The j-th smallest of n is the best of a k-subset in C(j, k - 1) of C(n, k) cases."""
    n, order = len(score), np.argsort(score, kind="stable")
    ranked = score[order]
    if ranked[k - 1] == ranked[-1]:
        return np.zeros(n)  # every k-subset reaches the best
    chance = np.array([comb(j, k - 1) / comb(n, k) for j in range(n)])
    mean = float(chance @ ranked)
    # holding rank i: its own value if the k - 1 others rank below, else theirs, the best of which ranks q > i
    alone = np.array([comb(i, k - 1) / comb(n - 1, k - 1) for i in range(n)])
    above = np.array([comb(q - 1, k - 2) / comb(n - 1, k - 1) if k > 1 and q else 0.0 for q in range(n)])
    tail = np.concatenate([np.cumsum((above * (ranked - mean))[::-1])[::-1][1:], [0.0]])
    found = np.empty(n)
    found[order] = alone * (ranked - mean) + tail
    return found / (np.sqrt(chance @ (ranked - mean) ** 2) + STD_EPSILON) if std else found


def _spread(comparison: Comparison, reward: Floats, sample_of_token: Ints) -> NDArray[np.float32]:
    found = comparison.of(np.asarray(reward, dtype=np.float64))
    return np.asarray(found[sample_of_token], dtype=np.float32)


def on_policy_distillation(log_probs: Floats, teacher_log_probs: Floats) -> NDArray[np.float32]:
    """A_t = -(lp_student - lp_teacher), float32 [R]: one token's reverse KL to the teacher as a cost.

    Tokens are the student's own (Agarwal et al. 2024, GKD; Gu et al. 2024, MiniLLM: reverse KL; Lu 2025, "On-Policy
    Distillation", with discount 0). No reward enters. THUDM/slime adds the term to another estimator only.
    """
    gap = np.asarray(log_probs, dtype=np.float64) - np.asarray(teacher_log_probs, dtype=np.float64)
    return np.asarray(-gap, dtype=np.float32)


def sft(sample_of_token: Ints) -> NDArray[np.float32]:
    """1 for every response token, float32 [R]: supervised training weighs by mask alone."""
    return np.ones(len(sample_of_token), dtype=np.float32)
