"""1 where the last whole number of a response is the label, else 0."""

from __future__ import annotations

import re

from slime_core import Context, Group, Reward

NUMBER = re.compile(r"-?\d+")


def score(response: str, label: str) -> float:
    """Whether the last whole number of a text is the label; commas between digits are ignored.

    Example:
        score("12 + 30 = 42.", "42"), score("42, or 43", "42")    # (1.0, 0.0)
    """
    numbers = NUMBER.findall(response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == label)


def reward(group: Group, ctx: Context) -> list[Reward]:
    """The score of each sample of a group."""
    return [Reward(value=score(sample.response, str(sample.label))) for sample in group.samples]
