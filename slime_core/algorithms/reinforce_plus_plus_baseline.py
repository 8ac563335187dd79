"""REINFORCE++ with the group's mean as baseline, whitened over the step."""

from __future__ import annotations

from slime_core.algorithms import Algorithm
from slime_core.algorithms.dr_grpo import advantages
from slime_core.algorithms.shared.card import (
    CLIPPED,
    CREDIT,
    GROUP,
    GROUPS_IN_SLIME,
    LOSS,
    PARTS,
    TOKEN_MEAN,
    TOKEN_RATIO,
)

ALGORITHM = Algorithm(
    name="reinforce_plus_plus_baseline",
    title="REINFORCE++ with the group's mean as baseline",
    formula={
        "advantage": "r_i - mean_group r - kl_coef KL_t, then whitened over the step's trainable tokens",
        "ratio": TOKEN_RATIO,
        "objective": CLIPPED,
        "aggregation": TOKEN_MEAN,
    },
    source=(
        "Hu 2025, REINFORCE++: An Efficient RLHF Algorithm with Robustness to Both Prompt and Reward Models, "
        "section 3 (the -baseline variant)",
    ),
    differs={
        "slime": "The same; --normalize-advantages has to be given too. " + GROUPS_IN_SLIME,
        "verl": "The same with no KL term; a group of one keeps its raw reward.",
        "TRL": "GRPOTrainer with scale_rewards = 'batch' divides by the batch's standard deviation over samples, "
        "not over tokens.",
    },
    options=(*GROUP, *CREDIT, *LOSS),
    advice="Like grpo, but one standard deviation for the whole step: a group where one sample of eight is right "
    "does not weigh more than one where half are.",
    functions=("dr_grpo.dr_grpo", "shared.returns.whiten", "shared.losses.clipped"),
    related=("reinforce_plus_plus", "grpo", *PARTS),
    advantages=advantages,
    presets={"loss_aggregation": "token_mean"},
    whitens=True,
    groups=True,
    spreads=True,
)
