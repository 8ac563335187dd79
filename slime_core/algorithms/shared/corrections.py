"""Correction of the gap between engine and trainer: weights and rejections of tokens.

Tokens are drawn by an engine whose log-probs differ a little from the trainer's for the same weights. With
gap = log trainer - log engine of a token, a ratio is

    token       exp(gap)
    sequence    exp(sum of gap over the sequence's trainable tokens)
    geometric   exp(mean of gap over them)

Weights multiply the policy term. A rejected token loses all its terms, and so only numerators: denominators stay
those of the optimizer step, so rejecting one token never makes another heavier. Masked tokens enter no statistic;
they weigh 1 and are never rejected. Nothing here carries a gradient.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from slime_core.algorithms.shared.kl import kl
from slime_core.algorithms.shared.ratios import bounded_exp, over_sequence

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")


class Weights(NamedTuple):
    """Importance weights of a micro-batch, all [R]."""

    value: torch.Tensor
    clipped: torch.Tensor  # bool, where a bound changed the weight
    overflow: torch.Tensor  # bool, where the ratio's logarithm was cut at 20


def engine_gap(trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log trainer - log engine of each trainable token, 0 of the others; [R], detached."""
    return torch.where(mask > 0, (trainer - engine).detach(), 0)


def at_level(gap: torch.Tensor, mask: torch.Tensor, sample: torch.Tensor | None, level: str) -> torch.Tensor:
    """The gap of what ``level`` names, at each of its trainable tokens; 0 where masked. [R].

    Args:
        gap: [R], of tokens
        mask: [R], above 0 where the token trains
        sample: [R] int64, a number a sequence; only "token" does without
        level: "token", "sequence" or "geometric"

    Raises:
        ValueError: another level, or a sequence's level without ``sample``.
    """
    if level not in LEVELS:
        raise ValueError(f"correction level {level!r} is none of {LEVELS}")
    if level == "token":
        return gap
    level_gap = over_sequence(gap, mask, sample, mean=level == "geometric").to(gap.dtype)
    return torch.where(mask > 0, level_gap, 0)


def importance_weights(
    gap: torch.Tensor,
    mask: torch.Tensor,
    sample: torch.Tensor | None,
    *,
    level: str = "token",
    mode: str = "truncate",
    lower: float = 0.0,
    upper: float,
) -> Weights:
    """Weights by importance sampling from engine to trainer.

    ``truncate``: min(ratio, upper) (Yao et al. 2025, TIS). ``clip``: the ratio within [lower, upper]. ``mask``: the
    ratio inside these bounds, 0 outside (Liu, Li et al. 2025, MIS; at token level Ling Team 2025, IcePop).

    Raises:
        ValueError: another level or mode, or ``lower`` above ``upper``.
    """
    if mode not in MODES:
        raise ValueError(f"correction mode {mode!r} is none of {MODES}")
    if not 0 <= lower <= upper:
        raise ValueError(f"the bounds of importance weights are {lower} and {upper}")
    ratio, overflow = bounded_exp(at_level(gap, mask, sample, level))
    trains = mask > 0
    outside = (ratio > upper) | (ratio < lower) if mode != "truncate" else ratio > upper
    if mode == "mask":
        value = torch.where(outside, 0, ratio)
    else:
        value = ratio.clamp(lower if mode == "clip" else None, upper)
    return Weights(torch.where(trains, value, 1), outside & trains, overflow)


def mean_weight(weights: torch.Tensor, mask: torch.Tensor) -> float:
    """Mean over the trainable tokens, in float64; 1 where nothing trains or all weights are 0.

    Taken over a whole optimizer step, weights divided by it have mean 1 there, whatever the micro-batches.
    """
    trains = mask > 0
    total = float(torch.where(trains, weights, 0).sum(dtype=torch.float64))
    return total / float(trains.sum()) if total > 0 else 1.0


def rejected(
    gap: torch.Tensor,
    mask: torch.Tensor,
    sample: torch.Tensor | None,
    *,
    level: str = "geometric",
    lower: float = 0.0,
    upper: float,
) -> torch.Tensor:
    """Where the ratio lies outside [lower, upper] (rejection sampling; Liu, Li et al. 2025, MIS), bool [R].

    Args:
        gap, mask, sample: as in :func:`at_level`
        level: what is rejected as one: a token, or a sequence by the product or the geometric mean of its ratios
        lower: 0 stands for 1 / upper
        upper: above 0

    Raises:
        ValueError: another level, or ``lower`` above ``upper``.
    """
    lower = lower or 1 / upper
    if lower > upper:
        raise ValueError(f"rejection keeps ratios within {lower} and {upper}, so none")
    level_gap = at_level(gap, mask, sample, level)
    return ((level_gap > math.log(upper)) | (level_gap < math.log(lower))) & (mask > 0)


def vetoed(gap: torch.Tensor, mask: torch.Tensor, sample: torch.Tensor | None, threshold: float) -> torch.Tensor:
    """Where the sequence has any trainable token whose ratio is below ``threshold`` (above 0), bool [R]."""
    below = (gap < math.log(threshold)).to(gap.dtype)
    return (over_sequence(below, mask, sample, mean=False) > 0) & (mask > 0)


def off_policy(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sample: torch.Tensor | None,
    delta: float,
) -> torch.Tensor:
    """Where the advantage is negative and the sequence's mean of old - new exceeds ``delta``, bool [R].

    Off-policy sequence masking (DeepSeek-V3.2, 2025): what the policy has already made unlikely is not pushed
    further. The policy term is dropped there, KL and entropy stay.
    """
    moved = over_sequence((old_log_probs - log_probs).detach(), mask, sample, mean=True)
    return (moved > delta) & (advantages < 0) & (mask > 0)


def mismatch(trainer: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """How far engine and trainer are apart, per-token metrics [R]: |gap|, and k3 of KL(engine || trainer)."""
    gap = engine_gap(trainer, engine, mask)
    return {"train_rollout_logprob_abs_diff": gap.abs(), "mismatch_k3": kl(-gap, torch.zeros_like(gap), "k3")}
