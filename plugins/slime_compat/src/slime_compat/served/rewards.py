"""`slime.rollout.rm_hub`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from slime_core.compat.sample import Sample
from slime_core.plugins.boundary import together
from slime_core.plugins.locate import locate


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """One sample's reward: ``sample.custom_rm_path``, ``args.custom_rm_path``, or by ``rm_type``."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        value = locate(path, "custom_rm_path")(args, sample, **kwargs)
        return await value if inspect.isawaitable(value) else value
    name = sample.metadata.get("rm_type") or args.rm_type
    if not name:
        raise ValueError("no reward: set custom_rm_path or rm_type")
    reward = await args._session.plugins.reward_by_type(str(name), sample, args._ctx)
    return reward.value


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Any:
    """The rewards of several samples; ``custom_rm_path`` is called once, for all of them."""
    if args.custom_rm_path:
        value = locate(args.custom_rm_path, "custom_rm_path")(args, samples, **kwargs)
        return await value if inspect.isawaitable(value) else value
    return await together(async_rm(args, sample, **kwargs) for sample in samples)


__all__ = ["async_rm", "batched_async_rm"]
