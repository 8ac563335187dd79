"""The keys of `[plugin.rm_math]`: the generated problems first, then the graders."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator

from slime_core.errors import nearest
from slime_rm_math.graders import BOXED, TYPES
from slime_rm_math.problems import OPERATIONS, Operation


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

    grader_workers: int = Field(
        0, ge=0, le=64, description="Processes that ask math-verify; 0: one a core, 8 at most."
    )
    grader_seconds: float = Field(1.5, gt=0, le=1.8, description="Seconds that math-verify has for one answer.")
    grader_memory_mb: int = Field(512, ge=256, description="MiB of address space of a grading process.")
    mix: dict[str, FiniteFloat] = Field({}, description="rm_type mix: reward types and their weights.")
    group_reward: Literal["", "majority", "brevity"] = Field(
        "", description="Over each group: majority vote as the label, or right answers by their brevity."
    )
    rm_url: str = Field("", description="rm_type remote_rm: where the reward model listens.")
    rm_token_env: str = Field("", description="Environment variable that holds its bearer token.")
    rm_seconds: float = Field(30.0, gt=0, description="Seconds for its answer, all tries together.")
    rm_retries: int = Field(3, ge=0, le=20, description="Further tries after one that failed.")
    judge_url: str = Field("", description="rm_type llm_judge: an OpenAI-compatible endpoint, up to /v1.")
    judge_model: str = Field("", description="The judge's name there.")
    judge_token_env: str = Field("", description="Environment variable that holds the judge's bearer token.")
    judge_seconds: float = Field(50.0, gt=0, description="Seconds for the judge's reply, all tries together.")
    judge_retries: int = Field(2, ge=0, le=20, description="Further tries after one that failed.")
    judge_instruction: str = Field(
        "", description="The judge's instructions, in place of the default; {mark} as there."
    )

    @field_validator("rm_url", "judge_url")
    @classmethod
    def _an_address(cls, url: str) -> str:
        if not url:
            return url
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none
            valid = False
        if not valid:
            raise ValueError(f"'{url}' is not an address like http://127.0.0.1:8000/reward")
        return url

    @field_validator("mix")
    @classmethod
    def _no_mix_of_mixes(cls, mix: dict[str, float]) -> dict[str, float]:
        if "mix" in mix or "boxed_mix" in mix:
            raise ValueError("mix names reward types, and not itself")
        for name in mix:
            if name.removeprefix(BOXED) not in TYPES:
                hint = nearest(name, (*TYPES, *(BOXED + grade_type for grade_type in TYPES)))
                raise ValueError(f"'{name}' is not a reward type of rm_math: {hint or ', '.join(TYPES)}")
        return mix
