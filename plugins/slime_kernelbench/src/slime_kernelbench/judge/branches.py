"""Comparisons of numbers in a candidate's host code, and which way each went: what depends on sizes that no case had.

Runs in the candidate's process, in the interpreter alone: where time is measured, its code is as it was written.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

COMPARED, CHOSEN = " compared", " chosen"  # names that no source can spell
_SIGNS: dict[type[ast.cmpop], str] = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}


class Branches:
    """What was compared so far, by line and call.

    Example:
        branches = Branches()
        names = {COMPARED: branches.compared, CHOSEN: branches.chosen}
        executed("small = n < 16", "f.py", names | {"n": 3}, marked(ast.parse("small = n < 16")))
        branches.open()     # [] until another call has had another n: then [[1, 16, 3]]
    """

    def __init__(self) -> None:
        self.call = 0
        self._pairs: dict[int, dict[int, list[tuple[int, int]]]] = {}  # by place and call
        self._outcomes: dict[int, set[bool]] = {}

    def compared(self, place: int, left: Any, sign: str, right: Any) -> Any:
        """What the comparison says."""
        outcome = getattr(operator, sign)(left, right)
        self._see(place, left, right, outcome)
        return outcome

    def chosen(self, place: int, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """The lesser or the larger, as ``function`` has it."""
        if type(left) is int and type(right) is int:  # other values may do something when they are compared
            self._see(place, left, right, left < right)
        return function(left, right)

    def open(self) -> list[list[int]]:
        """Lines of comparisons that went one way though one side changed from call to call; what that has to pass, the
        most it was."""
        splits: set[tuple[int, int, int]] = set()
        for place, calls in self._pairs.items():
            lefts, rights = ({max(pair[side] for pair in pairs) for pairs in calls.values()} for side in (0, 1))
            if len(self._outcomes[place]) > 1 or (len(lefts) > 1) == (len(rights) > 1):
                continue
            varied, fixed = (lefts, max(rights)) if len(lefts) > 1 else (rights, max(lefts))
            if max(varied) <= fixed:
                splits.add((place >> 16, fixed, max(varied)))
        return [list(one) for one in sorted(splits)]

    def _see(self, place: int, left: Any, right: Any, outcome: Any) -> None:
        if type(left) is not int or type(right) is not int:
            return
        pairs = self._pairs.setdefault(place, {}).setdefault(self.call, [])
        if len(pairs) < 1000:
            pairs.append((left, right))
        self._outcomes.setdefault(place, set()).add(bool(outcome))


def marked(tree: ast.Module) -> ast.Module:
    """The same code, whose comparisons outside of kernels are calls of `Branches`."""
    _Marked().visit(tree)
    return ast.fix_missing_locations(tree)


class _Marked(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        names = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in _parts(node)}
        if "jit" in names:  # the interpreter reads kernels from the text
            return node
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        sign = _SIGNS.get(type(node.ops[0])) if len(node.ops) == 1 else None
        if sign is None:
            return node
        return _call(node, COMPARED, node.left, ast.Constant(sign), node.comparators[0])

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        plain = not node.keywords and not any(isinstance(argument, ast.Starred) for argument in node.args)
        if plain and isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) == 2:
            return _call(node, CHOSEN, node.func, *node.args)
        return node


def _parts(node: ast.FunctionDef) -> list[ast.AST]:
    return [part for decorator in node.decorator_list for part in ast.walk(decorator)]


def _call(node: ast.expr, name: str, *arguments: ast.expr) -> ast.Call:
    place = ast.Constant((node.lineno << 16) + node.col_offset)
    call = ast.Call(ast.Name(name, ast.Load()), [place, *arguments], [])
    return ast.copy_location(call, node)
