"""Losses of the policy and the critic, a value a token: importance ratios, surrogates, KL estimates, value loss.

The trainer multiplies by the step's token weights (`aggregate.token_weights`) and sums, so nothing here averages.
Masked tokens have loss 0 and no gradient, whatever their columns hold, and enter no sum or mean of a sequence.
`slime_core.builtin` binds these to `protocols.Loss`.

A ratio's logarithm is cut at ``LOG_LIMIT`` before it is exponentiated, so no ratio, square or sum of them overflows;
such tokens are counted and have no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

OBJECTIVES = ("clip", "cispo")
LEVELS = ("token", "sequence", "sequence_token")
KINDS = ("k1", "k2", "k3", "low_var_kl")
LOG_LIMIT = 20.0  # exp(20) = 4.9e8, the bound that verl and slime's MIS use
LOW_VAR_BOUND = 10.0
Metrics = dict[str, torch.Tensor]


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float = 0.0,
    objective: str = "clip",
    level: str = "token",
    mask: torch.Tensor | None = None,
    sample: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    rejected: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
    unbiased_kl: bool = False,
    entropy: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """weights * objective + kl_coef KL - entropy_coef H of each token, 0 where masked or rejected, [R].

    Args:
        log_probs: [R], of the weights in training, with gradient
        old_log_probs: [R]; where one optimizer step follows each rollout these are ``log_probs.detach()``, exactly
        advantages: [R]
        eps_clip, eps_clip_high, eps_clip_c, objective: see :func:`clipped` and :func:`cispo`
        level, sample: see :func:`importance_ratio`
        mask: [R], above 0 where the token trains; None trains all
        weights: [R], of the objective alone, without gradient (`corrections`)
        rejected: [R] bool, tokens that lose all terms
        ref_log_probs: [R], needed where ``kl_coef`` > 0
        kl_type, unbiased_kl: see :func:`kl`; the unbiased form takes the token's own ratio at every level
        entropy: [R], with gradient, needed where ``entropy_coef`` != 0

    Returns:
        The loss, and ``clip_fraction`` (1 where the clip is active), ``ppo_kl`` (old - new, in expectation
        KL(old || new)), ``ratio_overflow`` (1 where a ratio of the loss was cut), ``kl_loss`` where there is a
        reference, ``dual_clip_fraction`` with ``eps_clip_c``; all [R] and detached but the loss.

    Raises:
        ValueError: a coefficient without its tensor, an unknown name, ``eps_clip_c`` that is neither 0 nor above 1.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"policy objective {objective!r} is none of {OBJECTIVES}")
    mask = torch.ones_like(log_probs) if mask is None else mask
    trains = mask > 0
    log_probs, old_log_probs, advantages = (_where(trains, x) for x in (log_probs, old_log_probs, advantages))
    ratio = importance_ratio(log_probs, old_log_probs, mask, sample, level)
    if objective == "cispo":
        loss, metrics = cispo(ratio.value, log_probs, advantages, low=eps_clip, high=eps_clip_high)
    else:
        loss, metrics = clipped(ratio.value, advantages, low=eps_clip, high=eps_clip_high, dual=eps_clip_c)
    if weights is not None:
        loss = loss * weights
    overflow = ratio.overflow
    if ref_log_probs is not None:
        ref_log_probs = _where(trains, ref_log_probs)
        old = old_log_probs if unbiased_kl else None
        divergence = kl(log_probs, ref_log_probs, kl_type, old_log_probs=old)
        metrics["kl_loss"] = divergence.detach()
        overflow = overflow | _kl_overflow(log_probs, ref_log_probs, kl_type, ratio, unbiased_kl)
        if kl_coef != 0:
            loss = loss + kl_coef * divergence
    elif kl_coef != 0:
        raise ValueError("kl_coef is set, but there are no reference log-probs")
    if entropy_coef != 0:
        if entropy is None:
            raise ValueError("entropy_coef is set, but there is no entropy")
        loss = loss - entropy_coef * _where(trains, entropy)
    if rejected is not None:
        loss = torch.where(rejected, 0, loss)
    metrics |= {"ppo_kl": -ratio.log_ratio.detach(), "ratio_overflow": overflow.to(loss.dtype)}
    return loss, metrics


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float, dual: float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """The clipped surrogate as a loss, [R]: max(-r A, -clip(r, 1 - low, 1 + high) A).

    Schulman et al. 2017, eq. 7; ``high`` above ``low`` is clip-higher (Yu et al. 2025, DAPO, eq. 10). With ``dual``
    = c, a token of negative advantage loses at most -c A (Ye et al. 2020, dual-clip PPO, eq. 5).

    Raises:
        ValueError: ``dual`` that is neither 0 (off) nor above 1.
    """
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = plain.maximum(bounded)
    metrics = {"clip_fraction": (bounded > plain).to(loss.dtype)}
    if dual:
        if dual <= 1:
            raise ValueError(f"the dual clip is {dual}, and must be above 1 or 0 for off")
        worst = -dual * advantages
        cut = (advantages < 0) & (loss > worst)
        loss = torch.where(cut, worst, loss)
        metrics["dual_clip_fraction"] = cut.to(loss.dtype)
    return loss, metrics


def cispo(
    ratio: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, Metrics]:
    """-sg[clip(r, 1 - low, 1 + high)] A log p, [R] (MiniMax 2025, MiniMax-M1, eq. 4): no token loses its gradient.

    The canonical form has no lower bound, which is ``low`` = 1.
    """
    ratio = ratio.detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantages * log_probs, {"clip_fraction": (weight != ratio).to(log_probs.dtype)}


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
    own = log_ratio
    if level != "token":
        own = over_sequence(log_ratio, mask, sample, mean=True).to(log_ratio.dtype)
        if level == "sequence_token":
            own = own.detach() + (log_ratio - log_ratio.detach())
    value, overflow = bounded_exp(own)
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


def kl(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str, *, old_log_probs: torch.Tensor | None = None
) -> torch.Tensor:
    """Estimators of KL(policy || reference) from tokens of the policy (Schulman 2020, "Approximating KL divergence").

    With d = log_probs - ref_log_probs: k1 = d (unbiased, may be negative, its gradient does not depend on the
    reference); k2 = d^2 / 2; k3 = exp(-d) - 1 + d (unbiased, never negative); low_var_kl = k3 cut to [-10, 10].
    d is cut at -20 in the last two, where exp(-d) would overflow; a cut estimate has no gradient.

    With ``old_log_probs`` the tokens were drawn from an older policy, and the estimate is multiplied by the
    importance ratio exp(log_probs - old_log_probs), through which the gradient flows (DeepSeek-V3.2, 2025, "unbiased
    KL estimate"). low_var_kl is cut after that, as in THUDM/slime.

    Args:
        log_probs: [R], with gradient
        ref_log_probs: [R]
        kind: one of ``KINDS``
        old_log_probs: [R], of the policy that drew the tokens

    Raises:
        ValueError: another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"KL estimator {kind!r} is none of {KINDS}")
    d = log_probs - ref_log_probs
    if kind == "k1":
        value = d
    elif kind == "k2":
        value = d * d / 2
    else:
        d = d.clamp(min=-LOG_LIMIT)
        value = (-d).expm1() + d
    if old_log_probs is not None:
        value = value * bounded_exp(log_probs - old_log_probs)[0]
    return value.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else value


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    clip: float = 0.0,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """max((V - G)^2, (V_old + clip(V - V_old, -c, c) - G)^2) / 2, [R], as in OpenAI's PPO2 (Dhariwal et al. 2017).

    With the half, as PPO2, verl, TRL and OpenRLHF have it, so that the slope is V - G; THUDM/slime leaves it out.

    Args:
        values: [R], of the critic in training, with gradient
        old_values: [R], of the critic that made the advantages
        returns: [R], targets
        clip: c; 0 is off
        mask: [R], above 0 where the token trains; None trains all

    Returns:
        The loss, 0 where masked, and ``value_clip_fraction`` (1 where the clipped side is the larger) and
        ``value_error`` (|V - G|), detached.
    """
    trains = torch.ones_like(values, dtype=torch.bool) if mask is None else mask > 0
    values, old_values, returns = (_where(trains, x) for x in (values, old_values, returns))
    plain = (values - returns) ** 2
    metrics = {"value_error": (values - returns).detach().abs()}
    if not clip:
        return plain / 2, metrics
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
    metrics["value_clip_fraction"] = (bounded > plain).to(values.dtype)
    return plain.maximum(bounded) / 2, metrics


def sft_loss(log_probs: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, Metrics]:
    """Negative log-likelihood of each response token, [R]; 0 where masked."""
    return -(log_probs if mask is None else _where(mask > 0, log_probs)), {}


def _where(trains: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """0 where masked, and no gradient there, even of a value that is not finite."""
    return torch.where(trains, values, 0)


def _kl_overflow(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str, ratio: Ratio, unbiased: bool
) -> torch.Tensor:
    """Where the KL estimate or the ratio before it was cut, bool [R]."""
    cut = ratio.log_ratio > LOG_LIMIT if unbiased else torch.zeros_like(ratio.overflow)
    return cut | (log_probs - ref_log_probs < -LOG_LIMIT) if kind in ("k3", "low_var_kl") else cut
