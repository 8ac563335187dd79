"""How many sequences an embedded engine is to decode at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.config.stages import stages

if TYPE_CHECKING:
    from slime_core.config.schema import Config

LEAST, MOST = 64, 512


def rollout_slots(config: Config) -> int:
    """The config's, or on a CPU 64, and on a GPU as many as serve a step of any stage in one round."""
    if config.rollout.rollout_slots or config.cluster.device == "cpu":
        return config.rollout.rollout_slots or LEAST
    rollouts = [stage.rollout for stage in stages(config)]
    samples = max(max(r.rollout_batch_size, r.over_sampling_batch_size) * r.n_samples_per_prompt for r in rollouts)
    return min(MOST, max(LEAST, -(-samples // max(1, config.rollout.rollout_num_engines))))
