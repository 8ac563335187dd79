"""Returns of a dialogue's turns from their rewards. Numbers only.

    mode              R_t, with r_i the reward of turn i and T turns            (0, 0, 2.3), gamma 0.4
    discounted        sum over i >= t of gamma^(i - t) r_i                      0.368  0.92  2.3
    trajectory        sum over all i of gamma^i r_i, the same for every turn    0.368  0.368 0.368
    max_future        max over i >= t of gamma^(i - t) r_i                      0.368  0.92  2.3
    potential         sum over i >= t of gamma^(i - t) (r_i - r_(i - 1))        0.368  0.92  2.3

discounted is Kevin's (Baronio et al. 2025), trajectory TritonForge's, potential a reward for improvement alone
(differences of a potential, Ng et al. 1999; r before the first turn is 0): with gamma 1 it is what the dialogue still
gains, r_(T - 1) - r_(t - 1).

**A dialogue that ended early** counts as if its last turn had been repeated up to ``length``, where one is given.
Then ending is worth exactly what going on at the same reward is worth: no reward steps at a threshold that ends a
dialogue, and there is nothing to gain from staying just below it. Without ``length`` later turns are worth nothing.

**A turn that could not be judged** (None) makes every return unknown (None) that it enters with a weight other than 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

Mode = Literal["discounted", "trajectory", "max_future", "potential"]
MODES: tuple[Mode, ...] = ("discounted", "trajectory", "max_future", "potential")
Known = Sequence[float]


def returns(
    rewards: Sequence[float | None], mode: Mode = "discounted", gamma: float = 0.4, length: int = 0
) -> list[float | None]:
    """R_t of each turn; None where a turn that counts could not be judged.

    Args:
        rewards: r_i of each turn, None where nothing could be judged
        mode: see the module
        gamma: 0 <= gamma <= 1
        length: turns that a dialogue may have, at least ``len(rewards)``; 0: what ended early is worth no more

    Example:
        returns([0.0, 0.0, 2.3])                                  # [0.368, 0.92, 2.3]
        returns([1.3], length=3)                                  # [2.028]: 1.3 (1 + 0.4 + 0.16)
        returns([0.1, None])                                      # [None, None]

    Raises:
        ValueError: gamma outside [0, 1], a length below the number of turns, or an unknown mode.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is from 0 to 1, not {gamma}")
    if length and length < len(rewards):
        raise ValueError(f"a dialogue of {len(rewards)} turns is longer than {length}")
    if mode not in MODES:
        raise ValueError(f"the return mode {mode!r} is none of {', '.join(MODES)}")
    if not rewards:
        return []
    whole = [*rewards, *[rewards[-1]] * (length - len(rewards))]
    if mode == "trajectory":
        return [_return_from(whole, 0, gamma, _discounted)] * len(rewards)
    if mode == "potential":
        whole = [_difference(whole, turn) for turn in range(len(whole))]
    horizon = _best if mode == "max_future" else _discounted
    return [_return_from(whole, turn, gamma, horizon) for turn in range(len(rewards))]


def padded(
    rewards: Sequence[float | None], mode: Mode = "discounted", gamma: float = 0.4, length: int = 1
) -> list[float | None]:
    """R_t of every turn up to ``length``, those after the end of the dialogue too, its last reward repeated.

    Example:
        padded([1.0], length=3)                                   # [1.56, 1.4, 1.0]
    """
    whole = [*rewards, *[rewards[-1]] * (length - len(rewards))]
    return returns(whole, mode, gamma)


def _return_from(
    rewards: Sequence[float | None], turn: int, gamma: float, horizon: Callable[[Known, float], float]
) -> float | None:
    """The return from a turn on; turns that weigh nothing (gamma 0) need not be known."""
    ahead = rewards[turn : turn + 1] if gamma == 0 else rewards[turn:]
    rewards_ahead = [reward for reward in ahead if reward is not None]
    return horizon(rewards_ahead, gamma) if len(rewards_ahead) == len(ahead) else None


def _discounted(rewards: Known, gamma: float) -> float:
    total = 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
    return total


def _best(rewards: Known, gamma: float) -> float:
    return max(gamma**step * reward for step, reward in enumerate(rewards))


def _difference(rewards: Sequence[float | None], turn: int) -> float | None:
    now, before = rewards[turn], rewards[turn - 1] if turn else 0.0
    return None if now is None or before is None else now - before
