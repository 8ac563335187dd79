"""What a person should know about an algorithm, or about a part that algorithms share, and the phrases of several.

Notation: i a rollout of a prompt's group, t a token of its response, r_i its reward, A an advantage, m the loss mask,
rho_t = exp(new log-prob - old log-prob), sg[...] a constant to the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True, kw_only=True)
class Card:
    """What a person should know about one algorithm, or about one part that algorithms share."""

    name: str
    title: str
    formula: Mapping[str, str]  # part to formula, as plain text: advantage, ratio, objective, aggregation, ...
    source: tuple[str, ...]  # authors, year, title, equation
    differs: Mapping[str, str]  # "slime", "verl", "TRL" to what they do
    options: tuple[str, ...]  # the keys it reads, names as in the schema
    advice: str
    functions: tuple[str, ...] = ()  # pure functions that compute it, below slime_core.algorithms: "shared.kl.kl"
    related: tuple[str, ...] = field(default=())  # names of other cards


CLIPPED = "-min(rho_t A_t, clip(rho_t, 1 - eps_clip, 1 + eps_clip_high) A_t), at most eps_clip_c |A_t| where A_t < 0"
TOKEN_RATIO = "rho_t = exp(log pi(y_t) - log pi_old(y_t)), a token each"
ROLLOUT_MEAN = "rollout_mean: mean over the step's rollouts of the mean over their trainable tokens"
TOKEN_MEAN = "token_mean: sum over the optimizer step's trainable tokens, divided by their number"
PER_TOKEN = "A_t = A_i for every token of the response"

LOSS = (
    "policy_objective",
    "importance_level",
    "eps_clip",
    "eps_clip_high",
    "eps_clip_c",
    "loss_aggregation",
    "loss_divisor",
    "kl_loss_coef",
    "kl_loss_type",
    "use_unbiased_kl",
    "entropy_coef",
    "use_rollout_logprobs",
    "kl_coef",
    "kl_reward_type",
    "opd_kl_coef",
    "teacher_load",
    "teacher_place",
    "normalize_advantages",
)
"""Keys that every algorithm but sft reads: of the policy loss, then terms that are added to any advantage."""
GROUP = ("n_samples_per_prompt", "rollout_temperature", "dynamic_sampling")
STD = ("disable_grpo_std_normalization", "grpo_std_scope")
CREDIT = ("credit_level", "gae_gamma")
PARTS = ("aggregation", "kl", "corrections", "sampling_control")

GROUPS_IN_SLIME = (
    "Groups are found by position: rewards are reshaped to rows of n_samples_per_prompt, and where their number does "
    "not fit, the whole batch is one row (issue 2230)."
)
