"""`slime.rollout.sample_hooks`: the functions of ``--rollout-sample-hook-path``, called on samples."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

from slime_core.compat.sample import Sample
from slime_core.compat.shapes import accepted
from slime_core.plugins.locate import locate

ROLLOUT_ID: ContextVar[int | None] = ContextVar("slime_rollout_id", default=None)


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Set what hooks get as ``rollout_id`` where their caller passes none."""
    ROLLOUT_ID.set(rollout_id)


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Call every hook on a sample, or on each sample of nested lists; returns the same shape.

    Raises:
        TypeError: a value that is neither, or a hook that returns neither a sample nor None.
    """
    paths = args.rollout_sample_hook_path or []
    if not paths:
        return value
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    if not isinstance(value, Sample):
        raise TypeError(f"sample hooks take samples, or lists of them, not a {type(value).__name__}")
    for path in paths:
        hook = locate(path, "rollout_sample_hook_path")
        result = hook(args, value, **accepted(hook, {"rollout_id": ROLLOUT_ID.get(), **kwargs}))
        result = await result if inspect.isawaitable(result) else result
        if result is not None and not isinstance(result, Sample):
            raise TypeError(f"the sample hook '{path}' returned a {type(result).__name__}, not a sample or None")
        value = value if result is None else result
    return value


__all__ = ["apply_rollout_sample_hooks", "set_current_rollout_id"]
