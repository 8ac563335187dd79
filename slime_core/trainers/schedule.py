"""Optimizer step number in, learning rate out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.config.schema import Config


@dataclass(slots=True, frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up to ``peak``, then decay to ``low``.

    Example: peak 1, low 0, warmup 2, decay 4, linear
        steps 0, 1, 2, 3, 4 have 1/2, 1, 1, 1/2, 0
    """

    peak: float
    low: float = 0.0
    style: str = "constant"  # constant, linear, cosine
    warmup: int = 0  # optimizer steps
    decay: int = 0  # optimizer steps, warm-up included, after which the rate is ``low``

    def at(self, step: int) -> float:
        """The rate of optimizer step ``step``, counted from 0 in the stage."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.style == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / max(1, self.decay - self.warmup))
        left = 1 - done if self.style == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.low + (self.peak - self.low) * left


def optimizer_steps(stage: Config, without: int = 0) -> int:
    """Optimizer steps of a whole stage, less those of its first ``without`` rollouts."""
    rollout, train = stage.rollout, stage.train
    rollouts = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    a_rollout = -(-rollouts // train.global_batch_size) if train.global_batch_size else train.num_steps_per_rollout
    return max(1, (rollout.num_rollout - without) * a_rollout)
