"""Importance ratios of new to old probability, of tokens and of sequences, and statistics over a sequence's tokens.

A ratio's logarithm is cut at ``LOG_LIMIT`` before it is exponentiated, so no ratio, square or sum of them overflows;
such tokens are counted and have no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LEVELS = ("token", "sequence", "sequence_token")
LOG_LIMIT = 20.0  # exp(20) = 4.9e8, the bound that verl and slime's MIS use


class Ratio(NamedTuple):
    """Importance ratios of a micro-batch, all [R]."""

    value: torch.Tensor  # the ratio at the level asked for, with gradient
    log_ratio: torch.Tensor  # of each token, log new - log old, with gradient; 0 where masked
    overflow: torch.Tensor  # bool, where the ratio was cut


def importance_ratio(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    mask: torch.Tensor,
    sample: torch.Tensor | None,
    level: str,
) -> Ratio:
    """Ratios of new to old probability.

    ``token``: exp(new - old) of each token (Schulman et al. 2017).
    ``sequence``: s = exp(mean of new - old over the sequence's trainable tokens), the same at all its tokens, with
    gradient through all of them (Zheng et al. 2025, GSPO, eq. 7).
    ``sequence_token``: sg[s] * exp(new - sg[new]), the value of s with the token's own gradient (the same, eq. 14).

    Args:
        log_probs: [R], with gradient
        old_log_probs: [R], without
        mask: [R], above 0 where the token trains
        sample: [R] int64, a number a sequence; only ``token`` does without
        level: one of ``LEVELS``

    Raises:
        ValueError: another level, or a sequence's level without ``sample``.
    """
    if level not in LEVELS:
        raise ValueError(f"importance level {level!r} is none of {LEVELS}")
    log_ratio = torch.where(mask > 0, log_probs - old_log_probs, 0)
    level_ratio = log_ratio
    if level != "token":
        level_ratio = over_sequence(log_ratio, mask, sample, mean=True).to(log_ratio.dtype)
        if level == "sequence_token":
            level_ratio = level_ratio.detach() + (log_ratio - log_ratio.detach())
    value, overflow = bounded_exp(level_ratio)
    return Ratio(value, log_ratio, overflow)


def over_sequence(
    values: torch.Tensor, mask: torch.Tensor, sample: torch.Tensor | None, *, mean: bool
) -> torch.Tensor:
    """Sum or mean of the trainable values of each token's sequence, [R] in float64, with gradient.

    A sequence with no trainable token gives 0.

    Args:
        values: [R]
        mask: [R], above 0 where the token trains
        sample: [R] int64, a number a sequence, in any order
        mean: divide by the sequence's trainable tokens

    Raises:
        ValueError: no ``sample``.
    """
    if sample is None:
        raise ValueError("statistics of a sequence need the sequence of each token")
    trains = mask > 0
    numbers, index = torch.unique(sample, return_inverse=True)
    zeros = torch.zeros(len(numbers), dtype=torch.float64, device=values.device)
    total = zeros.index_add(0, index, torch.where(trains, values, 0).double())
    if mean:
        total = total / zeros.index_add(0, index, trains.double()).clamp(min=1)
    return total[index]


def bounded_exp(log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp of a log-ratio cut at ``LOG_LIMIT``, and where it was cut; NaN stays NaN."""
    return log_ratio.clamp(max=LOG_LIMIT).exp(), log_ratio > LOG_LIMIT
