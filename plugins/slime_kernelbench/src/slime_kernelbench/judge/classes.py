"""Classes of a candidate's host code: what they may be made of, and what making and calling their objects follows."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Sequence

from slime_kernelbench.judge import names
from slime_kernelbench.judge.calls import Calls
from slime_kernelbench.judge.values import UNKNOWN, ClassFacts, Facts, Scope, Value, only

_FUNCTION = "torch.autograd.Function"
_BASES = frozenset({"torch.nn.Module", "torch.autograd.Function", "builtins.object"})


class Classes(Calls):
    """Reads class definitions; bodies of methods are left to `Flow`."""

    @abstractmethod
    def define_function(
        self, node: ast.FunctionDef, scope: Scope, owner: str | None, body: Scope | None = None
    ) -> Value:
        """A function or, with ``owner``, a method that stands in the class body ``body``."""

    @abstractmethod
    def define(self, node: ast.AST, name: str, facts: Facts, scope: Scope) -> None:
        """Give a name its facts."""

    def on_ClassDef(self, node: ast.ClassDef, scope: Scope) -> None:
        if scope.outer is not None or node.name in self.classes or node.keywords or node.decorator_list:
            self.refuse(
                node,
                "dynamic_code",
                "a class stands once, at the top of the file, with neither metaclass nor decorator",
            )
        bases = [self._base(node, base, scope) for base in node.bases]
        own = [self.classes[base.name] for base in bases if base.kind == "class"]
        facts = ClassFacts(
            name=node.name,
            node=node,
            methods={},
            order=(node.name, *_merged([list(base.order) for base in own] + [[base.name for base in own]])),
            is_module=any(base.name == "torch.nn.Module" for base in bases) or any(base.is_module for base in own),
            is_function=any(base.name == _FUNCTION for base in bases) or any(base.is_function for base in own),
        )
        self.classes[node.name] = facts
        body = Scope(self.table, id(node), outer=scope, inline=True, of_class=True)
        for statement in node.body:
            self._class_statement(statement, facts, scope, body)
        self.define(node, node.name, only(Value("class", node.name)), scope)

    def _base(self, node: ast.ClassDef, base: ast.expr, scope: Scope) -> Value:
        found = self.facts(base, scope)
        fact = next(iter(found)) if len(found) == 1 else UNKNOWN
        if fact.kind != "class" and (fact.kind != "library" or fact.name not in _BASES):
            self.refuse(base, "inherits_reference", f"base {ast.unparse(base)} of {node.name} is not allowed")
        return fact

    def _class_statement(self, statement: ast.stmt, facts: ClassFacts, scope: Scope, body: Scope) -> None:
        if isinstance(statement, ast.FunctionDef):
            special = statement.name.startswith("__") and statement.name != "__init__"
            if special or statement.name in names.NO_OVERRIDE:
                self.refuse(statement, "monkeypatch", f"a candidate may not define {statement.name}")
            facts.methods[statement.name] = statement
            body.define(statement.name, only(self.define_function(statement, scope, facts.name, body)))
        elif isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
            self._class_attributes(statement, statement.targets, self.value(statement.value, body), facts, body)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            self.value(statement.annotation, body)
            if statement.value is not None:
                self._class_attributes(statement, [statement.target], self.value(statement.value, body), facts, body)
        elif not isinstance(statement, ast.Pass) and not _docstring(statement):
            self.refuse(statement, "forbidden_syntax", f"{type(statement).__name__} is not allowed in a class")

    def _class_attributes(
        self, node: ast.stmt, targets: Sequence[ast.expr], held: Facts, facts: ClassFacts, body: Scope
    ) -> None:
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if name.startswith("__") or name in names.NO_OVERRIDE or name == "forward":
                self.refuse(node, "monkeypatch", f"a candidate may not define {name}")
            body.define(name, held)
            self.table.grow(held, "attribute", facts.name, name)
            self.own_attributes.add(name)

    def call_class(self, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], hot: bool) -> Facts:
        """Follow ``__init__``; what it makes may be called later."""
        if self.method_of(callee.name, "__init__") is not None:
            self.call_method(callee.name, "__init__", arguments, keywords, hot)
        return only(Value("instance", callee.name))

    def call_method(
        self,
        owner: str,
        method: str,
        arguments: list[Facts],
        keywords: dict[str, Facts],
        hot: bool,
        bound: Facts = frozenset(),
    ) -> Facts:
        """Follow a method, with the object ``bound`` first (else any of the class ``owner``) unless it is static."""
        node = self.method_of(owner, method)
        if node is None:
            return only(UNKNOWN)
        static = {ast.unparse(decorator) for decorator in node.decorator_list}
        if "staticmethod" not in static:
            kind = "class" if "classmethod" in static else "self"
            arguments = [frozenset(Value(kind, of.name) for of in bound or only(Value("self", owner))), *arguments]
        return self.call_function(Value("function", method, node=id(node)), arguments, keywords, hot)


def _docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _merged(sequences: list[list[str]]) -> list[str]:
    """Python's order of bases (C3); what is left over where there is none."""
    found: list[str] = []
    while sequences := [sequence for sequence in sequences if sequence]:
        heads = [sequence[0] for sequence in sequences]
        first = next((head for head in heads if not any(head in sequence[1:] for sequence in sequences)), heads[0])
        found.append(first)
        sequences = [[name for name in sequence if name != first] for sequence in sequences]
    return found
