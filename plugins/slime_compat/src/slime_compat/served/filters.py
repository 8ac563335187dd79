"""`slime.rollout.filter_hub`: what a filter returns, slime's own two, and the count of their drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


def should_drop_dynamic_filter_output(
    output: DynamicFilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    """Whether a group is dropped; ``keep_when_insufficient`` keeps it where fewer groups than the target would remain.

    Args:
        output: of the filter.
        remaining_batch_size: groups in flight or kept.
        target_data_size: groups that the step needs.
    """
    insufficient = output.keep_when_insufficient and remaining_batch_size <= target_data_size
    return not (output.keep or insufficient)


class MetricGatherer:
    """Drops of a rollout by their reason."""

    def __init__(self) -> None:
        self._drops: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        """Count one drop; without a reason it is not counted."""
        self._drops.update([reason] if reason else [])

    def collect(self) -> dict[str, int]:
        """``rollout/dynamic_filter/drop_REASON`` -> groups."""
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._drops.items()}


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ (standard deviation above 1e-6)."""
    rewards = np.array([sample.get_reward_value(args) for sample in samples], dtype=np.float64)
    keep = bool(len(rewards) and rewards.std() > 1e-6)
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(float(rewards[0]), 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """As :func:`check_reward_nonzero_std`, but a group without which the step would fall short may be kept."""
    return replace(check_reward_nonzero_std(args, samples, **kwargs), keep_when_insufficient=True)


__all__ = [
    "DynamicFilterOutput",
    "MetricGatherer",
    "call_dynamic_filter",
    "check_reward_nonzero_std",
    "check_reward_nonzero_std_with_fallback",
    "should_drop_dynamic_filter_output",
]
