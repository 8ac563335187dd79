"""KL to another model, a value a token: numbers for rewards and advantages, and a term of the loss with gradient.

The numbers need numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.float64]

KINDS = ("k1", "k2", "k3", "low_var_kl")
LOW_VAR_BOUND = 10.0  # of low_var_kl, as THUDM/slime


def reward_kl(log_probs: Floats, ref_log_probs: Floats, kind: str) -> Floats:
    """An estimate of KL(policy || reference) a token, float64 [R] (Schulman 2020, "Approximating KL divergence").

    With d = log_probs - ref_log_probs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; low_var_kl is k3 within
    [-10, 10]. In a reward k1 is unbiased and needs no gradient of its own. These are numbers; the loss's KL, through
    which gradients flow, is :func:`kl`.

    Raises:
        ValueError: another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"KL estimator {kind!r} is none of {KINDS}")
    d = np.asarray(log_probs, dtype=np.float64) - np.asarray(ref_log_probs, dtype=np.float64)
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    with np.errstate(over="ignore"):
        k3 = np.expm1(-d) + d
    return np.asarray(np.clip(k3, -LOW_VAR_BOUND, LOW_VAR_BOUND)) if kind == "low_var_kl" else k3


def minus_reverse_kl(log_probs: Floats, teacher_log_probs: Floats) -> NDArray[np.float32]:
    """A_t = -(lp_student - lp_teacher), float32 [R]: one token's reverse KL to the teacher as a cost.

    Tokens are the student's own (Agarwal et al. 2024, GKD; Gu et al. 2024, MiniLLM: reverse KL; Lu 2025, "On-Policy
    Distillation", with discount 0). No reward enters. THUDM/slime adds the term to another estimator only.
    """
    gap = np.asarray(log_probs, dtype=np.float64) - np.asarray(teacher_log_probs, dtype=np.float64)
    return np.asarray(-gap, dtype=np.float32)


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
    from slime_core.algorithms.shared.ratios import LOG_LIMIT, bounded_exp

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
