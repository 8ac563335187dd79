"""The keys of `[plugin.reasoning_gym]`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Options(BaseModel):
    """`[plugin.reasoning_gym]`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    parameters: dict[str, dict[str, Any]] = Field({}, description="By task, parameters of its reasoning_gym config.")
    system_prompt: str = Field(
        "default", description="One of reasoning_gym's system prompts by name, or a text of your own; empty: none."
    )
    answer: Literal["tag", "boxed", "number", "last_line", "response"] = Field(
        "tag", description="The last <answer> tag, \\boxed{}, number or line of a response, or all of it."
    )
    heldout: float = Field(0.2, gt=0, lt=1, description="Share of questions that are never trained on.")
    heldout_rows: int = Field(100, ge=1, description="Held-out questions of a task that an evaluation asks, at most.")
    split_seed: int = Field(0, ge=0, description="Another number, another split; the run's seed does not move it.")
    curriculum: bool = Field(False, description="Whether levels follow the measured success.")
    start_level: int = Field(0, ge=0, description="Level at which a curriculum begins.")
    level_groups: int = Field(32, ge=1, description="Groups over which success is measured before a level changes.")
    level_up: float = Field(0.8, gt=0, le=1, description="Mean reward from which the level goes up.")
    level_down: float = Field(0.2, ge=0, lt=1, description="Mean reward up to which the level goes down.")
    score_seconds: float = Field(5.0, gt=0, description="Seconds that a scorer has for one answer.")

    @model_validator(mode="after")
    def _levels_part(self) -> Options:
        if self.level_down >= self.level_up:
            raise ValueError(f"level_down = {self.level_down} is not below level_up = {self.level_up}")
        return self
