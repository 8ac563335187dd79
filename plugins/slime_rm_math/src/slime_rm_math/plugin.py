"""The plugin `rm_math`: options, rows, reward and recipe, through slime's hooks alone.

Tasks: ``arithmetic`` holds the problems to train on, ``arithmetic_pupil`` the same problems with a careless pupil's
answers (for a warm-up), ``arithmetic_heldout`` the problems that no stage ever trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slime_core import ConfigError, Context, Reward, Sample, hookimpl
from slime_core.types import Group
from slime_rm_math.grading import exact_match
from slime_rm_math.problems import OPERATIONS, Kind, Operation, Problems, Style
from slime_rm_math.pupil import Demonstrations

slime_api = 1
TRAIN, PUPIL, HELDOUT = "arithmetic", "arithmetic_pupil", "arithmetic_heldout"


class Options(BaseModel):
    """`[plugin.rm_math]`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    digits: int = Field(2, ge=1, le=3, description="Operands have up to this many digits.")
    operations: tuple[Operation, ...] = Field(OPERATIONS, min_length=1, description="Any of + and -.")
    negative: bool = Field(False, description="Whether a - b may be below zero.")
    padded: bool = Field(False, description="Operands are written with leading zeros: 07+38= for 7+38=.")
    ones_first: bool = Field(
        False, description="Answers are written ones first, as columns are worked out: 58 for 85."
    )
    carry_lost: float = Field(0.65, ge=0, le=1, description="How often the pupil of arithmetic_pupil loses a carry.")
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
def slime_reward(group: Group, ctx: Context) -> list[Reward]:
    """Exact match, a sample at a time."""
    return [exact_match(sample) for sample in group.samples]


@hookimpl
def slime_reward_types() -> Mapping[str, Callable[..., Any]]:
    """`rm_type = "exact_match"`, for anybody's data."""
    return {"exact_match": _exact_match}


def _exact_match(sample: Sample, ctx: Context) -> Reward:
    return exact_match(sample)
