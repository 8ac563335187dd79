"""Log-probs of two policies in, an estimate of their KL divergence a token out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.algo.ratios import LOG_LIMIT, bounded_exp

if TYPE_CHECKING:
    import torch

KINDS = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_BOUND = 10.0


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
