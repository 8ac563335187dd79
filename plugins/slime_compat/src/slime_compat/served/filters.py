"""`slime.rollout.filter_hub`: what a filter returns, and slime's own two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime_core.compat.sample import Sample


@dataclass
class DynamicFilterOutput:
    """Whether a group is kept, and the reason if not."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """The answer of a filter; a bool is wrapped, no filter keeps."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ (standard deviation above 1e-6)."""
    rewards = np.array([sample.get_reward_value(args) for sample in samples], dtype=np.float64)
    keep = bool(len(rewards) and rewards.std() > 1e-6)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(float(rewards[0]), 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """As :func:`check_reward_nonzero_std`; a step never falls short here, so nothing is taken in after all."""
    return check_reward_nonzero_std(args, samples, **kwargs)


__all__ = [
    "DynamicFilterOutput",
    "call_dynamic_filter",
    "check_reward_nonzero_std",
    "check_reward_nonzero_std_with_fallback",
]
