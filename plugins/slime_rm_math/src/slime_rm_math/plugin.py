"""The plugin `rm_math`: options, rows, rewards and recipe, through slime's hooks alone.

Tasks: ``arithmetic`` holds the problems to train on, ``arithmetic_pupil`` the same problems with a careless pupil's
answers (for a warm-up), ``arithmetic_heldout`` the problems that no stage ever trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slime_core import ConfigError, Context, Reward, hookimpl
from slime_core.plugins.boundary import together
from slime_core.types import Group
from slime_rm_math.graders import groups
from slime_rm_math.graders.registry import Graders
from slime_rm_math.options import Options as Options
from slime_rm_math.problems import Kind, Problems, Style
from slime_rm_math.pupil import Demonstrations

slime_api = 1
TRAIN, PUPIL, HELDOUT = "arithmetic", "arithmetic_pupil", "arithmetic_heldout"


@hookimpl
def slime_options() -> type[BaseModel]:
    """The model of `[plugin.rm_math]`."""
    return Options


@hookimpl
def slime_recipes() -> Mapping[str, Path]:
    """`default`: a model made from a seed learns to add and subtract."""
    return {"default": Path(__file__).parent / "recipes" / "default.toml"}


@hookimpl
def slime_prompts(task: str, ctx: Context) -> Problems | Demonstrations:
    """The rows of a task; ``default`` is the same as ``arithmetic``."""
    options: Options = ctx.options
    kind = Kind(**options.model_dump(include={"digits", "operations", "negative", "heldout", "split_seed"}))
    style = Style(padded=options.digits if options.padded else 1, ones_first=options.ones_first)
    if task == HELDOUT:
        return Problems(kind, style, side="heldout", limit=options.heldout_rows)
    problems = Problems(kind, style, side="train")
    if task in (TRAIN, "default"):
        return problems
    if task == PUPIL:
        return Demonstrations(problems, carry_lost=options.carry_lost, seed=options.split_seed)
    raise ConfigError(
        f"rm_math has no task '{task}'",
        where="data.tasks or eval.eval_tasks",
        fix=f"use {TRAIN}, {PUPIL} or {HELDOUT}",
    )


@hookimpl
async def slime_reward(group: Group, ctx: Context) -> list[Reward]:
    """By the row's or the run's `rm_type`, exact match where neither names one; in training then over the group."""
    mode = "" if ctx.evaluation else ctx.options.group_reward
    graders = _graders()
    if mode == "majority":
        return await graders.majority(group.samples, ctx)
    names = [
        str(sample.metadata.get("rm_type") or ctx.config.reward.rm_type or "exact_match") for sample in group.samples
    ]
    grades = [graders.grade(name, sample, ctx) for name, sample in zip(names, group.samples, strict=True)]
    rewards = await together(grades)
    return groups.brevity(group.samples, rewards) if mode == "brevity" else rewards


@hookimpl
def slime_reward_types() -> Mapping[str, Callable[..., Any]]:
    """`rm_type = "math"`, `"dapo"`, ..., for anybody's data."""
    return _graders().types()


@cache
def _graders() -> Graders:
    """One a process: its workers, which start with the first answer that needs them, are shared by both hooks."""
    return Graders()
