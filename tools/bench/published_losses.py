"""The losses of TRL, slime, verl and OpenRLHF over one padded batch: TRL's by its own code, the others by formula.

Every function takes `Inputs` and answers the scalar that the framework would differentiate, so that `compare_losses`
can take any term out of it by automatic differentiation. The formulas are those that the projects' sources and papers
give (THUDM/slime at 624b824a, verl's core_algos and OpenRLHF's loss.py of late 2025; releases differ), written anew:
nothing here is imported from them.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

WIDE = 1e9  # a clip bound that nothing reaches


@dataclass(slots=True, frozen=True)
class Inputs:
    """One step, padded: tensors [S, T] of response tokens; ``valid`` tells padding, ``mask`` what trains."""

    valid: torch.Tensor
    mask: torch.Tensor  # 0 or 1; 0 on padding
    new: torch.Tensor  # log-probs of the policy in training
    old: torch.Tensor  # of the policy before the step's first update, by the trainer
    engine: torch.Tensor  # by the engine that sampled
    ref: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    reward: torch.Tensor  # [S]
    group: torch.Tensor  # [S]
    rollout: torch.Tensor  # [S]; fan-out siblings share it

    def rows(self, index: Any) -> Inputs:
        """Some of the samples."""
        return Inputs(*(getattr(self, name)[index] for name in self.__slots__))

    def on_policy(self) -> Inputs:
        """As if the policy had not moved, so that every ratio is 1 and nothing is clipped."""
        return replace(self, old=self.new.detach())


Side = Callable[[Inputs, bool], torch.Tensor]
"""(inputs, whether clip bounds are out of reach) to the loss."""


def sum_of(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of each sample's trainable tokens, [S]."""
    return (x * mask).sum(-1)


def mean_of(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Their mean, [S, 1]; 0 where there are none."""
    return (sum_of(x, mask) / mask.sum(-1).clamp(min=1))[:, None]


def k3(d: torch.Tensor) -> torch.Tensor:
    """exp(-d) - 1 + d."""
    return torch.exp(-d) - 1 + d


def surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float, wide: bool, dual: float = 0.0
) -> torch.Tensor:
    """PPO's clipped loss of each token, with verl's, slime's and OpenRLHF's dual clip."""
    low, high, dual = (1.0, WIDE, 0.0) if wide else (low, high, dual)
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    return torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss) if dual else loss


# TRL ---------------------------------------------------------------------------------------------------------------


def trl_trainer() -> Any:
    """TRL's GRPOTrainer class; ImportError where trl is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.grpo_trainer import GRPOTrainer
    return GRPOTrainer


def trl(
    loss_type: str,
    *,
    level: str = "token",
    low: float = 0.2,
    high: float = 0.2,
    beta: float = 0.0,
    bias_correction: bool = False,
    delta: float | None = None,
    off_policy: float | None = None,
    correction: Callable[[Inputs], torch.Tensor] | None = None,
    entropy_coef: float = 0.0,
    micro_batches: int = 1,
    max_length: int = 16,
) -> Side:
    """GRPOTrainer._compute_loss itself, called on a stand-in that holds its settings and the recorded log-probs."""

    def side(x: Inputs, wide: bool) -> torch.Tensor:
        trainer = trl_trainer()
        bound = 1 + WIDE if wide else high
        model = SimpleNamespace(training=True)
        me = SimpleNamespace(
            model=model,
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=off_policy,
            get_off_policy_mask=trainer.get_off_policy_mask,
            importance_sampling_level=level,
            beta=beta,
            loss_type=loss_type,
            epsilon_low=1.0 if wide else low,
            epsilon_high=bound,
            use_vllm=correction is not None,
            vllm_importance_sampling_correction=correction is not None,
            current_gradient_accumulation_steps=micro_batches,
            max_completion_length=max_length,
            _entropy_bonus_enabled=entropy_coef != 0,
            entropy_coef=entropy_coef,
            use_adaptive_entropy=False,
            _metrics={"train": defaultdict(list)},
            args=SimpleNamespace(
                use_bias_correction_kl=bias_correction,
                delta=None if wide else delta,
                steps_per_generation=micro_batches,
            ),
            accelerator=SimpleNamespace(
                num_processes=1, sync_gradients=True, gather=lambda t: t, reduce=lambda t, reduction: t
            ),
        )
        items = x.mask.sum()
        total = torch.zeros((), dtype=x.new.dtype)
        for part in torch.arange(len(x.new)).chunk(micro_batches):
            mine = x.rows(part)
            me._get_per_token_logps_and_entropies = lambda *a, mine=mine, **k: (mine.new, mine.entropy, None)
            given = {
                "prompt_ids": torch.zeros(len(part), 1, dtype=torch.long),
                "prompt_mask": torch.ones(len(part), 1),
                "completion_ids": torch.zeros(mine.mask.shape, dtype=torch.long),
                "completion_mask": mine.valid.to(mine.mask.dtype),
                "tool_mask": mine.mask,
                "advantages": mine.advantages,
                "old_per_token_logps": mine.old,
                "ref_per_token_logps": mine.ref,
                "num_items_in_batch": items,
            }
            if correction is not None:
                given["importance_sampling_ratio"] = correction(mine)
            total = total + trainer._compute_loss(me, model, given)
        return total

    return side


def trl_correction(mode: str, low: float, high: float) -> Callable[[Inputs], torch.Tensor]:
    """vllm_importance_sampling_mode: token_ or sequence_ (product), truncate (clamp) or mask (0 outside)."""

    def weights(x: Inputs) -> torch.Tensor:
        gap = (x.old - x.engine) * x.mask
        ratio = torch.exp(gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap)
        if mode.endswith("truncate"):
            return ratio.clamp(low, high)
        return torch.where((ratio < low) | (ratio > high), 0, ratio)

    return weights


# slime -------------------------------------------------------------------------------------------------------------


def slime(
    kind: str = "ppo",
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 0.0,
    kl: str = "",
    unbiased: bool = False,
    weights: Callable[[Inputs], torch.Tensor] | None = None,
    opsm: float | None = None,
    per_token: bool = False,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.1,
) -> Side:
    """policy_loss_function: R(L) - entropy_coef R(H) + kl_loss_coef R(KL), with R over rollouts or over tokens."""

    def side(x: Inputs, wide: bool) -> torch.Tensor:
        log_ratio = x.new - x.old
        if kind == "gspo":
            log_ratio = mean_of(log_ratio, x.mask).expand_as(log_ratio)
        ratio = log_ratio.exp()
        if kind == "cispo":
            bounded = ratio if wide else ratio.clamp(1 - low, 1 + high)
            loss = -bounded.detach() * x.advantages * x.new
        else:
            loss = surrogate(ratio, x.advantages, low, high, wide, dual)
        if opsm is not None:
            moved = mean_of(x.old - x.new.detach(), x.mask)
            loss = torch.where((x.advantages < 0) & (moved > opsm), 0, loss)
        if weights is not None:
            loss = loss * weights(x)
        loss = loss - entropy_coef * x.entropy
        if kl:
            loss = loss + kl_coef * slime_kl(x, kl, unbiased)
        return slime_reduce(loss, x, per_token)

    return side


def slime_kl(x: Inputs, kind: str, unbiased: bool) -> torch.Tensor:
    """compute_approx_kl; low_var_kl is clamped after the importance ratio."""
    d = x.new - x.ref
    value = {"k1": d, "k2": d * d / 2}.get(kind, k3(d))
    if unbiased:
        value = torch.exp(x.new - x.old) * value
    return value.clamp(-10, 10) if kind == "low_var_kl" else value


def slime_reduce(loss: torch.Tensor, x: Inputs, per_token: bool) -> torch.Tensor:
    """Mean over rollouts of token means over all siblings; or over tokens, a masked sample counted as one token."""
    if per_token:
        return sum_of(loss, x.mask).sum() / x.mask.sum(-1).clamp(min=1).sum()
    same = (x.rollout[:, None] == x.rollout[None, :]).to(loss.dtype)
    return (sum_of(loss, x.mask) / (same @ x.mask.sum(-1)).clamp(min=1)).sum() / len(x.rollout.unique())


# verl --------------------------------------------------------------------------------------------------------------


def verl(
    kind: str = "vanilla",
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 3.0,
    agg: str = "token-mean",
    kl: bool = False,
    weights: Callable[[Inputs], torch.Tensor] | None = None,
    reject: Callable[[Inputs], torch.Tensor] | None = None,
    entropy_coef: float = 0.0,
) -> Side:
    """core_algos: vanilla (dual clip at 3 by default) and gspo, agg_loss, low_var_kl, rollout correction."""

    def side(x: Inputs, wide: bool) -> torch.Tensor:
        if reject is not None:
            x = replace(x, mask=x.mask * (1 - reject(x)))  # the response mask itself, so denominators too
        log_ratio = (x.new - x.old).clamp(-20, 20)
        if kind == "gspo":
            log_ratio = (mean_of(x.new - x.old, x.mask).detach() + x.new - x.new.detach()).clamp(max=10)
        loss = surrogate(log_ratio.exp(), x.advantages, low, high, wide, dual if kind == "vanilla" else 0.0)
        if weights is not None:
            loss = loss * weights(x)
        total = verl_reduce(loss, x.mask, agg) - entropy_coef * verl_reduce(x.entropy, x.mask, agg)
        if kl:
            d = (x.new - x.ref).clamp(-20, 20)
            total = total + 0.1 * verl_reduce(k3(d).clamp(-10, 10), x.mask, agg)
        return total

    return side


def verl_reduce(loss: torch.Tensor, mask: torch.Tensor, agg: str) -> torch.Tensor:
    """agg_loss: sequences without a trainable token are left out of the mean over sequences."""
    if agg == "token-mean":
        return sum_of(loss, mask).sum() / mask.sum()
    one = sum_of(loss, mask)
    if agg == "seq-mean-token-sum-norm":
        return one.sum() / mask.shape[-1]
    if agg == "seq-mean-token-mean":
        one = one / (mask.sum(-1) + 1e-8)
    return one.sum() / (mask.sum(-1) > 0).sum()


# OpenRLHF ----------------------------------------------------------------------------------------------------------


def openrlhf(
    kind: str = "ppo",
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 0.0,
    kl: bool = False,
    correction: str = "",
    bounds: tuple[float, float] = (0.5, 5.0),
    micro_batches: int = 1,
) -> Side:
    """PolicyLoss: token mean of each micro-batch, these averaged; gspo a mean over sequences of token means."""

    def one(x: Inputs, wide: bool) -> torch.Tensor:
        log_ratio = x.new - x.old
        if kind == "gspo":
            log_ratio = mean_of(log_ratio, x.mask).expand_as(log_ratio)
        loss = surrogate(log_ratio.exp(), x.advantages, low, high, wide, dual)
        if correction:
            gap = (x.old - x.engine) * x.mask
            weight = gap.exp().clamp(*bounds) if correction == "tis" else gap.exp()
            judged = mean_of(gap, x.mask).exp() if correction == "seq-mask-tis" else gap.exp()
            if correction != "tis":
                weight = torch.where((judged < bounds[0]) | (judged > bounds[1]), 0, weight)
            loss = loss * weight
        if kl:
            loss = loss + 0.1 * k3(x.new - x.ref).clamp(-10, 10)
        if kind == "gspo":
            return (sum_of(loss, x.mask) / x.mask.sum(-1)).mean()
        return sum_of(loss, x.mask).sum() / x.mask.sum()

    def side(x: Inputs, wide: bool) -> torch.Tensor:
        parts = torch.arange(len(x.new)).chunk(micro_batches)
        return torch.stack([one(x.rows(part), wide) for part in parts]).mean()

    return side


# all ---------------------------------------------------------------------------------------------------------------


def positional(reward: torch.Tensor, size: int, epsilon: float, std: bool = True) -> torch.Tensor:
    """Group advantages by position, [S]: (r - mean) / (std + epsilon) of rows of ``size`` rewards."""
    rows = reward.reshape(-1, size)
    centred = rows - rows.mean(-1, keepdim=True)
    return (centred / (rows.std(-1, keepdim=True) + epsilon) if std else centred).reshape(-1)


def squared(value: torch.Tensor, old: torch.Tensor, target: torch.Tensor, clip: float, factor: float) -> torch.Tensor:
    """The clipped value loss of each token, times ``factor``."""
    bounded = old + (value - old).clamp(-clip, clip)
    return factor * torch.maximum((value - target) ** 2, (bounded - target) ** 2)


def outside(x: Inputs, level: str, low: float, high: float) -> torch.Tensor:
    """1 where trainer over engine (of a token, or the geometric mean of a sequence) is out of bounds, [S, T]."""
    gap = (x.old - x.engine) * x.mask
    judged = mean_of(gap, x.mask).expand_as(gap) if level == "geometric" else gap
    return ((judged > math.log(high)) | (judged < math.log(low))).to(gap.dtype) * x.mask
