"""Small questions about a candidate's syntax tree, answered from the tree alone."""

from __future__ import annotations

import ast
import copy

from slime_kernelbench.judge.values import PLAIN, Value


def starred(parts: list[ast.expr]) -> bool:
    """Whether one of them is ``*x``."""
    return any(isinstance(part, ast.Starred) for part in parts)


def loaded(node: ast.AugAssign) -> ast.BinOp:
    """The operation of an augmented assignment, which reads its target."""
    target = copy.copy(node.target)
    target.ctx = ast.Load()
    return ast.copy_location(ast.BinOp(left=target, op=node.op, right=node.value), node)


def called(decorator: ast.expr, fact: Value) -> bool:
    """Whether a decorator is a call, such as ``@torch.no_grad()``, of what is allowed."""
    return isinstance(decorator, ast.Call) and fact == PLAIN and ast.unparse(decorator.func).startswith("torch.")


def is_main(test: ast.expr) -> bool:
    """Whether it asks if the file is run as a program."""
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")
