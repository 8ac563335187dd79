"""What a request may say, and nothing else: a candidate, its problem and a key. How it is judged is the server's."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from slime_kernelbench.problems.rows import ID, MAX_SOURCE
from slime_kernelbench.types import KernelProblem

MAX_CANDIDATE = 1 << 20  # characters
SHOWN = 3  # mistakes that an answer names

Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{8,128}$")]


class ProblemAsked(BaseModel):
    """A problem in KernelBench's format."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: str = Field(pattern=f"^{ID.pattern}$", max_length=800)
    name: str = Field(max_length=500)
    source: str = Field(max_length=MAX_SOURCE)
    level: int = Field(ge=1, le=99)
    where: str = Field("", max_length=4096)
    occasion: str = Field("", max_length=64)

    def problem(self) -> KernelProblem:
        """As the judge takes it."""
        return KernelProblem(**self.model_dump())


class JudgeRequest(BaseModel):
    """The body of ``POST /v1/judge``.

    ``key`` names the judgement: the same key asks for the same answer again, whatever became of the first request.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    key: Key
    source: str = Field(max_length=MAX_CANDIDATE)
    problem: ProblemAsked
