"""Discounted returns, GAE and whitening of rewards and values a token, over trainable tokens alone.

A masked token (a tool's answer) is no step of the policy: sums skip it, and a response ends at its last trainable
token. Discounts may differ by token, so that a turn can be one step (`credit.discounts`). Everything is float64.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def reward_to_go(
    rewards: Floats, loss_mask: NDArray[np.float32], sample_of_token: Ints, discount: Floats | float = 1.0
) -> Floats:
    """G_t = rho_t + discount_t G_next, float64 [R], where next is the sample's next trainable token; 0 where masked.

    With one discount gamma this is sum over s >= t of gamma^(s - t) rho_s, counting trainable tokens: the return of
    REINFORCE++ (Hu et al. 2025), with KL inside rho. THUDM/slime discounts over masked tokens too.

    Args:
        rewards: [R]; those of masked tokens do not enter
        loss_mask: [R], 0 or 1
        sample_of_token: [R], ascending
        discount: [R] or one number: the weight of what follows the token
    """
    trained = np.flatnonzero(np.asarray(loss_mask) > 0)
    factor = np.broadcast_to(np.asarray(discount, dtype=np.float64), len(sample_of_token))
    out = np.zeros(len(sample_of_token), dtype=np.float64)
    out[trained] = _backward(np.asarray(rewards, np.float64)[trained], factor[trained], sample_of_token[trained])
    return out


def gae(
    rewards: Floats,
    values: Floats,
    loss_mask: NDArray[np.float32],
    sample_of_token: Ints,
    gamma: Floats | float = 1.0,
    lam: Floats | float = 1.0,
) -> tuple[Floats, Floats]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): advantages and returns, float64 [R] each.

    Over a sample's trainable tokens t, with V after the last one 0 (a truncated response is not bootstrapped):
    delta_t = rho_t + gamma V_next - V_t, A_t = delta_t + gamma lambda A_next, return_t = A_t + V_t.
    At masked tokens A is 0 and the return is V, so a value loss that forgot the mask would be 0 there.

    THUDM/slime runs GAE through masked tokens and puts the reward on the last token even where that one is masked.

    Args:
        rewards: [R]
        values: [R]
        loss_mask: [R], 0 or 1
        sample_of_token: [R], ascending
        gamma: [R] or one number
        lam: [R] or one number
    """
    trained = np.flatnonzero(np.asarray(loss_mask) > 0)
    total, sample = len(sample_of_token), sample_of_token[trained]
    value = np.asarray(values, dtype=np.float64)
    now = value[trained]
    following = np.zeros_like(now)
    following[:-1] = np.where(sample[1:] == sample[:-1], now[1:], 0.0)
    discount = np.broadcast_to(np.asarray(gamma, dtype=np.float64), total)[trained]
    decay = np.broadcast_to(np.asarray(lam, dtype=np.float64), total)[trained]
    delta = np.asarray(rewards, dtype=np.float64)[trained] + discount * following - now
    advantages = np.zeros(total, dtype=np.float64)
    advantages[trained] = _backward(delta, discount * decay, sample)
    return advantages, advantages + value


def _backward(x: Floats, factor: Floats, sample: Ints) -> Floats:
    """y_j = x_j + factor_j y_(j+1) within each run of equal ``sample``; all samples at once, from their ends."""
    if len(x) == 0:
        return np.zeros(0, dtype=np.float64)
    last = np.append(np.flatnonzero(sample[1:] != sample[:-1]), len(x) - 1)
    run = np.repeat(np.arange(len(last)), np.diff(last, prepend=-1))
    from_end = last[run] - np.arange(len(x))
    order = np.argsort(from_end, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(from_end))])
    carried, y = np.zeros(len(last)), np.empty(len(x))
    for start, stop in pairwise(bounds.tolist()):
        rows = order[start:stop]
        carried[run[rows]] = y[rows] = x[rows] + factor[rows] * carried[run[rows]]
    return y


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
    trainable = np.asarray(values, dtype=np.float64)[trained]
    if len(trainable) < 2:
        return out
    centred = trainable - trainable.mean()
    centred -= centred.mean()  # what the first mean rounded: values that tie become exactly 0
    out[trained] = centred / np.sqrt(centred @ centred / (len(centred) - 1) + EPSILON)
    return out
