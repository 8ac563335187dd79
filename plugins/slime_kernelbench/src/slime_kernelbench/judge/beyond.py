"""How large an input has to be for a candidate to show what it does beyond the sizes of its cases."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from slime_kernelbench.judge.examination import ModelCall
from slime_kernelbench.judge.wire import leaves_of

MOST = 1 << 16
"""Elements that are asked for."""
_BLOCK = 8192  # numbers up to here are blocks' sizes more often than what sizes are compared with
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}


def elements(question: ModelCall) -> int:
    """Of its largest input."""
    return max((math.prod(leaf.shape) for leaf in leaves_of(question.inputs)), default=0)


def open_branches(claim: Any) -> list[tuple[int, int, int]]:
    """Line, number to pass and number so far of what a candidate's process says is undecided; nonsense is left out."""
    rows = claim if isinstance(claim, list) else []
    return [
        (row[0], row[1], row[2])
        for row in rows[:64]
        if isinstance(row, list) and len(row) == 3 and all(type(one) is int for one in row)
    ]


def number(source: str, largest: int) -> int:
    """The largest in a text that sizes could pass, but those that were asked, up to ``largest``, did not; or 0.

    Example:
        >>> number("if n > 1 << 14: pass", 5003), number("if n > 1 << 20: pass", 5003)
        (16384, 0)
    """
    return max((value for value in _numbers(source) if max(largest, _BLOCK) < value < MOST), default=0)


def least(largest: int, number: int, branches: Sequence[tuple[int, int, int]]) -> int:
    """A power of two of elements: beyond ``number``, and where a branch goes the other way; 0 where nothing asks for
    more than the ``largest`` that was asked.

    Example:
        >>> least(5003, 16384, []), least(5003, 0, [(3, 16, 5)]), least(5003, 0, [])
        (32768, 32768, 0)
    """
    sizes = [number + 1] * bool(number)
    sizes += [
        min(math.ceil(1.1 * largest * limit / max(most, 1)), MOST) for _, limit, most in branches if limit <= MOST
    ]
    return min(1 << (max(sizes) - 1).bit_length(), MOST) if sizes else 0


def _numbers(source: str) -> set[int]:
    values = (_value(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant | ast.BinOp))
    return {value for value in values if value is not None}


def _value(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        return None
    left, right = _value(node.left), _value(node.right)
    if left is None or right is None or not (0 <= left < 1 << 32 and 0 <= right < 1 << 32):
        return None
    if isinstance(node.op, ast.LShift | ast.Pow) and right > 32:
        return None
    return _OPERATORS[type(node.op)](left, right)
