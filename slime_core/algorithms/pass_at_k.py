"""Pass@k: the best of k rollouts is what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from math import comb
from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import CLIPPED, GROUP, LOSS, PARTS, ROLLOUT_MEAN, TOKEN_RATIO

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.algorithms.shared.groups import Floats, Ints
    from slime_core.config.problems import Problem
    from slime_core.types import Batch, Columns


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
        k: 1 <= k <= rollouts of every group; others as `grpo.grpo`

    Raises:
        ValueError: a group with fewer than k rollouts, or a rollout id that occurs in two groups.
    """
    import numpy as np

    from slime_core.algorithms.shared.groups import means, numbered

    reward = np.asarray(reward, dtype=np.float64)
    if len(reward) == 0:
        return np.zeros(0, dtype=np.float32)
    rollout_of, group_of_rollout = numbered(group, rollout)
    score = means(reward, rollout_of)
    names = np.unique(group)
    advantage = np.zeros_like(score)
    for place, name in enumerate(names):
        members = np.flatnonzero(group_of_rollout == place)
        if len(members) < k:
            raise ValueError(f"group {name} has {len(members)} rollouts, pass_k is {k}")
        advantage[members] = _best_of_k(score[members], k, std)
    return np.asarray(advantage[rollout_of][sample_of_token], dtype=np.float32)


def _best_of_k(score: Floats, k: int, std: bool) -> Floats:
    """Of one group's rollouts. The j-th smallest of n is the best of a k-subset in C(j, k - 1) of C(n, k) cases."""
    import numpy as np

    from slime_core.algorithms.shared.groups import STD_EPSILON

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
    advantage = np.empty(n)
    advantage[order] = alone * (ranked - mean) + tail
    return advantage / (np.sqrt(chance @ (ranked - mean) ** 2) + STD_EPSILON) if std else advantage


def advantages(batch: Batch, train: Any) -> Columns:
    """Of whole responses.

    Raises:
        ConfigError: CFG04 credit below a trajectory.
        TrainerError: TRN99 a group with fewer than ``pass_k`` rollouts.
    """
    from slime_core.algorithms.shared.rewards import peers
    from slime_core.errors import ConfigError, TrainerError

    if train.credit_level != "trajectory":
        raise ConfigError(
            f"credit_level = {train.credit_level} with advantage_estimator = pass_at_k",
            code="CFG04",
            where="train.credit_level",
            why="the best of k is defined for whole responses",
            fix="--credit-level trajectory",
        )
    std = not train.disable_grpo_std_normalization
    ids = (*peers(batch), batch.sample_of_token())
    try:
        return {"advantages": pass_at_k(batch.reward, *ids, k=train.pass_k, std=std)}
    except ValueError as error:
        raise TrainerError(
            str(error),
            code="TRN99",
            where=f"step {batch.version}",
            why="a group needs at least pass_k rollouts; one of exactly pass_k teaches nothing",
            fix="lower train.pass_k, or raise rollout.n_samples_per_prompt",
        ) from None


def _conflicts(config: Any) -> Iterator[Problem]:
    from slime_core.config.problems import conflict

    k, n = config.train.pass_k, config.rollout.largest_group(config.data)
    if config.rollout.rollout_function_path or not k >= n > 1:
        return
    few = "holds no set of that size" if k > n else "is one set, so every advantage is 0"
    yield conflict(
        f"pass_k = {k} with n_samples_per_prompt = {n}",
        ["train.pass_k", "rollout.n_samples_per_prompt"],
        why=f"the best of pass_k samples is compared over sets of the group, and a group of {n} {few}",
        fix=f"set pass_k to at most {n - 1}, or n_samples_per_prompt to {k + 1} or more",
    )


ALGORITHM = Algorithm(
    name="pass_at_k",
    title="Pass@k: train the best of k",
    formula={
        "advantage": "(mean best reward of the k-subsets of the group that hold i - mean over all k-subsets) / "
        "(their standard deviation + 1e-6), k = pass_k",
        "ratio": TOKEN_RATIO,
        "objective": CLIPPED,
        "aggregation": ROLLOUT_MEAN,
    },
    source=(
        "Chen et al. 2025, Pass@k Training for Adaptively Balancing Exploration and Exploitation of Large "
        "Reasoning Models, the analytical derivation",
    ),
    differs={
        "slime": "Not built in.",
        "verl": "grpo_passk (Best-of-n): only the best sample of a group has an advantage, its lead over the "
        "second; all others have 0.",
        "TRL": "Not offered.",
    },
    options=(*GROUP, "pass_k", "disable_grpo_std_normalization", *LOSS),
    advice="For hard problems and for keeping variety: a group with one right answer in k counts as solved, so "
    "easy prompts stop pushing. Train with it first, then with grpo for pass@1.",
    functions=("pass_at_k.pass_at_k", "shared.losses.clipped"),
    related=("grpo", *PARTS),
    advantages=advantages,
    groups=True,
    conflicts=_conflicts,
)
