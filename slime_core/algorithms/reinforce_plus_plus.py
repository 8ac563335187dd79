"""REINFORCE++: discounted returns of reward less KL, whitened over the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.algorithms import Algorithm
from slime_core.algorithms.shared.card import CLIPPED, CREDIT, LOSS, PARTS, TOKEN_MEAN, TOKEN_RATIO

if TYPE_CHECKING:
    from slime_core.types import Batch, Columns


def advantages(batch: Batch, train: Any) -> Columns:
    """The discounted reward-to-go of reward less KL (Hu et al. 2025); the core whitens it."""
    from slime_core.algorithms.shared.returns import reward_to_go
    from slime_core.algorithms.shared.rewards import discount, rewards_less_kl

    gamma = discount(batch, train, train.gae_gamma)
    returns = reward_to_go(rewards_less_kl(batch, train), batch.loss_mask, batch.sample_of_token(), gamma)
    return {"advantages": returns}


ALGORITHM = Algorithm(
    name="reinforce_plus_plus",
    title="REINFORCE++: discounted returns, whitened over the step",
    formula={
        "reward": "token reward = -kl_coef KL_t, plus r_i at the last trainable token",
        "advantage": "G_t = sum over s >= t of gae_gamma^(s - t) * token reward; A = (G - mean) / std over the "
        "step's trainable tokens",
        "ratio": TOKEN_RATIO,
        "objective": CLIPPED,
        "aggregation": TOKEN_MEAN,
    },
    source=(
        "Hu 2025, REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models, "
        "section 3",
    ),
    differs={
        "slime": "The same returns where every token trains; slime discounts over masked tokens (a tool's answer) "
        "too. --normalize-advantages has to be given. Whitening takes E[x^2] - E[x]^2 "
        "in float32, and a sample without trainable tokens is an assertion.",
        "verl": "The same returns; positions behind a masked token start anew, so a reward does not reach tokens "
        "before a tool's answer.",
        "TRL": "Not offered; scale_rewards = 'batch' in GRPOTrainer is nearest.",
    },
    options=("n_samples_per_prompt", *CREDIT, *LOSS),
    advice="One sample a prompt is enough, since the baseline is the step's mean: for many prompts, few samples "
    "each. Wants large steps.",
    functions=(
        "shared.returns.reward_to_go",
        "shared.returns.whiten",
        "shared.losses.clipped",
    ),
    related=("reinforce_plus_plus_baseline", "ppo", *PARTS),
    advantages=advantages,
    presets={"loss_aggregation": "token_mean"},
    kl_in_reward=True,
    whitens=True,
    discounts=True,
)
