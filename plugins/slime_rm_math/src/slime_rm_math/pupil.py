"""Demonstrations for the warm-up, by a pupil who works in columns and now and then forgets a carry.

The pupil knows every column by heart; only what is carried (or borrowed) gets lost, each time with the same
probability. Imitation teaches all the columns and a bad habit, which a reward of right or wrong can unteach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core import Prompt
from slime_rm_math.problems import ArithmeticProblem, Problems, uniform

COPIES = 16  # demonstrations of one problem, each with its own slips
COLUMNS = 4  # more than any operand has digits


class Demonstrations:
    """The rows of ``problems``, ``COPIES`` times, with the pupil's answers as labels.

    Example:
        rows = Demonstrations(Problems(Kind(), Style(), side="train"), carry_lost=0.6, seed=0)
        rows.at(3)      # Prompt(prompt="47+38=", label="75", ...): the 1 was not carried
    """

    def __init__(self, problems: Problems, *, carry_lost: float, seed: int) -> None:
        self._problems, self._carry_lost, self._seed = problems, carry_lost, seed
        self._slips = slips(problems.codes, carry_lost, seed)

    def __len__(self) -> int:
        return len(self._problems) * COPIES

    def at(self, position: int) -> Prompt:
        """The row at ``position``; the core sets its id and tokens."""
        copy, row = divmod(position, len(self._problems))
        problem = self._problems.problem(row)
        style = self._problems.style
        label = style.answer(answer(problem, self._slips[copy, row].tolist()))
        return Prompt(id="", position=position, prompt=style.question(problem), label=label)

    def state(self) -> dict[str, Any]:
        """Whatever decides the rows and their order."""
        return {**self._problems.state(), "carry_lost": self._carry_lost, "copies": COPIES, "seed": self._seed}


def slips(codes: NDArray[np.uint64], carry_lost: float, seed: int) -> NDArray[np.bool_]:
    """Whether each copy of each problem loses what each column carries, [COPIES, N, COLUMNS]."""
    copies, columns = np.arange(COPIES, dtype=np.uint64), np.arange(COLUMNS, dtype=np.uint64)
    demonstrations = codes[None, :] * np.uint64(COPIES) + copies[:, None]
    return uniform(demonstrations[..., None] * np.uint64(COLUMNS) + columns, seed + 2) < carry_lost


def answer(problem: ArithmeticProblem, slips: Sequence[bool]) -> int:
    """What the pupil writes; ``slips[i]`` loses what column i (ones first) would carry on.

    Example:
        answer(Problem(47, "+", 38), [False] * 4)    # 85
        answer(Problem(47, "+", 38), [True] * 4)     # 75
    """
    sign = -1 if problem.op == "-" else 1
    large, small = max(problem.a, problem.b), min(problem.a, problem.b)
    total, carried = 0, 0
    for column, lost in enumerate(slips):
        unit = 10**column
        digit = large // unit % 10 + sign * (small // unit % 10) + sign * carried
        total += digit % 10 * unit
        carried = int(not 0 <= digit <= 9) if not lost else 0
    return -total if problem.value < 0 else total
