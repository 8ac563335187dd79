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


def is_generator(function: ast.FunctionDef | ast.Lambda) -> bool:
    """Whether a ``yield`` stands in it, and not in a function within."""
    waiting: list[ast.AST] = [*function.body] if isinstance(function, ast.FunctionDef) else [function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def is_type_of(node: ast.Call) -> bool:
    """Whether it is ``type(x)``: a question, and no class that is made."""
    bare = len(node.args) == 1 and not node.keywords and not starred(node.args)
    return bare and isinstance(node.func, ast.Name) and node.func.id == "type"


def class_of_tuple(name: str, call: ast.Call) -> ast.ClassDef | None:
    """The class of fields that a call of ``namedtuple`` stands for; None where they are not spelled out."""
    fields = call.args[1] if len(call.args) == 2 else None
    more = {keyword.arg: keyword.value for keyword in call.keywords}
    named = _texts(fields)
    defaults = getattr(more.get("defaults"), "elts", [])
    if named is None or set(more) - {"defaults"} or bool(more) != bool(defaults) or starred(defaults):
        return None
    values = [None] * (len(named) - len(defaults)) + defaults
    text = "class it:\n" + "".join(f"    {field}: None\n" for field in named if field.isidentifier()) + "    pass\n"
    definition = ast.parse(text).body[0]
    if not isinstance(definition, ast.ClassDef) or len(definition.body) != len(named) + 1 or len(values) != len(named):
        return None
    definition.name = name
    for statement, value in zip(definition.body, values):
        if isinstance(statement, ast.AnnAssign):
            statement.value = value
    for part in ast.walk(definition):
        ast.copy_location(part, call)
    return definition


def _texts(node: ast.expr | None) -> list[str] | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace(",", " ").split()
    parts = node.elts if isinstance(node, ast.List | ast.Tuple) else [ast.Constant(None)]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return texts if len(texts) == len(parts) else None
