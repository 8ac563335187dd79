"""Two turns with a tool's answer between them; the second rollout fans out into two samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import slime_core


@slime_core.hookimpl
async def slime_generate(group: Any, ctx: Any) -> Any:
    for sample in group.samples:
        await ctx.generate(sample)
        sample.append_response([2, 3 + sample.tokens[-1] % 4], mask=0, text="tool")
        await ctx.generate(sample)
    if ctx.evaluation or len(group.samples) < 2:
        return group
    fan = group.samples[1]
    twin = dataclasses.replace(fan, tokens=list(fan.tokens), metadata={"twin": True})
    group.rollouts[fan.rollout_id].append(len(group.samples))
    group.samples.append(twin)
    return group
