"""Smaller, odder versions of a problem: its constants rewritten through its syntax tree.

A size is an integer above 8 at the top level of the module, or inside `get_inputs` and `get_init_inputs`. Equal sizes
stay equal and larger ones stay larger, so that most relations between them survive; whether the reference still runs
is found out by running it (`reference`).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping

SMALLEST = 8  # integers up to here are hyper-parameters (kernel sizes, axes, group counts), never sizes
LONGEST = 5003  # of a row, where all other sizes are small: rows are no longer on most GPUs
_OPERATORS = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv}
_BODIES = ("get_inputs", "get_init_inputs")


def sizes(source: str) -> tuple[int, ...]:
    """The distinct sizes of a problem, ascending.

    Example:
        >>> sizes("ROWS, COLS = 16, 4 * 256\\ndef get_inputs(): return [torch.rand(ROWS, COLS)]")
        (16, 1024)

    Raises:
        SyntaxError: Where it does not parse.
    """
    return tuple(sorted({value for _, value in _places(ast.parse(source)) if value > SMALLEST}))


def resized(source: str, mapping: Mapping[int, int]) -> str:
    """The source with each size replaced as ``mapping`` says; text that is not code is lost."""
    tree = ast.parse(source)
    for node, value in list(_places(tree)):
        if value in mapping:
            _replace(tree, node, mapping[value])
    return ast.unparse(ast.fix_missing_locations(tree))


def proposals(sizes: tuple[int, ...], style: str) -> Iterator[dict[int, int]]:
    """Mappings to try, best first. ``style``: "even" (multiples of 8), "odd" (no multiple of a block), "long".

    Example:
        >>> next(proposals((1024, 4096), "odd"))
        {1024: 17, 4096: 25}
        >>> next(proposals((16, 4096), "even"))
        {16: 16, 4096: 24}
    """
    if not sizes:
        yield {}
        return
    if style == "long":
        yield {**_ascending(sizes[:-1], 1, 0), sizes[-1]: LONGEST}
        for last in (LONGEST, 1251, 625, 313, 157, 79, 41, 21):
            for rest in (16, 8):
                others = _ascending(sizes[:-1], rest, 0)
                if last > max(others.values(), default=0):
                    yield {**others, sizes[-1]: last}
        yield from ({size: min(base, size) for size in sizes} for base in (32, 24, 16, 12, 10, 8, 7, 6))
        return
    odd = 1 if style == "odd" else 0
    for base in (16, 24, 40, 8, 4):
        yield _ascending(sizes, base, odd)
    if odd:  # where sizes must divide: odd multiples of a power of two
        yield from ({size: 8 * (2 * index + base) for index, size in enumerate(sizes)} for base in (5, 3, 1))
    for add in (odd, 0) if odd else (0,):
        yield from ({size: min(base + add, size) for size in sizes} for base in (64, 32, 16, 8, 4))


def grown(sizes: tuple[int, ...], axis: int) -> Iterator[dict[int, int]]:
    """Mappings to larger sizes, none larger than it was: 0 is all of them alike, ascending; 1 the largest alone, and
    so on, descending.

    Example:
        >>> [next(grown((512, 4096), axis)) for axis in (0, 1, 2)]
        [{512: 9, 4096: 16}, {512: 8, 4096: 4096}, {512: 512, 4096: 8}]
    """
    if axis == 0:
        yield from ({size: max(9, int(size / 1.4**power)) for size in sizes} for power in range(40, -1, -1))
        return
    for rest in (8, 2, 1):
        for power in range(8):
            yield {
                size: max(size >> power, 9) if size == sizes[-axis] else min(size, rest + index)
                for index, size in enumerate(sizes)
            }


def _ascending(sizes: tuple[int, ...], base: int, odd: int) -> dict[int, int]:
    """Never larger than it was, but for making it odd."""
    sizes_now = {size: min(size, base + min(8, base) * index) for index, size in enumerate(sizes)}
    return {size: value | odd for size, value in sizes_now.items()}


def _value(node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if left is not None and right is not None and abs(left) < 1 << 40 and 0 < abs(right) < 1 << 40:
            return int(_OPERATORS[type(node.op)](left, right))
    return None


def _places(tree: ast.Module) -> Iterator[tuple[ast.expr, int]]:
    """Expressions that are sizes, with their values."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            yield from _inside(statement.value)
        elif isinstance(statement, ast.FunctionDef) and statement.name in _BODIES:
            yield from _inside(statement)


def _inside(node: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    for child in ast.iter_child_nodes(node) if not isinstance(node, ast.expr) else (node,):
        value = _value(child) if isinstance(child, ast.expr) else None
        if value is not None and isinstance(child, ast.expr):
            yield child, value
        else:
            for inner in ast.iter_child_nodes(child):
                if isinstance(inner, ast.expr):
                    yield from _inside(inner)
                else:
                    yield from _inside_other(inner)


def _inside_other(node: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _inside(child)
        else:
            yield from _inside_other(child)


def _replace(tree: ast.AST, old: ast.expr, value: int) -> None:
    new = ast.copy_location(ast.Constant(value=value), old)
    for parent in ast.walk(tree):
        for name, child in ast.iter_fields(parent):
            if child is old:
                setattr(parent, name, new)
                return
            if isinstance(child, list) and any(item is old for item in child):
                child[:] = [new if item is old else item for item in child]
                return
