"""Bodies of a candidate's kernels: they may name triton's language, their arguments and each other, nothing else.

The interpreter runs a kernel's body as Python, where any name of the file would work; on a GPU it would not compile.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from slime_kernelbench.judge import names
from slime_kernelbench.judge.values import Facts, Finding, Scope

_SYNTAX = (
    ast.Try,
    ast.With,
    ast.AsyncWith,
    ast.AsyncFor,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Lambda,
    ast.Global,
    ast.Nonlocal,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.Raise,
    ast.Delete,
    ast.Match,
)


class Kernels:
    """Checks every kernel of a module once; ``calls`` afterwards says which kernels name which, ``stores`` which
    store."""

    def __init__(
        self,
        kernels: dict[str, ast.FunctionDef],
        around: Callable[[ast.FunctionDef], Scope],
        inmost: Callable[[Facts], Facts],
    ) -> None:
        self.kernels = kernels
        self.local: set[int] = set()  # ids of names that a comprehension gives values, where they mean these
        self.inmost = inmost  # of what containers hold
        self.findings: set[Finding] = set()
        self.calls: dict[str, set[str]] = {}
        self.stores: set[str] = set()
        for name, node in kernels.items():
            self.scope = around(node)  # what the kernel that is looked at sees
            self._check(name, node)

    def reached(self, launched: set[str]) -> set[str]:
        """The kernels launched, and all that they name."""
        names: set[str] = set()
        waiting = list(launched)
        while waiting:
            name = waiting.pop()
            if name not in names:
                names.add(name)
                waiting.extend(self.calls.get(name, ()))
        return names

    def _refuse(self, node: ast.AST, rule: str, message: str) -> None:
        self.findings.add(Finding(getattr(node, "lineno", 0), rule, message))

    def _check(self, name: str, kernel: ast.FunctionDef) -> None:
        arguments = kernel.args
        local_names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        body = [node for statement in kernel.body for node in ast.walk(statement)]
        _targets(body, self.local)
        local_names |= {
            node.id
            for node in body
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in self.local
        }
        self.calls[name] = set()
        inner = {id(node.value) for node in body if isinstance(node, ast.Attribute)}
        for node in body:
            if isinstance(node, _SYNTAX) or (isinstance(node, ast.FunctionDef) and node is not kernel):
                self._refuse(node, "kernel_syntax", f"{type(node).__name__} is not allowed in a kernel")
            elif (
                isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not self._is_local(node, local_names)
            ):
                self._name(name, node, is_value=id(node) not in inner)
            elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                self._refuse(node, "kernel_syntax", "a kernel assigns to names alone; results leave by tl.store")
            elif isinstance(node, ast.Attribute):
                self._attribute(name, node, local_names, is_value=id(node) not in inner)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.startswith("__"):
                self._refuse(node, "dynamic_code", f"{node.id} may not be given a value")

    def _name(self, kernel: str, node: ast.Name, *, is_value: bool) -> None:
        facts: Facts | None = self.scope.find(node.id)
        if facts is None:
            self._builtin(node, "builtins." + node.id)
            return
        for fact in self.inmost(facts):
            if fact.kind == "kernel":
                self.calls[kernel].add(fact.name)
            elif fact.kind == "library" and fact.name.startswith("triton.language."):
                self._language(kernel, node, fact.name)
            elif fact.kind == "library" and fact.name.startswith(("math.", "builtins.")):
                self._builtin(node, fact.name)
            elif fact.kind == "module" and fact.name in names.IMPORTS:
                if is_value:
                    self._refuse(node, "module_as_value", f"module {fact.name} is used as a value")
            elif fact.kind != "plain":
                self._refuse(node, "kernel_names_host", f"{node.id} is host code; a kernel cannot use it")

    def _builtin(self, node: ast.Name, path: str) -> None:
        if path.startswith("builtins.") and path.partition(".")[2] not in names.KERNEL_BUILTINS:
            self._refuse(node, "unknown_name", f"name {node.id} is not defined in the kernel, or is not allowed")

    def _language(self, kernel: str, node: ast.AST, path: str) -> None:
        if not names.of_language(path):
            self._refuse(node, "forbidden_name", f"{path} is not allowed in a kernel")
        if path.rpartition(".")[2] in names.STORES:
            self.stores.add(kernel)

    def _attribute(self, kernel: str, node: ast.Attribute, local_names: set[str], *, is_value: bool) -> None:
        paths = self._dotted(node, local_names)
        if not paths:
            if node.attr not in names.KERNEL_ATTRIBUTES:
                self._refuse(node, "forbidden_attribute", f"attribute {node.attr} is not allowed in a kernel")
            if node.attr in names.STORES:
                self.stores.add(kernel)
        for path in paths:
            self._path(kernel, node, path, is_value=is_value)

    def _path(self, kernel: str, node: ast.Attribute, path: str, *, is_value: bool) -> None:
        if path.startswith("triton.language."):
            self._language(kernel, node, path)
        elif is_value and not path.startswith("math.") and path not in ("triton.cdiv", "triton.next_power_of_2"):
            self._refuse(node, "kernel_names_host", f"{path} is host code; a kernel cannot use it")

    def _is_local(self, node: ast.Name, local_names: set[str]) -> bool:
        """Whether a name is the kernel's, and not one of the file's or Python's."""
        return node.id in local_names or id(node) in self.local

    def _dotted(self, node: ast.Attribute, local_names: set[str]) -> list[str]:
        """The dotted names that an attribute of a library may be; none where its root is a value."""
        parts: list[str] = []
        base: ast.expr = node
        while isinstance(base, ast.Attribute):
            parts.append(base.attr)
            base = base.value
        if not isinstance(base, ast.Name) or self._is_local(base, local_names):
            return []
        facts = self.scope.find(base.id) or frozenset()
        return [".".join([one.name, *reversed(parts)]) for one in facts if one.kind in ("module", "library")]


def _targets(body: list[ast.AST], local: set[int]) -> None:
    """Adds to ``local`` the names that comprehensions give values to, where they have these: within, and not in the
    first thing that is iterated over."""
    for node in body:
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            outside = {id(part) for part in ast.walk(node.generators[0].iter)}
            within = [part for part in ast.walk(node) if isinstance(part, ast.Name) and id(part) not in outside]
            targets = {name for part in node.generators for name in _names(part.target)}
            local.update(id(part) for part in within if part.id in targets)


def _names(target: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}


__all__ = ["Kernels"]
