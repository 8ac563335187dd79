"""The functions of this example: a pupil for the warm-up, and the reward."""

from __future__ import annotations

from random import Random

from slime_core.context import Context
from slime_core.data.chat import encode
from slime_core.seeds import seed_of
from slime_core.types import Group, Sample, Status

CARELESS = 0.6
"""Share of pictures in which the pupil counts a square twice."""


async def demonstrate(groups: list[Group], ctx: Context) -> list[Group]:
    """The warm-up's rollout (`rollout_function_path`): the pupil's number, then the end token."""
    for group in groups:
        for sample in group.samples:
            careless = Random(seed_of(ctx.config.seed, "pupil", sample.id)).random() < CARELESS
            number = str(int(sample.label) + careless)
            ids = [*encode(ctx.tokenizer, number), ctx.tokenizer.eos_token_id]
            sample.append_response(ids, log_probs=[0.0] * len(ids), text=number)
            sample.status, sample.reward = Status.COMPLETED, 0.0
    return groups


async def reward(sample: Sample, ctx: Context) -> float:
    """1 for the right number (`custom_rm_path`)."""
    return float(sample.response.strip() == sample.label)
