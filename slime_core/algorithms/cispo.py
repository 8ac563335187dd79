"""Clipped importance-sampling weights: GRPO's advantages, and no token loses its gradient."""

from __future__ import annotations

from slime_core.algorithms import Algorithm
from slime_core.algorithms.grpo import advantages
from slime_core.algorithms.shared.card import CREDIT, GROUP, LOSS, PARTS, STD, TOKEN_MEAN, TOKEN_RATIO

ALGORITHM = Algorithm(
    name="cispo",
    title="Clipped importance-sampling weights",
    formula={
        "advantage": "as grpo",
        "ratio": TOKEN_RATIO,
        "objective": "-sg[clip(rho_t, 1 - eps_clip, 1 + eps_clip_high)] A_t log pi(y_t)",
        "aggregation": TOKEN_MEAN,
    },
    source=("MiniMax 2025, MiniMax-M1: Scaling Test-Time Compute with Lightning Attention, equations 4 and 5",),
    differs={
        "slime": "The same formula; eps_clip is 0.2 by default, which cuts weights from below too (it warns below "
        "1), and the aggregation is the mean of rollout means.",
        "verl": "Both bounds from clip_ratio, 0.2 by default; token mean.",
        "TRL": "No lower bound; epsilon_high is the bound itself, not its distance from 1, and by default 0.2, so "
        "weights are cut at 0.2 until it is set (ScaleRL: 5.0). Token mean.",
    },
    options=(*GROUP, *STD, *CREDIT, *LOSS),
    advice="Where rare tokens that turn an argument must keep their gradient: a clipped weight still teaches, a "
    "clipped PPO token does not. Suits several optimizer steps a rollout and stale samples.",
    functions=("grpo.grpo", "shared.ratios.importance_ratio", "shared.losses.cispo"),
    related=("grpo", "gspo", *PARTS),
    advantages=advantages,
    presets={"policy_objective": "cispo", "loss_aggregation": "token_mean", "eps_clip": 1.0, "eps_clip_high": 0.28},
    groups=True,
    spreads=True,
)
