"""`slime.utils.ppo_utils`: losses, KL, returns and log-probs of one rank, over `slime_core.algorithms.shared`.

The core's own estimators count trainable tokens alone; :func:`get_reinforce_plus_plus_returns` and GAE here run
through masked tokens, as slime's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime_core.algorithms.shared.kl import LOW_VAR_BOUND, kl
from slime_core.algorithms.shared.logprobs import logits_log_probs
from slime_core.algorithms.shared.losses import cispo, clipped
from slime_core.algorithms.shared.ratios import bounded_exp

Tensor = torch.Tensor


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """KL to a base model a token, in float32, times an importance ratio; ``low_var_kl`` is cut to [-10, 10] last.

    Raises:
        ValueError: a type that `slime_core.algorithms.shared.kl.kl` does not know.
    """
    low_var = kl_loss_type == "low_var_kl"
    estimate = kl(log_probs.float(), log_probs_base.float(), "k3" if low_var else kl_loss_type)
    if importance_ratio is not None:
        estimate = importance_ratio * estimate
    return estimate.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if low_var else estimate


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate and where it is clipped, by old - new log-probs ``ppo_kl``.

    Raises:
        ValueError: ``eps_clip_c`` that is not above 1.
    """
    if eps_clip_c is not None and eps_clip_c <= 1:
        raise ValueError(f"eps_clip_c is {eps_clip_c}, and must be above 1")
    ratio, _ = bounded_exp(-ppo_kl)
    loss, metrics = clipped(ratio, advantages, low=eps_clip, high=eps_clip_high, dual=eps_clip_c or 0.0)
    return loss, metrics["clip_fraction"]


def compute_cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """CISPO (`slime_core.algorithms.shared.losses.cispo`), and where the ratio is clipped."""
    ratio, _ = bounded_exp(-ppo_kl)
    loss, metrics = cispo(ratio, log_probs, advantages, low=eps_clip, high=eps_clip_high)
    return loss, metrics["clip_fraction"]


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """The mean of old - new over each sequence's trainable tokens, at all of its tokens, [R]."""
    means = _moved(full_log_probs, full_old_log_probs, loss_masks)
    return torch.cat([mean.expand_as(local) for mean, local in zip(means, local_log_probs, strict=True)])


def compute_opsm_mask(
    args: Any,
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Off-policy sequence masking: 0 where the advantage is negative and the sequence moved by ``args.opsm_delta``.

    The second value is the sum over sequences of the share of their tokens that are masked so.
    """
    means = _moved(full_log_probs, full_old_log_probs, loss_masks)
    dropped = [
        ((advantage < 0) & (mean > args.opsm_delta)).float() for advantage, mean in zip(advantages, means, strict=True)
    ]
    shares = [drop.sum() / mask.sum().clamp(min=1) for drop, mask in zip(dropped, loss_masks, strict=True)]
    return 1 - torch.cat(dropped), torch.stack(shares).sum()


def _moved(new: Sequence[Tensor], old: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    return [
        ((before - after) * mask).sum() / mask.sum().clamp(min=1)
        for after, before, mask in zip(new, old, masks, strict=True)
    ]


def get_grpo_returns(rewards: Tensor | Sequence[float], kl: Sequence[Tensor]) -> list[Tensor]:
    """Each sample's reward at all of its tokens, which ``kl`` counts."""
    return [torch.ones_like(values) * reward for values, reward in zip(kl, rewards, strict=True)]


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor | Sequence[float], kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Each sample's reward less ``kl_coef`` times the KL of each token, before whitening."""
    return [torch.ones_like(values) * reward - kl_coef * values for values, reward in zip(kl, rewards, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: Tensor | Sequence[float],
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Returns of REINFORCE++: -``kl_coef`` KL at trainable tokens, the reward at the last of them, discounted.

    Raises:
        ValueError: a sample with nothing to train.
    """
    returns = []
    for number, (reward, values, mask) in enumerate(zip(rewards, kl, loss_masks, strict=True)):
        if not mask.any():
            raise ValueError(f"sample {number} has no trainable token")
        rho = -kl_coef * values * mask
        rho[mask.nonzero()[-1, 0]] += reward
        returns.append(chunked_discounted_returns(rho[None], gamma)[0])
    return returns


def chunked_discounted_returns(rewards: Tensor, discount: float, chunk_size: int = 128) -> Tensor:
    """y_t = sum over s >= t of discount^(s - t) x_s along the last dimension of [B, T].

    By doubling: sums over 1, 2, 4, ... tokens (Hillis and Steele 1986). ``chunk_size`` changes nothing here.
    """
    returns, reach = rewards, 1
    while reach < rewards.shape[-1]:
        returns = returns + torch.nn.functional.pad(returns[..., reach:] * discount**reach, (0, reach))
        reach *= 2
    return returns


def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over [B, T]: advantages and returns."""
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    advantages = chunked_discounted_returns(rewards + gamma * following - values, gamma * lambd)
    return advantages, advantages + values


def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """As :func:`chunked_gae`."""
    return chunked_gae(rewards, values, gamma, lambd)


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: Sequence[Tensor],
    rewards_list: Sequence[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """GAE of each sample of a batch: advantages and returns, one tensor a response each."""
    with torch.no_grad():
        pairs = [
            chunked_gae(rewards[None, :length], values[None, :length], gamma, lambd)
            for rewards, values, length in zip(rewards_list, values_list, response_lengths, strict=True)
        ]
    return [advantages[0] for advantages, _ in pairs], [returns[0] for _, returns in pairs]


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: Any = None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob [R, 1] of each token of ``logits`` [R, vocab], and the entropy [R] of its row or None.

    ``log_prob_keep_mask`` [R, vocab] leaves the other entries out of a log-prob, never the token's own.

    Raises:
        ValueError: a vocabulary that is spread over ranks.
    """
    if tp_group is not None and tp_group.size() > 1:
        raise ValueError("logits of a vocabulary that is spread over tensor-parallel ranks are not served here")
    if not len(logits):
        return logits.new_zeros(0), logits.new_zeros(0) if with_entropy else None
    log_probs, entropy = logits_log_probs(logits, tokens)
    if log_prob_keep_mask is not None:
        outside = ~log_prob_keep_mask.scatter(1, tokens[:, None], True)
        log_probs, _ = logits_log_probs(logits.masked_fill(outside, -1e30), tokens)
    entropy = entropy if with_entropy_grad else entropy.detach()
    return log_probs[:, None], entropy if with_entropy else None


__all__ = [
    "calculate_log_probs_and_entropy",
    "chunked_discounted_returns",
    "chunked_gae",
    "compute_approx_kl",
    "compute_cispo_loss",
    "compute_gspo_kl",
    "compute_opsm_mask",
    "compute_policy_loss",
    "get_advantages_and_returns_batch",
    "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages",
    "get_reinforce_plus_plus_returns",
    "vanilla_gae",
]
