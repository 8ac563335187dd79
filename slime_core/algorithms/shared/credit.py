"""Credit assignment: where rewards lie, and which turns and tokens they are credited to.

A **turn** is a maximal run of trainable tokens of one sample: what the policy said before somebody else spoke. All
arrays over tokens are flat over the step; ``sample_of_token`` ascends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slime_core.algorithms.shared.groups import Comparison, means
from slime_core.algorithms.shared.returns import reward_to_go

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Compare = Callable[[Floats, Ints, Ints], Comparison]
"""value [N], group [N], rollout [N]: `groups.compare` with its options bound."""


def turn_of_token(loss_mask: NDArray[np.float32], sample_of_token: Ints) -> Ints:
    """The number of each token's turn in its sample, counted from 0; -1 where masked; int64 [R].

    Example: one sample with mask 1 1 0 1 has turns 0 0 -1 1
    """
    trained = np.asarray(loss_mask) > 0
    if len(trained) == 0:
        return np.zeros(0, dtype=np.int64)
    fresh = np.concatenate([[True], sample_of_token[1:] != sample_of_token[:-1]])
    begins = trained & (fresh | ~np.concatenate([[False], trained[:-1]]))
    so_far = np.cumsum(begins)
    at_start = np.maximum.accumulate(np.where(fresh, so_far - begins, 0))
    return np.where(trained, so_far - at_start - 1, -1).astype(np.int64)


def token_rewards(
    reward: Floats,
    loss_mask: NDArray[np.float32],
    sample_of_token: Ints,
    *,
    by_token: Mapping[int, Sequence[float]] | None = None,
    by_turn: Mapping[int, Sequence[float]] | None = None,
) -> Floats:
    """The reward of each trainable token, float64 [R]; 0 where masked.

    A sample in ``by_token`` brings one reward a response token. One at a masked token (a tool's success) goes to the
    last trainable token before it, which caused it; before the first trainable token nothing did, and it is left out.
    A sample in ``by_turn`` brings one a turn, which lies at the turn's last token. Any other sample has its scalar
    ``reward`` at its last trainable token. A sample with nothing trainable has none anywhere.

    Args:
        reward: [S], as in `grpo.grpo`: each fan-out sibling has its own
        loss_mask: [R], 0 or 1
        sample_of_token: [R], ascending
        by_token: sample number to one reward a response token; replaces ``reward``
        by_turn: sample number to one reward a turn; replaces ``reward``

    Raises:
        ValueError: a list of another length than the sample's tokens or turns.
    """
    turn = turn_of_token(loss_mask, sample_of_token)
    trained = turn >= 0
    out = np.zeros(len(turn), dtype=np.float64)
    end = _ends(trained, sample_of_token)
    scalar = ~np.isin(sample_of_token[end], [*(by_token or {}), *(by_turn or {})])
    out[end[scalar]] = np.asarray(reward, dtype=np.float64)[sample_of_token[end[scalar]]]
    for sample, values in (by_token or {}).items():
        part = _tokens(sample, sample_of_token)
        _same(len(values), part.stop - part.start, f"sample {sample} has {len(values)} token rewards for", "tokens")
        cause = np.maximum.accumulate(np.where(trained[part], np.arange(len(values)), -1))
        caused = cause >= 0
        np.add.at(out[part], cause[caused], np.asarray(values, dtype=np.float64)[caused])
    for sample, values in (by_turn or {}).items():
        part = _tokens(sample, sample_of_token)
        turns = turn[part]
        if not trained[part].any():
            continue
        _same(len(values), int(turns.max()) + 1, f"sample {sample} has {len(values)} turn rewards for", "turns")
        last = np.flatnonzero((turns >= 0) & (np.append(turns[1:], -1) != turns))
        out[part][last] = np.asarray(values, dtype=np.float64)
    return out


def _ends(trained: NDArray[np.bool_], sample_of_token: Ints) -> Ints:
    """Where the last trainable token of each sample lies that has one."""
    rows = np.flatnonzero(trained)
    sample = sample_of_token[rows]
    return rows[np.append(sample[1:] != sample[:-1], True)] if len(rows) else rows


def _tokens(sample: int, sample_of_token: Ints) -> slice:
    return slice(*np.searchsorted(sample_of_token, [sample, sample + 1]).tolist())


def _same(count: int, expected: int, what: str, unit: str) -> None:
    if count != expected:
        raise ValueError(f"{what} {expected} {unit}")


def discounts(loss_mask: NDArray[np.float32], sample_of_token: Ints, factor: float, level: str) -> Floats:
    """The discount after each token, float64 [R]: ``factor`` each, or with ``level`` "turn" at ends of turns only.

    With "turn" a turn is one step: between its tokens nothing is discounted, so ``factor`` counts turns (the
    turn-level decision process of multi-turn agents; Zhou et al. 2024, ArCHer, have its two levels).
    """
    if level != "turn":
        return np.full(len(sample_of_token), factor, dtype=np.float64)
    turn = turn_of_token(loss_mask, sample_of_token)
    inside = (turn >= 0) & (np.append(turn[1:], -1) == turn)
    inside[:-1] &= sample_of_token[1:] == sample_of_token[:-1]
    return np.where(inside, 1.0, factor)


def group_credit(
    rewards: Floats,
    total: Floats,
    loss_mask: NDArray[np.float32],
    group: Ints,
    rollout: Ints,
    sample_of_token: Ints,
    *,
    level: str,
    gamma: float,
    compare: Compare,
) -> NDArray[np.float32]:
    """Group-relative advantages of turns or tokens, float32 [R]; 0 where masked.

    A token's value is its discounted reward-to-go: with ``level`` "turn" that of its turn, G_k = sum over j >= k of
    gamma^(j - k) rho_j, the same for the turn's tokens; with "token" its own, gamma counting trainable tokens. It is
    compared with the same turn of its group's other rollouts: a baseline (and scale) per (group, turn), over the
    rollouts that have that turn (Shao et al. 2024, DeepSeekMath, 4.1.3, credit the steps of a response by the sum of
    what follows; a baseline per turn is that of multi-turn RLOO). For "token" a rollout's value there is the mean over
    its turn's tokens. A turn that one rollout alone has is centred, so at the level "turn" it teaches nothing.

    With one turn a sample and one reward at its end (gamma 1) both levels are exactly the trajectory's advantages. A
    sample with nothing trainable counts in turn 0 with its ``total``.

    Args:
        rewards: [R], of :func:`token_rewards`
        total: [S], the whole reward of each sample
        group, rollout: [S], ids
        level: "turn" or "token"
        compare: `groups.compare` with its options bound

    Raises:
        ValueError: another level, or a rollout id that occurs in two groups.
    """
    if level not in ("turn", "token"):
        raise ValueError(f"credit below a trajectory is by 'turn' or 'token', not {level!r}")
    turn = turn_of_token(loss_mask, sample_of_token)
    rows = np.flatnonzero(turn >= 0)
    sample = sample_of_token[rows]
    discount = discounts(loss_mask, sample_of_token, gamma, level)
    value = reward_to_go(rewards, loss_mask, sample_of_token, discount)[rows]
    begins = np.append(True, (sample[1:] != sample[:-1]) | (turn[rows][1:] != turn[rows][:-1]))[: len(rows)]
    unit = np.cumsum(begins) - 1  # a turn of a sample
    if level == "turn":
        value = value[begins][unit]
    silent = np.setdiff1d(np.arange(len(group)), sample)
    of_unit = means(value, unit) if len(rows) else np.zeros(0)
    units = np.concatenate([of_unit, np.asarray(total, dtype=np.float64)[silent]])
    sample_of_unit = np.concatenate([sample[begins], silent])
    turn_of_unit = np.concatenate([turn[rows][begins], np.zeros(len(silent), dtype=np.int64)])
    comparison = compare(units, *_cells(np.asarray(group), np.asarray(rollout), sample_of_unit, turn_of_unit))
    out = np.zeros(len(sample_of_token), dtype=np.float32)
    out[rows] = Comparison(comparison.baseline[unit], comparison.scale[unit]).of(value)
    return out


def _cells(group: Ints, rollout: Ints, sample: Ints, turn: Ints) -> tuple[Ints, Ints]:
    """An id a (group, turn) and one a (rollout, turn)."""
    span = int(turn.max(initial=0)) + 1
    group_of, rollout_of = (np.unique(ids, return_inverse=True)[1] for ids in (group, rollout))
    return group_of[sample] * span + turn, rollout_of[sample] * span + turn
