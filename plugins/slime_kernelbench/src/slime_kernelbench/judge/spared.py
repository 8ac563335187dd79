"""Imports of a candidate's that it does not get: which they are, and its tree with None in the place of what they
name.

Models import more than they use. A candidate that never touches such a name is as good as one without the line; one
that does is refused by the static policy, and would find nothing there.
"""

from __future__ import annotations

import ast

from slime_kernelbench.judge import names

_WHOLE = ("torch", "triton")  # whose other modules are refused outright


def is_spared(module: str, name: str = "") -> bool:
    """Whether ``import module``, or ``from module import name``, gives a candidate nothing.

    Example:
        >>> is_spared("os"), is_spared("math"), is_spared("functools", "singledispatch")
        (True, False, True)
    """
    if module.partition(".")[0] in _WHOLE:
        return False
    if module in names.SHELF:
        return bool(name) and name not in names.SHELF[module]
    return module not in names.IMPORTS


class Spared(ast.NodeTransformer):
    """Puts ``NAME = None`` where such an import stands; every line stays where it was.

    Example:
        >>> ast.unparse(Spared().visit(ast.parse("import os, math")))
        'os = None\\nimport math'
    """

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        """One name after the other."""
        spared = [alias for alias in node.names if is_spared(alias.name)]
        node.names = [alias for alias in node.names if alias not in spared]
        return [_nothing(node, alias) for alias in spared] + ([node] if node.names else [])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        """One name after the other; what is relative, or a star, is left to be refused."""
        if node.level or node.module is None or any(alias.name == "*" for alias in node.names):
            return [node]
        spared = [alias for alias in node.names if is_spared(node.module, alias.name)]
        node.names = [alias for alias in node.names if alias not in spared]
        return [_nothing(node, alias) for alias in spared] + ([node] if node.names else [])


def _nothing(node: ast.stmt, alias: ast.alias) -> ast.stmt:
    target = ast.Name(alias.asname or alias.name.partition(".")[0], ast.Store())
    assignment = ast.Assign([target], ast.Constant(None))
    return ast.fix_missing_locations(ast.copy_location(assignment, node))


__all__ = ["Spared", "is_spared"]
