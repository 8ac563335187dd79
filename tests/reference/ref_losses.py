"""Policy losses, corrections and aggregation by their papers, in float64, one token at a time; nothing of slime.

Schulman et al. 2017 (clip), Yu et al. 2025 (clip-higher), Ye et al. 2020 (dual clip), Zheng et al. 2025 (GSPO),
MiniMax 2025 (CISPO), Schulman 2020 (k1, k2, k3), Yao et al. 2025 (TIS), Liu, Li et al. 2025 (MIS), Ling Team 2025
(IcePop), DeepSeek-V3.2 2025 (unbiased KL, off-policy sequence masking), Dhariwal et al. 2017 (values).

A step is a list of sequences, a sequence a list of `Token`s whose entries are float64 scalars (numbers or tensors).
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Token:
    """One response token."""

    mask: int
    new: Any
    old: Any  # what the ratio divides by
    advantage: float
    trainer: Any = None  # what corrections compare
    engine: Any = None
    ref: Any = None
    entropy: Any = 0.0


@dataclass
class Settings:
    """One loss."""

    objective: str = "clip"
    level: str = "token"
    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0
    tis: tuple | None = None  # level, mode, lower, upper
    normalize: bool = False
    rs: tuple | None = None  # level, lower, upper
    veto: float = 0.0
    opsm: float | None = None
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    unbiased: bool = False
    entropy_coef: float = 0.0
    extra: dict = field(default_factory=dict)


def number(value):
    return value.item() if isinstance(value, torch.Tensor) else float(value)


def tensor(value):
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)


def trainable(sequence):
    return [token for token in sequence if token.mask]


def ratio(token, sequence, level):
    """The importance ratio of one trainable token."""
    if level == "token":
        return torch.exp(tensor(token.new) - token.old)
    product = 0.0
    for other in trainable(sequence):
        product = product + (tensor(other.new) - other.old)
    of_sequence = torch.exp(product / len(trainable(sequence)))
    if level == "sequence":
        return of_sequence
    return of_sequence.detach() * (torch.exp(tensor(token.new)) / torch.exp(tensor(token.new)).detach())


def clip_loss(r, advantage, low, high, dual=0.0):
    """Minus the smaller of r A and its bounded form; with ``dual``, never worse than -c A at negative advantage."""
    bounded = min(max(number(r), 1 - low), 1 + high)
    if number(r) * advantage <= bounded * advantage:
        objective = r * advantage
    else:
        objective = tensor(bounded) * advantage
    if dual and advantage < 0 and number(objective) < dual * advantage:
        objective = tensor(dual * advantage)
    return -objective


def cispo_loss(r, log_prob, advantage, low, high):
    return -min(max(number(r), 1 - low), 1 + high) * advantage * tensor(log_prob)


def kl(log_prob, ref, kind, old=None):
    d = tensor(log_prob) - ref
    value = {"k1": d, "k2": d**2 / 2}.get(kind, torch.exp(-d) - 1 + d)
    if old is not None:
        value = torch.exp(tensor(log_prob) - number(old)) * value
    if kind == "low_var_kl" and abs(number(value)) > 10:
        value = tensor(math.copysign(10.0, number(value)))
    return value


def gap_ratio(token, sequence, level):
    """Trainer over engine probability of a token, a sequence, or the geometric mean of its tokens."""
    own = number(token.trainer) - number(token.engine)
    gaps = [number(t.trainer) - number(t.engine) for t in trainable(sequence)]
    return math.exp({"token": own, "sequence": math.fsum(gaps), "geometric": math.fsum(gaps) / len(gaps)}[level])


def weight(value, mode, lower, upper):
    if mode == "truncate":
        return min(value, upper)
    if mode == "clip":
        return min(max(value, lower), upper)
    return value if lower <= value <= upper else 0.0


def is_rejected(token, sequence, settings):
    if settings.rs is not None:
        level, lower, upper = settings.rs
        lower = lower or 1 / upper
        if not lower <= gap_ratio(token, sequence, level) <= upper:
            return True
    return bool(settings.veto) and any(
        gap_ratio(other, sequence, "token") < settings.veto for other in trainable(sequence)
    )


def is_dropped(token, sequence, delta):
    """Off-policy sequence masking."""
    moved = [number(t.old) - number(t.new) for t in trainable(sequence)]
    return token.advantage < 0 and math.fsum(moved) / len(moved) > delta


def mean_weight(step, settings):
    level, mode, lower, upper = settings.tis
    found = [weight(gap_ratio(t, s, level), mode, lower, upper) for s in step for t in trainable(s)]
    return math.fsum(found) / len(found) if found and math.fsum(found) > 0 else 1.0


def token_loss(token, sequence, settings, step):
    """Everything one token contributes before aggregation; 0 where masked."""
    if not token.mask or is_rejected(token, sequence, settings):
        return tensor(0.0)
    r = ratio(token, sequence, settings.level)
    if settings.objective == "cispo":
        loss = cispo_loss(r, token.new, token.advantage, settings.low, settings.high)
    else:
        loss = clip_loss(r, token.advantage, settings.low, settings.high, settings.dual)
    if settings.tis is not None:
        level, mode, lower, upper = settings.tis
        factor = weight(gap_ratio(token, sequence, level), mode, lower, upper)
        loss = loss * (factor / mean_weight(step, settings) if settings.normalize else factor)
    if settings.opsm is not None and is_dropped(token, sequence, settings.opsm):
        loss = loss * 0.0
    if settings.kl_coef:
        old = token.old if settings.unbiased else None
        loss = loss + settings.kl_coef * kl(token.new, token.ref, settings.kl_kind, old)
    return loss - settings.entropy_coef * tensor(token.entropy)


def aggregate(losses, masks, rollouts, mode, divisor=1):
    """One number of a step: losses and masks a list a sequence, rollouts an id a sequence."""
    ids = sorted(set(rollouts))
    if mode == "token_mean":
        kept = [v for row, mask in zip(losses, masks) for v, m in zip(row, mask) if m]
        return sum(kept, tensor(0.0)) / max(len(kept), 1)
    total = tensor(0.0)
    for rollout in ids:
        mine = [i for i, r in enumerate(rollouts) if r == rollout]
        kept = [v for i in mine for v, m in zip(losses[i], masks[i]) if m]
        one = sum(kept, tensor(0.0))
        if mode == "rollout_mean":
            one = one / max(len(kept), 1)
        if mode == "constant":
            one = one / divisor
        total = total + one
    return total / max(len(ids), 1)


def value_loss(value, old, target, clip=0.0):
    plain = (tensor(value) - target) ** 2
    if not clip:
        return plain / 2
    moved = number(value) - number(old)
    if abs(moved) <= clip:
        bounded = plain
    else:
        bounded = tensor((number(old) + math.copysign(clip, moved) - number(target)) ** 2)
    return (plain if number(plain) >= number(bounded) else bounded) / 2
