"""1 where the last whole number of a response is the label, else 0; in training a little for any answer."""

from __future__ import annotations

import re

from slime_core import Context, Group, Reward
from slime_core.types import Status

NUMBER = re.compile(r"-?\d+")
LAST = re.compile(r"\d\W*$")
ANSWERED = 0.1


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


def shaped(group: Group, ctx: Context) -> list[Reward]:
    """The same, and in training :data:`ANSWERED` for a wrong response that ends by itself with a number.

    A small model solves so few word problems that most groups would hold no difference to learn from.
    """
    rewards = reward(group, ctx)
    if ctx.evaluation:
        return rewards
    floors = [ANSWERED * answers(sample.response, sample.status) for sample in group.samples]
    return [Reward(value=max(judged.value, floor)) for judged, floor in zip(rewards, floors, strict=True)]


def answers(response: str, status: Status) -> bool:
    """Whether a response ended by itself, and with a number."""
    return status == Status.COMPLETED and bool(LAST.search(response))
