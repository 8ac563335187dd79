"""The plugin `rm_math`: options, rows, reward and recipe, through slime's hooks alone.

Tasks: ``arithmetic`` holds the problems to train on, ``arithmetic_heldout`` those that no stage ever trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slime_core import ConfigError, Context, Reward, Sample, hookimpl
from slime_core.types import Group
from slime_rm_math.grading import exact_match
from slime_rm_math.problems import OPERATIONS, Operation, Problems

slime_api = 1
TRAIN, HELDOUT = "arithmetic", "arithmetic_heldout"


class Options(BaseModel):
    """`[plugin.rm_math]`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    digits: int = Field(2, ge=1, le=3, description="Operands have up to this many digits.")
    operations: tuple[Operation, ...] = Field(OPERATIONS, min_length=1, description="Any of + and -.")
    heldout: float = Field(0.1, gt=0, lt=1, description="Share of problems that are never trained on.")
    heldout_rows: int = Field(500, ge=1, description="Held-out problems that an evaluation asks, at most.")
    split_seed: int = Field(0, ge=0, description="Another number, another split; the run's seed does not move it.")


@hookimpl
def slime_options() -> type[BaseModel]:
    """The model of `[plugin.rm_math]`."""
    return Options


@hookimpl
def slime_recipes() -> Mapping[str, Path]:
    """`default`: a model made from a seed learns to add and subtract."""
    return {"default": Path(__file__).parent / "recipes" / "default.toml"}


@hookimpl
def slime_prompts(task: str, ctx: Context) -> Problems:
    """The problems of a task: ``default`` is the same as ``arithmetic``."""
    options: Options = ctx.options
    shared = options.model_dump(include={"digits", "operations", "heldout", "split_seed"})
    if task in (TRAIN, "default"):
        return Problems(**shared, side="train")
    if task == HELDOUT:
        return Problems(**shared, side="heldout", limit=options.heldout_rows)
    raise ConfigError(
        f"rm_math has no task '{task}'", where="data.tasks or eval.eval_tasks", fix=f"use {TRAIN} or {HELDOUT}"
    )


@hookimpl
def slime_reward(group: Group, ctx: Context) -> list[Reward]:
    """Exact match, a sample at a time."""
    return [exact_match(sample) for sample in group.samples]


@hookimpl
def slime_reward_types() -> Mapping[str, Callable[..., Any]]:
    """`rm_type = "exact_match"`, for anybody's data."""
    return {"exact_match": _exact_match}


def _exact_match(sample: Sample, ctx: Context) -> Reward:
    return exact_match(sample)
