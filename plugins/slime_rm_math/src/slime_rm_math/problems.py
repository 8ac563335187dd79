"""Arithmetic problems by number: rows of the training and of the held-out side.

Every problem ``a op b`` lies on one side for ever, decided by a hash of the unordered pair, so that its mirror
``b op a``, which would give the answer away, is not trained on when ``a op b`` is held out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slime_core import Prompt

Operation = Literal["+", "-"]
OPERATIONS: tuple[Operation, ...] = ("+", "-")
OPERAND_BITS = 20
SHIFT, MASK, ONE = np.uint64(OPERAND_BITS), np.uint64((1 << OPERAND_BITS) - 1), np.uint64(1)


@dataclass(slots=True, frozen=True)
class ArithmeticProblem:
    """One problem. Example: ``ArithmeticProblem(12, "-", 30)`` has the value -18."""

    a: int
    op: Operation
    b: int

    @property
    def value(self) -> int:
        """The right answer."""
        return self.a + self.b if self.op == "+" else self.a - self.b


@dataclass(slots=True, frozen=True, kw_only=True)
class Style:
    """How problems and answers are written.

    Example:
        Style(padded=2).question(Problem(7, "+", 38))     # "07+38="
        Style(ones_first=True).answer(45)                 # "54", in the order in which columns are worked out
    """

    padded: int = 1  # operands have at least this many digits, with zeros in front
    ones_first: bool = False

    def question(self, problem: ArithmeticProblem) -> str:
        """What the model is asked."""
        return f"{problem.a:0{self.padded}d}{problem.op}{problem.b:0{self.padded}d}="

    def answer(self, value: int) -> str:
        """What it should say."""
        return str(value)[::-1] if self.ones_first else str(value)


@dataclass(slots=True, frozen=True, kw_only=True)
class Kind:
    """Which problems there are, and which of them are held out."""

    digits: int = 2  # operands have up to this many
    operations: tuple[Operation, ...] = OPERATIONS
    negative: bool = False  # whether a - b may be below zero
    heldout: float = 0.1  # share
    split_seed: int = 0


class Problems:
    """The rows of one side of the split, in an order that is a hash of each problem.

    Example:
        rows = Problems(Kind(digits=2), Style(ones_first=True), side="train")
        rows.at(0)      # Prompt(prompt="61+7=", label="86", ...)
    """

    def __init__(
        self, kind: Kind, style: Style, *, side: Literal["train", "heldout"], limit: int | None = None
    ) -> None:
        codes = all_codes(kind)
        codes = codes[held_out(codes, kind.heldout, kind.split_seed) == (side == "heldout")]
        self.codes = codes[np.argsort(mix(codes, kind.split_seed + 1), kind="stable")][:limit]
        self.style = style
        self._kind, self._side = kind, side

    def __len__(self) -> int:
        return len(self.codes)

    def problem(self, position: int) -> ArithmeticProblem:
        """The problem of a row."""
        return decode(int(self.codes[position]))

    def at(self, position: int) -> Prompt:
        """The row at ``position``; the core sets its id and tokens."""
        problem = self.problem(position)
        label = self.style.answer(problem.value)
        return Prompt(id="", position=position, prompt=self.style.question(problem), label=label)

    def state(self) -> dict[str, Any]:
        """Whatever decides the rows and their order."""
        kind = {**asdict(self._kind), "operations": list(self._kind.operations)}
        return {**kind, **asdict(self.style), "side": self._side, "rows": len(self.codes)}


def encode(problem: ArithmeticProblem) -> int:
    """A problem as one number: first operand, operation, second operand."""
    return (problem.a << OPERAND_BITS + 1) | (OPERATIONS.index(problem.op) << OPERAND_BITS) | problem.b


def decode(code: int) -> ArithmeticProblem:
    """The problem that :func:`encode` made a number of."""
    a, rest = divmod(code, 1 << OPERAND_BITS + 1)
    op, b = divmod(rest, 1 << OPERAND_BITS)
    return ArithmeticProblem(a, OPERATIONS[op], b)


def all_codes(kind: Kind) -> NDArray[np.uint64]:
    """Codes of every problem of a kind, [N]."""
    operands = np.arange(10**kind.digits, dtype=np.uint64)
    a, b = (grid.ravel() for grid in np.meshgrid(operands, operands, indexing="ij"))
    codes = []
    for op in OPERATIONS:
        if op in kind.operations:
            keep = np.ones(len(a), dtype=np.bool_) if op == "+" or kind.negative else a >= b
            codes.append(((a << (SHIFT + ONE)) | (np.uint64(OPERATIONS.index(op)) << SHIFT) | b)[keep])
    return np.concatenate(codes)


def held_out(codes: NDArray[np.uint64], share: float, seed: int) -> NDArray[np.bool_]:
    """Which problems, [N], are held out: those whose unordered pair hashes into the lowest ``share``."""
    b, op, a = codes & MASK, (codes >> SHIFT) & ONE, codes >> (SHIFT + ONE)
    unordered = (np.maximum(a, b) << (SHIFT + ONE)) | (op << SHIFT) | np.minimum(a, b)
    return uniform(unordered, seed) < share


def uniform(values: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each value, [N]."""
    return (mix(values, seed) >> np.uint64(11)).astype(np.float64) / 2.0**53


def mix(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """A 64-bit hash of each value, [N]: SplitMix64's output function, stepped by the seed."""
    with np.errstate(over="ignore"):
        z = values + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
