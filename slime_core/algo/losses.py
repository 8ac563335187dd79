"""Log-probs and advantages of response tokens in, a loss value a token and named per-token metrics out.

The trainer multiplies by the step's token weights (`aggregate.token_weights`) and sums, so nothing here averages.
`slime_core.builtin` binds these to `protocols.Loss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.algo.kl import kl

if TYPE_CHECKING:
    import torch


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    ref_log_probs: torch.Tensor | None = None,
    kl_coef: float = 0.0,
    kl_type: str = "k3",
    entropy: torch.Tensor | None = None,
    entropy_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate (Schulman et al. 2017, eq. 7, as a loss), with KL and entropy terms, [R].

    loss = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A) + kl_coef KL - entropy_coef H, r = exp(new - old).

    Args:
        log_probs: [R], of the weights in training, with gradient
        old_log_probs: [R]; where one optimizer step follows each rollout these are ``log_probs.detach()``, exactly
        advantages: [R]
        ref_log_probs: [R], needed where ``kl_coef`` > 0
        entropy: [R], with gradient, needed where ``entropy_coef`` != 0

    Returns:
        The loss [R], and ``clip_fraction`` (1 where the clip is active), ``ppo_kl`` (old - new, in expectation
        KL(old || new)), and ``kl_loss`` where there is a reference; all [R] and detached but the loss.

    Raises:
        ValueError: a coefficient without its tensor.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    loss = plain.maximum(clipped)
    metrics = {"clip_fraction": (clipped > plain).to(loss.dtype), "ppo_kl": -log_ratio.detach()}
    if kl_coef != 0 and ref_log_probs is None:
        raise ValueError("kl_coef is set, but there are no reference log-probs")
    if ref_log_probs is not None:
        divergence = kl(log_probs, ref_log_probs, kl_type)
        metrics["kl_loss"] = divergence.detach()
        if kl_coef != 0:
            loss = loss + kl_coef * divergence
    if entropy_coef != 0:
        if entropy is None:
            raise ValueError("entropy_coef is set, but there is no entropy")
        loss = loss - entropy_coef * entropy
    return loss, metrics


def sft_loss(log_probs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of each response token, [R]."""
    return -log_probs, {}
