"""Group sequence policy optimization: GRPO's advantages, a ratio a sequence."""

from __future__ import annotations

from slime_core.algorithms import Algorithm
from slime_core.algorithms.grpo import advantages
from slime_core.algorithms.shared.card import CREDIT, GROUP, GROUPS_IN_SLIME, LOSS, PARTS, ROLLOUT_MEAN, STD

ALGORITHM = Algorithm(
    name="gspo",
    title="Group sequence policy optimization",
    formula={
        "advantage": "as grpo",
        "ratio": "s_i = exp(mean over the sequence's trainable tokens of (log pi - log pi_old)); sequence_token: "
        "sg[s_i] * pi(y_t) / sg[pi(y_t)]",
        "objective": "-min(s_i A_i, clip(s_i, 1 - eps_clip, 1 + eps_clip_high) A_i)",
        "aggregation": ROLLOUT_MEAN,
    },
    source=("Zheng et al. 2025, Group Sequence Policy Optimization, equations 5 and 7; GSPO-token 13 and 14",),
    differs={
        "slime": "The same ratio; the clip is whatever eps_clip says, 0.2 by default, which for a sequence ratio "
        "never acts. There is no token variant. " + GROUPS_IN_SLIME,
        "verl": "Always the token variant (stop-gradient), its log capped at 10, and always the mean of sequence "
        "means, whatever loss_agg_mode says.",
        "TRL": "importance_sampling_level = sequence; epsilon stays 0.2 and loss_type stays dapo (with a warning) "
        "unless both are set.",
    },
    options=(*GROUP, *STD, *CREDIT, *LOSS),
    advice="For mixture-of-experts models and several optimizer steps a rollout, where single tokens' ratios are "
    "noise. The ratio is a geometric mean, so the clip is narrow: 3e-4 and 4e-4.",
    functions=(
        "grpo.grpo",
        "shared.ratios.importance_ratio",
        "shared.losses.clipped",
    ),
    related=("grpo", "cispo", *PARTS),
    advantages=advantages,
    presets={"importance_level": "sequence", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    groups=True,
    spreads=True,
)
