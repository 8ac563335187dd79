"""Log-probs of two policies in, an estimate of their KL divergence a token out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KINDS = ("k1", "k2", "k3")


def kl(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimators of KL(policy || reference) from tokens of the policy (Schulman 2020, "Approximating KL divergence").

    With d = log_probs - ref_log_probs: k1 = d (unbiased, may be negative, its gradient does not depend on the
    reference); k2 = d^2 / 2; k3 = exp(-d) - 1 + d (unbiased, never negative).

    Args:
        log_probs: [R], with gradient
        ref_log_probs: [R]
        kind: "k1", "k2" or "k3"

    Raises:
        ValueError: another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"KL estimator {kind!r} is none of {KINDS}")
    d = log_probs - ref_log_probs
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    return (-d).expm1() + d
