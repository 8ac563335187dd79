"""The plugin of the runs that are killed: prompts, rewards, drops, an estimator that depends on saved state.

Everything it answers is a function of what it is asked, and of a moving average that it keeps in checkpoints: a resume
that forgets the average, or asks for a reward again under another one, ends in other weights.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pydantic

import slime_core
from slime_core import Drop, Estimator, Prompt, Reward


class Options(pydantic.BaseModel, extra="forbid", frozen=True):
    drops: bool = False  # some groups by a filter, some samples by a judge that fails
    asked: str = ""  # file that gets a line a reward, behind the run's back


class Prompts:
    """Forty rows, so that a run goes through several epochs."""

    def __len__(self) -> int:
        return 40

    def at(self, position: int) -> Prompt:
        return Prompt(id="", position=position, prompt=f"{position % 7}+{position % 5}=", label=str(position))

    def state(self) -> dict[str, Any]:
        return {"rows": 40}


class Average:
    """The mean reward of past steps."""

    def __init__(self) -> None:
        self.value, self.steps = 0.0, 0

    def add(self, reward: float) -> None:
        self.value += (reward - self.value) / 4
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "steps": self.steps}

    def load(self, state: dict[str, Any]) -> None:
        self.value, self.steps = state["value"], state["steps"]


average = Average()


def against_average(batch: Any, train: Any) -> dict[str, Any]:
    return {"advantages": (batch.reward - average.value)[batch.sample_of_token()].astype(np.float32)}


@slime_core.hookimpl
def slime_options() -> type[pydantic.BaseModel]:
    return Options


@slime_core.hookimpl
def slime_prompts(task: str, ctx: Any) -> Prompts:
    return Prompts()


@slime_core.hookimpl
async def slime_reward(group: Any, ctx: Any) -> list[Reward]:
    for _ in range(group.prompt.position % 3):
        await asyncio.sleep(0)
    sums = [sum((k + 1) * token for k, token in enumerate(sample.response_tokens)) for sample in group.samples]
    if ctx.options.asked and not ctx.evaluation:
        fd = os.open(ctx.options.asked, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, f"{group.id}\n".encode())
        os.close(fd)
    broken = ctx.options.drops and not ctx.evaluation
    return [
        Reward(value=0.0, kind="infra_error", reason="the judge is away")
        if broken and total % 11 == 0
        else Reward(value=(total % 17) / 17)
        for total in sums
    ]


@slime_core.hookimpl
def slime_filter(group: Any, ctx: Any) -> Drop | None:
    if not ctx.options.drops:
        return None
    total = sum(sum(sample.response_tokens) for sample in group.samples)
    return Drop(reason="every_fourth") if total % 4 == 0 else None


@slime_core.hookimpl
def slime_advantage() -> list[Estimator]:
    return [Estimator(name="against_average", fn=against_average)]


@slime_core.hookimpl
def slime_state() -> Average:
    return average


@slime_core.hookimpl
def slime_step_done(report: Any, ctx: Any) -> None:
    average.add(report.metrics["reward/mean"])
