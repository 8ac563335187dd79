"""Losses of the policy and the critic, a value a token: clipped surrogate, CISPO, value loss, supervised loss.

The trainer multiplies by the step's token weights (`aggregate.token_weights`) and sums, so nothing here averages.
Masked tokens have loss 0 and no gradient, whatever their columns hold, and enter no sum or mean of a sequence.
`slime_core.builtin` binds these to `protocols.Loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slime_core.algorithms.shared.kl import kl
from slime_core.algorithms.shared.ratios import LOG_LIMIT, Ratio, importance_ratio

OBJECTIVES = ("clip", "cispo")
Metrics = dict[str, torch.Tensor]


@dataclass(slots=True, frozen=True, kw_only=True)
class PolicyTerms:
    """What the policy's loss consists of, from the [train] section.

    Example: PolicyTerms(eps_clip=0.2, eps_clip_high=0.28, kl_coef=1e-3)
    """

    eps_clip: float  # this and the next three: see `clipped` and `cispo`
    eps_clip_high: float
    eps_clip_c: float = 0.0
    objective: str = "clip"
    level: str = "token"  # see `ratios.importance_ratio`
    kl_coef: float = 0.0
    kl_type: str = "k3"  # this and the next: see `kl.kl`; the unbiased form takes the token's own ratio at every level
    unbiased_kl: bool = False
    entropy_coef: float = 0.0

    @classmethod
    def of(cls, train: Any) -> PolicyTerms:
        """Those of a settled [train] section."""
        return cls(
            eps_clip=train.eps_clip,
            eps_clip_high=train.eps_clip_high,
            eps_clip_c=train.eps_clip_c,
            objective=train.policy_objective,
            level=train.importance_level,
            kl_coef=train.kl_loss_coef,
            kl_type=train.kl_loss_type,
            unbiased_kl=train.use_unbiased_kl,
            entropy_coef=train.entropy_coef,
        )


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    terms: PolicyTerms,
    *,
    mask: torch.Tensor | None = None,
    sample: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    rejected: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """weights * objective + kl_coef KL - entropy_coef H of each token, 0 where masked or rejected, [R].

    Args:
        log_probs: [R], of the weights in training, with gradient
        old_log_probs: [R]; where one optimizer step follows each rollout these are ``log_probs.detach()``, exactly
        advantages: [R]
        mask: [R], above 0 where the token trains; None trains all
        sample: [R] int64, a number a sequence; see `ratios.importance_ratio`
        weights: [R], of the objective alone, without gradient (`corrections`)
        rejected: [R] bool, tokens that lose all terms
        ref_log_probs: [R], needed where ``kl_coef`` > 0
        entropy: [R], with gradient, needed where ``entropy_coef`` != 0

    Returns:
        The loss, and ``clip_fraction`` (1 where the clip is active), ``ppo_kl`` (old - new, in expectation
        KL(old || new)), ``ratio_overflow`` (1 where a ratio of the loss was cut), ``kl_loss`` where there is a
        reference, ``dual_clip_fraction`` with ``eps_clip_c``; all [R] and detached but the loss.

    Raises:
        ValueError: a coefficient without its tensor, an unknown name, ``eps_clip_c`` that is neither 0 nor above 1.
    """
    if terms.objective not in OBJECTIVES:
        raise ValueError(f"policy objective {terms.objective!r} is none of {OBJECTIVES}")
    mask = torch.ones_like(log_probs) if mask is None else mask
    trains = mask > 0
    log_probs, old_log_probs, advantages = (_where(trains, x) for x in (log_probs, old_log_probs, advantages))
    ratio = importance_ratio(log_probs, old_log_probs, mask, sample, terms.level)
    low, high = terms.eps_clip, terms.eps_clip_high
    if terms.objective == "cispo":
        loss, metrics = cispo(ratio.value, log_probs, advantages, low=low, high=high)
    else:
        loss, metrics = clipped(ratio.value, advantages, low=low, high=high, dual=terms.eps_clip_c)
    if weights is not None:
        loss = loss * weights
    overflow = ratio.overflow
    if ref_log_probs is not None:
        ref_log_probs = _where(trains, ref_log_probs)
        old = old_log_probs if terms.unbiased_kl else None
        divergence = kl(log_probs, ref_log_probs, terms.kl_type, old_log_probs=old)
        metrics["kl_loss"] = divergence.detach()
        overflow = overflow | _kl_overflow(log_probs, ref_log_probs, terms.kl_type, ratio, terms.unbiased_kl)
        if terms.kl_coef != 0:
            loss = loss + terms.kl_coef * divergence
    elif terms.kl_coef != 0:
        raise ValueError("kl_coef is set, but there are no reference log-probs")
    if terms.entropy_coef != 0:
        if entropy is None:
            raise ValueError("entropy_coef is set, but there is no entropy")
        loss = loss - terms.entropy_coef * _where(trains, entropy)
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


def dpo_loss(
    log_probs: torch.Tensor, advantages: torch.Tensor, margins: torch.Tensor, train: Any
) -> tuple[torch.Tensor, Metrics]:
    """The loss of a token's pair, with the gradient -A_t d(log pi_t); see `slime_core.algorithms.dpo`.

    Args:
        log_probs: [R], with a gradient
        advantages: [R], of `dpo.advantages`
        margins: [R], the pair's margin h, at all tokens of both responses

    Metrics, each token has its pair's: ``dpo/margin``, and ``dpo/accuracy``, 1 where the margin is above 0.
    """
    if train.dpo_objective == "ipo":
        value = (margins - 1 / (2 * train.dpo_beta)) ** 2
    else:
        smoothing = train.dpo_label_smoothing
        agrees, disagrees = (torch.nn.functional.logsigmoid(sign * margins) for sign in (1, -1))
        value = -(1 - smoothing) * agrees - smoothing * disagrees
    surrogate = -advantages * log_probs
    metrics = {"dpo/margin": margins, "dpo/accuracy": (margins > 0).to(margins.dtype)}
    return value + surrogate - surrogate.detach(), metrics
