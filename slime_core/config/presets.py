"""A [train] section with nothing left open: the algorithm's presets where the config says ``auto`` or 0."""

from __future__ import annotations

from typing import Any

from slime_core.algorithms import algorithms

EPS_CLIP = 0.2
DEFAULTS: dict[str, Any] = {
    "policy_objective": "clip",
    "importance_level": "token",
    "loss_aggregation": "rollout_mean",
}


def settle(train: Any) -> Any:
    """The [train] section with ``auto`` and 0 replaced by the algorithm's values, or by the core's; idempotent.

    ``eps_clip`` 0 becomes 0.2 where the algorithm says nothing, ``eps_clip_high`` 0 becomes ``eps_clip``; a
    ``tis_clip_low`` above 0 turns ``tis_mode`` truncate to clip.
    """
    algorithm = algorithms().get(train.estimator)
    presets = algorithm.presets if algorithm else {}
    update: dict[str, Any] = {
        key: presets.get(key, default) for key, default in DEFAULTS.items() if getattr(train, key) == "auto"
    }
    low = train.eps_clip or presets.get("eps_clip", EPS_CLIP)
    high = train.eps_clip_high or presets.get("eps_clip_high", low)
    update |= {"eps_clip": low, "eps_clip_high": high}
    if train.tis_mode == "truncate" and train.tis_clip_low > 0:
        update["tis_mode"] = "clip"  # as slime, which always clamps on both sides
    return train.model_copy(update=update)
