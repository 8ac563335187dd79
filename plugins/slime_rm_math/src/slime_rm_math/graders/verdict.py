"""What a comparison of an answer with a label can come to, and the Reward that it becomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_core import Reward

Outcome = Literal["right", "wrong", "unparsable", "infra_error"]


@dataclass(slots=True, frozen=True, kw_only=True)
class GradingVerdict:
    """``unparsable`` is the answer's fault, ``infra_error`` the row's or the machine's: nothing was judged.

    Example: GradingVerdict(outcome="unparsable", why="no \\boxed{}")
    """

    outcome: Outcome
    why: str = ""


RIGHT, WRONG = GradingVerdict(outcome="right"), GradingVerdict(outcome="wrong")


def unparsable(reason: str) -> GradingVerdict:
    """The answer cannot be read, and why."""
    return GradingVerdict(outcome="unparsable", why=reason)


def unjudged(reason: str) -> GradingVerdict:
    """Nothing could be judged, and why; such a sample never trains."""
    return GradingVerdict(outcome="infra_error", why=reason)


def reward_of(verdict: GradingVerdict, *, right: float = 1.0, wrong: float = 0.0) -> Reward:
    """A verdict as a Reward.

    Example:
        reward_of(RIGHT)                        # Reward(value=1.0)
        reward_of(unparsable("no \\\\boxed{}"))    # Reward(value=0.0, kind="failed", reason="no \\\\boxed{}")
    """
    if verdict.outcome == "right":
        return Reward(value=right)
    if verdict.outcome == "wrong":
        return Reward(value=wrong)
    if verdict.outcome == "unparsable":
        return Reward(value=wrong, kind="failed", reason=verdict.why)
    return infra(verdict.why)


def failed(reason: str, value: float = 0.0) -> Reward:
    """A response that cannot be judged by its own fault; ``value`` is its score."""
    return Reward(value=value, kind="failed", reason=reason)


def infra(reason: str) -> Reward:
    """The Reward of a sample that could not be judged."""
    return Reward(value=0.0, kind="infra_error", reason=reason)
