"""Demonstrations for the warm-up: dialogues of a careless pupil, who knows every piece and slips.

    first turn   problem                                 -> a kernel, each of its places slipped with probability slips
    later turn   problem, a slipped kernel, feedback     -> the same kernel, each slip mended with probability mends

Imitation teaches the pieces and the bad habits; a reward of right or wrong unteaches the habits. Prompts of later
turns are put together as those of a run's dialogues are (`dialogue.context`), feedback included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from slime_core import Prompt
from slime_core.types import Message
from slime_kernelbench.types import Case, Diagnostic, KernelProblem, Verdict
from slime_kernelbench.warmup.family import Operator, Slips
from slime_kernelbench.warmup.rows import sizes

ROWS = 1 << 20  # demonstrations before the first comes again
REGIMES = ("normal", "negative", "large", "sparse")


@dataclass(slots=True, frozen=True, kw_only=True)
class Habits:
    """How careless the pupil is; all are probabilities."""

    slips: float  # of each place of a kernel, when it is first written
    mends: float  # of each slip, when feedback says that the kernel is wrong
    later: float  # that a demonstration is a later turn


@dataclass(slots=True, frozen=True, kw_only=True)
class Voice:
    """How a run words and encodes dialogues: the same functions that real ones go through."""

    ask: Callable[[KernelProblem], str | list[Message]]  # the prompt of the first turn
    again: Callable[[str | list[Message], str, Verdict], list[int]]  # ids of the second's, after a source


class TurnDemonstrations:
    """Rows of a supervised stage: each a turn of the pupil's, with what he wrote as its label.

    Example:
        rows = Demonstrations(Family(heldout=0.15, seed=0).operators("train"), habits, voice, seed=0)
        rows.at(3)      # Prompt(prompt="x = x * 0.5 ...", label="```python ...")
    """

    def __init__(self, operators: Sequence[Operator], habits: Habits, voice: Voice, *, seed: int) -> None:
        self._operators, self._habits, self._voice, self._seed = list(operators), habits, voice, seed

    def __len__(self) -> int:
        return ROWS

    def at(self, position: int) -> Prompt:
        """The row at ``position``; the core sets its id, and the tokens of first turns."""
        rng = Random(f"{self._seed}/{position}")
        operator = rng.choice(self._operators)
        problem = operator.problem(*sizes("train", rng))
        slips = random_slips(operator, self._habits.slips, rng)
        text = self._voice.ask(problem)
        tokens: list[int] = []
        if slips != Slips() and rng.random() < self._habits.later:
            tokens = self._voice.again(text, operator.kernel(slips), verdict(problem, rng))
            slips = mended(slips, self._habits.mends, rng)
        return Prompt(id="", position=position, prompt=text, tokens=tokens, label=fenced(operator.kernel(slips)))

    def state(self) -> dict[str, Any]:
        """Whatever decides the rows and their order."""
        return {**asdict(self._habits), "operators": len(self._operators), "rows": ROWS, "seed": self._seed}


def random_slips(operator: Operator, probability: float, rng: Random) -> Slips:
    """Slips of a first attempt, each place for itself."""
    return Slips(**{name: rng.random() < probability for name in operator.slips})


def mended(slips: Slips, probability: float, rng: Random) -> Slips:
    """What is left of slips in the next attempt."""
    remaining = {name: slip and rng.random() >= probability for name, slip in asdict(slips).items()}
    return replace(slips, **remaining)


def fenced(source: str) -> str:
    """An answer: the source in a code block, and nothing else."""
    return f"```python\n{source}```"


def verdict(problem: KernelProblem, rng: Random) -> Verdict:
    """What a judge may say of a wrong kernel; where and by how much are numbers without a meaning."""
    rows, cols = (int(size) for size in problem.id.rsplit("/", 1)[-1].split("x"))
    unwritten = rng.random() < 0.3
    case = Case(
        shapes=f"{rows}x{cols}",
        regime=rng.choice(REGIMES),
        agrees=False,
        max_abs=1e300 if unwritten else 10 ** rng.uniform(-2, 1),
        tolerance=10 ** rng.uniform(-6, -4),
        where=(rng.randrange(rows), rng.randrange(cols)),
    )
    message = f"inputs of shapes {case.shapes}, {case.regime} values: the largest difference is {case.max_abs:.3g}"
    diagnostic = Diagnostic(stage="correctness", kind="nan" if unwritten else "values", message=message)
    return Verdict(status="wrong", reached="correctness", diagnostics=(diagnostic,), cases=(case,))
