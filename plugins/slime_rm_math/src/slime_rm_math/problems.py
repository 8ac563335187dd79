"""Arithmetic problems by number: options in, rows of the training and of the held-out side out.

Every problem ``a op b`` lies on one side for ever, decided by a hash of the unordered pair, so that its mirror
``b op a``, which would give the answer away, is not trained on when ``a op b`` is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slime_core import Prompt

Operation = Literal["+", "-"]
OPERATIONS: tuple[Operation, ...] = ("+", "-")
OPERAND_BITS = 20


@dataclass(slots=True, frozen=True)
class Problem:
    """One problem. Example: ``Problem(12, "-", 30)`` has the text ``12-30=`` and the answer ``-18``."""

    a: int
    op: Operation
    b: int

    @property
    def text(self) -> str:
        """What the model is asked."""
        return f"{self.a}{self.op}{self.b}="

    @property
    def answer(self) -> str:
        """What it should say, in plain decimal digits with a minus where negative."""
        return str(self.a + self.b if self.op == "+" else self.a - self.b)


class Problems:
    """The rows of one side of the split, in an order that is a hash of each problem.

    Example:
        rows = Problems(digits=2, operations=("+",), heldout=0.1, split_seed=0, side="train")
        rows.at(0).prompt      # "61+7="
    """

    def __init__(
        self,
        *,
        digits: int,
        operations: Sequence[Operation],
        heldout: float,
        split_seed: int,
        side: Literal["train", "heldout"],
        limit: int | None = None,
    ) -> None:
        codes = all_codes(digits, operations)
        keep = held_out(codes, heldout, split_seed) == (side == "heldout")
        codes = codes[keep]
        self._codes = codes[np.argsort(mix(codes, split_seed + 1), kind="stable")][:limit]
        self._recipe = {
            "digits": digits,
            "operations": list(operations),
            "heldout": heldout,
            "split_seed": split_seed,
            "side": side,
            "rows": len(self._codes),
        }

    def __len__(self) -> int:
        return len(self._codes)

    def problem(self, position: int) -> Problem:
        """The problem of a row."""
        return decode(int(self._codes[position]))

    def at(self, position: int) -> Prompt:
        """The row at ``position``; the core sets its id and tokens."""
        problem = self.problem(position)
        return Prompt(id="", position=position, prompt=problem.text, label=problem.answer)

    def state(self) -> dict[str, Any]:
        """Whatever decides the rows and their order."""
        return dict(self._recipe)


def encode(problem: Problem) -> int:
    """A problem as one number: first operand, operation, second operand."""
    return (problem.a << OPERAND_BITS + 1) | (OPERATIONS.index(problem.op) << OPERAND_BITS) | problem.b


def decode(code: int) -> Problem:
    """The problem that :func:`encode` made a number of."""
    a, rest = divmod(code, 1 << OPERAND_BITS + 1)
    op, b = divmod(rest, 1 << OPERAND_BITS)
    return Problem(a, OPERATIONS[op], b)


def all_codes(digits: int, operations: Sequence[Operation]) -> NDArray[np.uint64]:
    """Codes of every problem whose operands have up to ``digits`` digits, [N]."""
    operands = np.arange(10**digits, dtype=np.uint64)
    a, b = (grid.ravel() for grid in np.meshgrid(operands, operands, indexing="ij"))
    shift = np.uint64(OPERAND_BITS)
    ops = [np.uint64(OPERATIONS.index(op)) for op in OPERATIONS if op in operations]
    return np.concatenate([(a << (shift + np.uint64(1))) | (op << shift) | b for op in ops])


def held_out(codes: NDArray[np.uint64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which problems, [N], are held out: those whose unordered pair hashes into the lowest ``fraction``."""
    mask = np.uint64((1 << OPERAND_BITS) - 1)
    shift = np.uint64(OPERAND_BITS)
    b, op, a = codes & mask, (codes >> shift) & np.uint64(1), codes >> (shift + np.uint64(1))
    low, high = np.minimum(a, b), np.maximum(a, b)
    unordered = (high << (shift + np.uint64(1))) | (op << shift) | low
    return (mix(unordered, seed) >> np.uint64(11)).astype(np.float64) / 2.0**53 < fraction


def mix(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """A 64-bit hash of each value, [N]: SplitMix64's output function, stepped by the seed."""
    with np.errstate(over="ignore"):
        z = values + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
