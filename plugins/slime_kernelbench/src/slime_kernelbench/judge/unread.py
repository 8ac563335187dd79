"""Functions that nobody read cannot run: the same source with those closed.

What the policy follows is what it vouches for. However a function that it did not follow is reached at run time, it
raises there; everything else stays in its line.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from itertools import accumulate

WHY = "was called in a way that cannot be told from the text"


def without_unread(source: str, tree: ast.Module, read: Collection[int]) -> str:
    """The source, with functions of ``tree`` whose ids are not in ``read`` raising where they would do something.

    Example:
        >>> text = "def f(x):\\n    return x"
        >>> without_unread(text, ast.parse(text), ())
        "def f(x):\\n    raise RuntimeError('f was called in a way that cannot be told from the text')"
    """
    data = source.encode()
    begins = [0, *accumulate(map(len, data.splitlines(keepends=True)))]
    for node in reversed(list(_outermost(tree, read))):
        last, line, column = node.body[-1], *_beginning(node.body[0], data, begins)
        begin = begins[line - 1] + column
        end = begins[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0)
        rest = "\n" * ((last.end_lineno or 0) - line) + ")"  # in brackets, where lines may end
        text = f"raise RuntimeError({f'{node.name} {WHY}'!r}" + rest
        data = data[:begin] + text.encode() + data[end:]
    return data.decode()


def _beginning(first: ast.stmt, data: bytes, begins: list[int]) -> tuple[int, int]:
    """Line and column where a statement begins, its decorators with it: the tree has these behind their ``@``."""
    decorators = getattr(first, "decorator_list", [])
    line = decorators[0].lineno if decorators else first.lineno
    while decorators and data[begins[line - 1] + first.col_offset :][:1] != b"@":
        line -= 1
    return line, first.col_offset


def _outermost(node: ast.AST, read: Collection[int]) -> Iterator[ast.FunctionDef]:
    """In the order of the text; what stands within one of them goes with it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and id(child) not in read:
            yield child
        else:
            yield from _outermost(child, read)
