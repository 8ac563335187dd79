"""Each algorithm as data: what it sets where the config says ``auto`` or 0.

settle(train)   the [train] section with nothing left open

`slime_cli.cards` has formula, source and options of each; `docs/algorithms/NAME.md` is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EPS_CLIP = 0.2
DEFAULTS: dict[str, Any] = {
    "policy_objective": "clip",
    "importance_level": "token",
    "loss_aggregation": "rollout_mean",
}
GROUPED = frozenset({"grpo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline", "pass_at_k"})
"""Estimators that compare a reward with others of its group: a group of one teaches nothing."""
WHITENED = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Estimators whose definition whitens advantages over the step."""

ALGORITHMS: dict[str, Mapping[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"loss_aggregation": "constant"},
    "gspo": {"importance_level": "sequence", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "cispo": {
        "policy_objective": "cispo",
        "loss_aggregation": "token_mean",
        "eps_clip": 1.0,
        "eps_clip_high": 0.28,
    },
    "rloo": {},
    "reinforce_plus_plus": {"loss_aggregation": "token_mean"},
    "reinforce_plus_plus_baseline": {"loss_aggregation": "token_mean"},
    "ppo": {"loss_aggregation": "token_mean"},
    "pass_at_k": {},
    "on_policy_distillation": {},
    "sft": {},
}
"""Values of ``train.advantage_estimator``, each with its presets: [train] keys where the config leaves them open."""


def settle(train: Any) -> Any:
    """The [train] section with ``auto`` and 0 replaced by the algorithm's values, or by the core's; idempotent.

    ``eps_clip`` 0 becomes 0.2 where the algorithm says nothing, ``eps_clip_high`` 0 becomes ``eps_clip``; a
    ``tis_clip_low`` above 0 turns ``tis_mode`` truncate to clip.
    """
    presets = ALGORITHMS.get(train.advantage_estimator, {})
    update: dict[str, Any] = {
        key: presets.get(key, default) for key, default in DEFAULTS.items() if getattr(train, key) == "auto"
    }
    low = train.eps_clip or presets.get("eps_clip", EPS_CLIP)
    high = train.eps_clip_high or presets.get("eps_clip_high", low)
    update |= {"eps_clip": low, "eps_clip_high": high}
    if train.tis_mode == "truncate" and train.tis_clip_low > 0:
        update["tis_mode"] = "clip"  # as slime, which always clamps on both sides
    return train.model_copy(update=update)
