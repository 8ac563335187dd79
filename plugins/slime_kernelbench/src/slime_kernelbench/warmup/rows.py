"""Rows of the family for training and evaluation; nothing of the held-out side is ever trained on.

A pair of steps lies on one side for ever, wherever it stands and whatever the finish, decided by a hash; so does every
size: multiples of 5 are the held-out side's. So a warm-up never shows a held-out operator, pair of steps or shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise, product
from random import Random
from typing import Literal

from slime_kernelbench.types import KernelProblem
from slime_kernelbench.warmup.family import FINISHES, STEPS, Operator

Side = Literal["train", "heldout"]
ROWS, COLS = range(2, 9), range(17, 120)
APART = 5


@dataclass(slots=True, frozen=True, kw_only=True)
class Family:
    """All operators of up to three steps and a finish, split; those of the held-out side have two.

    Example:
        Family(heldout=0.15, seed=0).problems("heldout", 64)
    """

    heldout: float  # share of the pairs of steps that are never trained on; single steps always are
    seed: int

    def operators(self, side: Side) -> list[Operator]:
        """Every operator of a side whose output tells of each slip."""
        lengths = (1, 2, 3) if side == "train" else (2,)
        chains = (steps for length in lengths for steps in product(STEPS, repeat=length) if self._lies(steps, side))
        operators = (Operator(steps, finish) for steps in chains for finish in FINISHES)
        return [operator for operator in operators if operator.tells]

    def problems(self, side: Side, count: int) -> list[KernelProblem]:
        """``count`` different operators of a side (all of them where it has fewer), each with one size."""
        operators = sorted(self.operators(side), key=lambda operator: uniform(f"{operator.name}/{self.seed}"))
        rng = Random(f"{side}/{self.seed}")
        return [operator.problem(*sizes(side, rng)) for operator in operators[:count]]

    def _lies(self, steps: tuple[str, ...], side: Side) -> bool:
        """Whether every pair of neighbours lies on a side; no step comes twice in a row."""
        return all(first != then and self._side(first, then) == side for first, then in pairwise(steps))

    def _side(self, first: str, then: str) -> Side:
        return "heldout" if uniform(f"{first}_{then}{self.seed}") < self.heldout else "train"


def sizes(side: Side, rng: Random) -> tuple[int, int]:
    """Rows and columns of a side; columns are no power of two, so that blocks have lanes beyond the row."""
    rows = [n for n in ROWS if (n % APART == 0) == (side == "heldout")]
    cols = [n for n in COLS if (n % APART == 0) == (side == "heldout") and n & (n - 1)]
    return rng.choice(rows), rng.choice(cols)


def uniform(text: str) -> float:
    """A number in [0, 1) that a text is hashed to, the same on every machine."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
