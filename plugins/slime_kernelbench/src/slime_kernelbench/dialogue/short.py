"""Short form of a problem for a small model: its sizes and its forward pass in a few lines.

    short_form(softmax_problem.source)
        ROWS = 24
        COLUMNS = 80
        return torch.softmax(x, dim=1)

Parsed only, never run. Comments, docstrings and whatever is no part of ``Model.forward`` are left out.
"""

from __future__ import annotations

import ast


def short_form(source: str) -> str:
    """Module-level sizes, then the statements of ``Model.forward``, a line each; ends with a newline.

    A source that has no such method, or does not parse, is given as it is.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    forward = _forward(tree)
    if forward is None:
        return source
    sizes = [node for node in tree.body if isinstance(node, ast.Assign) and _is_size(node.value)]
    return "".join(f"{ast.unparse(node)}\n" for node in [*sizes, *_without_docstring(forward.body)])


def _forward(tree: ast.Module) -> ast.FunctionDef | None:
    model = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Model"), None)
    methods = [] if model is None else [node for node in model.body if isinstance(node, ast.FunctionDef)]
    return next((node for node in methods if node.name == "forward"), None)


def _is_size(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] if documented and len(body) > 1 else body
