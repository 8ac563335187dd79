"""Proximal policy optimization with a critic: generalised advantage estimation over reward less KL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import CLIPPED, LOSS, PARTS, TOKEN_MEAN, TOKEN_RATIO

if TYPE_CHECKING:
    from slime_core.config.problems import Problem
    from slime_core.types import Batch, Columns


def advantages(batch: Batch, train: Any) -> Columns:
    """Advantages and returns by `shared.returns.gae` (Schulman et al. 2016)."""
    import numpy as np

    from slime_core.algorithms.shared.returns import gae
    from slime_core.algorithms.shared.rewards import discount, rewards_less_kl
    from slime_core.algorithms.shared.terms import role_column

    values, returns = gae(
        rewards_less_kl(batch, train),
        role_column(batch, "values"),
        batch.loss_mask,
        batch.sample_of_token(),
        discount(batch, train, train.gae_gamma),
        discount(batch, train, train.gae_lambda),
    )
    return {"advantages": values, "returns": returns.astype(np.float32)}


def _conflicts(config: Any) -> Iterator[Problem]:
    from slime_core.config.problems import conflict

    alone, steps = config.train.num_critic_only_steps, config.rollout.num_rollout
    if 0 < steps <= alone:
        yield conflict(
            f"num_critic_only_steps = {alone} with num_rollout = {steps}",
            ["train.num_critic_only_steps", "rollout.num_rollout"],
            why="only the critic would learn, in every step of the stage",
            fix=f"set num_critic_only_steps below {steps}, or raise num_rollout",
        )


def _notices(config: Any) -> Iterator[str]:
    train = config.train
    if not train.num_critic_only_steps:
        yield (
            "ppo with num_critic_only_steps = 0: the policy learns from the first step on from a critic that has "
            "seen nothing; a few steps of the critic alone cost little"
        )
    if train.critic_lr < train.lr:
        yield (
            f"ppo with critic_lr = {train.critic_lr:g} below lr = {train.lr:g}: the critic will lag behind the "
            "policy that it judges"
        )


ALGORITHM = Algorithm(
    name="ppo",
    title="Proximal policy optimization with a critic",
    formula={
        "reward": "token reward = -kl_coef KL_t, plus r_i at the last trainable token",
        "advantage": "delta_t = reward_t + gae_gamma V_(t+1) - V_t; A_t = sum of (gae_gamma gae_lambda)^l "
        "delta_(t+l) over trainable tokens; masked tokens are stepped over",
        "ratio": TOKEN_RATIO,
        "objective": CLIPPED,
        "value": "max((V - G)^2, (clip(V, V_old - value_clip, V_old + value_clip) - G)^2) / 2, with G = A + V_old",
        "aggregation": TOKEN_MEAN,
    },
    source=(
        "Schulman et al. 2017, Proximal Policy Optimization Algorithms, equation 7",
        "Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation, "
        "equation 16",
    ),
    differs={
        "slime": "The reward lies on the last token, trainable or not, and the recursion ignores the loss mask. "
        "The critic's returns leave kl_coef out where the actor's advantages have it. The value loss has no 1/2.",
        "verl": "Masked tokens are stepped over, advantages are always whitened, the value loss has 1/2.",
        "TRL": "Version 1.16 has no PPO trainer.",
    },
    options=(
        "gae_gamma",
        "gae_lambda",
        "critic_load",
        "critic_lr",
        "critic_lr_warmup_iters",
        "value_clip",
        "num_critic_only_steps",
        "credit_level",
        *LOSS,
    ),
    advice="Where credit differs along the response: long tasks, several turns, rewards on the way. It costs a "
    "second model; let it learn first with num_critic_only_steps.",
    functions=(
        "shared.returns.gae",
        "shared.losses.clipped",
        "shared.losses.value_loss",
    ),
    related=("reinforce_plus_plus", *PARTS),
    advantages=advantages,
    presets={"loss_aggregation": "token_mean"},
    needs=frozenset({"values"}),
    kl_in_reward=True,
    discounts=True,
    conflicts=_conflicts,
    notices=_notices,
)
