"""GRPO by its papers, in float64 numpy and torch, one token at a time; imports nothing of slime.

Shao et al. 2024 (advantages), Schulman et al. 2017 (clip), Schulman 2020 (k1, k2, k3), Loshchilov and Hutter 2019
(AdamW).
"""

import math

import torch


def advantages(rewards, groups, rollouts, std):
    """One advantage a sample, from lists; a rollout's reward is the mean of its samples'."""
    out = []
    for reward, group in zip(rewards, groups):
        members = {}
        for r, g, rollout in zip(rewards, groups, rollouts):
            if g == group:
                members.setdefault(rollout, []).append(r)
        scores = [math.fsum(rs) / len(rs) for rs in members.values()]
        mean = math.fsum(scores) / len(scores)
        value = reward - mean
        spread = max(scores) - min(scores)
        if std and spread > 1e-12 * max(abs(s) for s in scores):
            value /= math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (len(scores) - 1)) + 1e-6
        out.append(value)
    return out


def kl(log_prob, ref, kind):
    """One token's estimate."""
    d = log_prob - ref
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kind]


def token_loss(
    log_prob, old, advantage, low, high, *, ref=None, kl_coef=0.0, kind="k3", entropy=0.0, entropy_coef=0.0
):
    """One token's clipped loss with its KL and entropy terms, scalars."""
    ratio = torch.exp(log_prob - old)
    bounded = torch.clamp(ratio, 1 - low, 1 + high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    if ref is not None:
        loss = loss + kl_coef * kl(log_prob, ref, kind)
    return loss - entropy_coef * entropy


def mean_over_rollouts(token_losses, masks, rollouts):
    """token_losses and masks: a list a sample. Mean over rollouts of the mean over their unmasked tokens."""
    total = 0.0
    for rollout in set(rollouts):
        mine = [i for i, r in enumerate(rollouts) if r == rollout]
        values = [v for i in mine for v, m in zip(token_losses[i], masks[i]) if m]
        if values:
            total = total + sum(values) / len(values)
    return total / len(set(rollouts))


def mean_over_tokens(token_losses, masks):
    """Mean over all unmasked tokens of the step."""
    values = [v for row, mask in zip(token_losses, masks) for v, m in zip(row, mask) if m]
    return sum(values) / len(values)


def adamw(param, grad, m, v, step, *, lr, beta1, beta2, eps, decay):
    """One update, ``step`` from 1; answers the new parameter and moments."""
    param = param - lr * decay * param
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad * grad
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    return param - lr * m_hat / (v_hat**0.5 + eps), m, v
