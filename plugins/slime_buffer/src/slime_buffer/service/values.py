"""Plain values of request bodies: names, texts, tokens, JSON that is stored unchanged, each with its bounds."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

LONGEST = 1 << 20  # tokens of a list, characters of a text; the service's own limit is lower
DEEPEST = 16  # levels of a JSON value that is stored unchanged
LARGEST = 2**63
SLACK = 1e-4  # a log-prob may exceed 0 by rounding

State = Literal["open", "finished", "dropped", "read"]
Verdict = Literal["stored", "known", "refused"]


def plain(value: Any, depth: int = 0) -> Any:
    """A JSON value of ours: finite, not deep, no number or text that JSON readers disagree on.

    Raises:
        ValueError: it is none.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            plain(key, depth)
            plain(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            plain(item, depth + 1)
    elif isinstance(value, str):
        if len(value) > LONGEST:
            raise ValueError(f"a text of more than {LONGEST} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError("a text that is not Unicode") from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number that is not finite")
    elif isinstance(value, int):
        if not -LARGEST <= value < LARGEST:
            raise ValueError("a whole number of more than 64 bits")
    elif value is not None:
        raise ValueError(f"a {type(value).__name__} is not JSON")
    return value


def _table(value: dict[str, Any]) -> dict[str, Any]:
    plain(value)
    return value


Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[!-~]+$")]
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Text = Annotated[str, StringConstraints(max_length=LONGEST), AfterValidator(plain)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[ -~]+$")]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(max_length=LONGEST)]
Json = Annotated[Any, AfterValidator(plain)]
Table = Annotated[dict[str, Any], AfterValidator(_table)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Attempt = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(gt=0, le=3600)]
Wait = Annotated[float, Field(ge=0, le=30, description="Seconds that the answer may wait for something to give.")]


class Wire(BaseModel):
    """A body."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
