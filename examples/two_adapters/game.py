"""Two agents with opposite jobs: one counts up, the other reads what the first said, and counts down.

    "3>" -> up -> "4"        "4>" -> down -> "3"        rewarded: the next digit; the one before what was said

Each agent is an adapter of its own on one frozen base. Both read a digit and a ``>``, and want opposite answers, so
one set of weights could not play both. The first one's token reaches the second as it was sampled.
"""

from __future__ import annotations

import asyncio
from typing import Any

from slime_core import Context, Group, Prompt, Reward, Sample
from slime_core.rollout.groups import sibling

DIGITS = "012345"  # in a circle: after 5 comes 0
UP, DOWN = "up", "down"


def prompts(task: str, ctx: Context) -> Rows:
    """The digits, over and over; once in an evaluation."""
    return Rows(len(DIGITS) if ctx.evaluation else 100_000)


class Rows:
    """A digit a row."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def at(self, position: int) -> Prompt:
        digit = DIGITS[position % len(DIGITS)]
        return Prompt(id="", position=position, prompt=f"{digit}>", label=digit)

    def state(self) -> dict[str, Any]:
        return {"digits": DIGITS}


async def generate(group: Group, ctx: Context) -> Group:
    """One pair of turns a rollout: the issued sample is the first agent's, the second's joins the group."""
    answers = await asyncio.gather(*(play(group.samples[places[0]], ctx) for places in group.rollouts.values()))
    for places, answer in zip(group.rollouts.values(), answers, strict=True):
        places.append(len(group.samples))
        group.samples.append(answer)
    return group


async def play(first: Sample, ctx: Context) -> Sample:
    """The first agent's turn, then the second's, whose prompt is the first one's token and a ``>``."""
    first.model = first.role = UP
    await ctx.generate(first)
    asked = ctx.tokenizer.encode(">", add_special_tokens=False)
    second = sibling(first, 1, [*first.response_tokens, *asked])
    second.model = second.role = DOWN
    second.prompt = f"{first.response}>"
    await ctx.generate(second)
    return second


def reward(group: Group, ctx: Context) -> list[Reward]:
    """1 for the digit after the prompt's, or before it; what is no digit has none before it."""
    return [Reward(value=float(sample.response == wanted(sample))) for sample in group.samples]


def wanted(sample: Sample) -> str | None:
    """The answer to a sample's prompt. Example: "5" in the prompt of the agent that counts up gives "0"."""
    digit = str(sample.prompt)[:-1]
    step = 1 if sample.model == UP else -1
    return DIGITS[(DIGITS.index(digit) + step) % len(DIGITS)] if digit in tuple(DIGITS) else None
