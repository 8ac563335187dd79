"""Classes of a candidate's host code: what they may be made of, and what making and calling their objects follows."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Sequence

from slime_kernelbench.judge import names
from slime_kernelbench.judge.standard import Standard
from slime_kernelbench.judge.syntax import class_of_tuple
from slime_kernelbench.judge.values import PLAIN, UNKNOWN, ClassFacts, Facts, Scope, Value, code_of, is_property, only

_NAMED_TUPLE = only(Value("library", "collections.namedtuple"))
_FUNCTION = "torch.autograd.Function"
_ENUMS = frozenset({"enum.Enum", "enum.IntEnum"})
_BASES = _ENUMS | {"torch.nn.Module", "torch.autograd.Function", "builtins.object", "abc.ABC", "typing.NamedTuple"}
_OF_ENUMS = frozenset({"builtins.str", "builtins.int"})  # bases beside an enum
_OWN = frozenset(
    {"__init__", "__call__", "__post_init__", "__repr__", "__str__"}
)  # what a class may define, if it is no module of torch


class Classes(Standard):
    """Reads class definitions; bodies of methods are left to `Flow`."""

    def __init__(self, allow: frozenset[str]) -> None:
        super().__init__(allow)
        self._written: dict[int, ast.AST] = {}  # classes that calls of namedtuple stand for

    @abstractmethod
    def define_function(
        self, node: ast.FunctionDef, scope: Scope, owner: str | None, body: Scope | None = None
    ) -> Facts:
        """A function or, with ``owner``, a method that stands in the class body ``body``."""

    def on_ClassDef(self, node: ast.ClassDef, scope: Scope) -> None:
        if scope.outer is not None or node.name in self.classes or node.keywords:
            self.refuse(node, "dynamic_code", "a class stands once, at the top of the file, without a metaclass")
        bases = [self._base(node, base, scope) for base in node.bases]
        parents = [self.classes[base.name] for base in bases if base.kind == "class"]
        named = {base.name for base in bases}
        facts = ClassFacts(
            name=node.name,
            node=node,
            methods={},
            order=(node.name, *_merged([list(base.order) for base in parents] + [[base.name for base in parents]])),
            is_module="torch.nn.Module" in named or any(base.is_module for base in parents),
            is_function=_FUNCTION in named or any(base.is_function for base in parents),
            is_enum=bool(named & _ENUMS) or any(base.is_enum for base in parents),
            is_record="typing.NamedTuple" in named or any(base.is_record for base in parents),
            is_tuple="typing.NamedTuple" in named or any(base.is_tuple for base in parents),
        )
        if named & _OF_ENUMS and not facts.is_enum:
            self.refuse(node, "inherits_reference", f"a base of {node.name} is not allowed without an enum")
        self._class_decorators(node, facts, scope)
        self.classes[node.name] = facts
        body = Scope(self.table, id(node), outer=scope, inline=True, of_class=True)
        for statement in node.body:
            self._class_statement(statement, facts, scope, body)
        if facts.is_module and self.method_of(node.name, "__call__") is not None:
            self.refuse(node, "monkeypatch", "a module of torch may not define __call__: forward is what it calls")
        self.define(node, node.name, only(Value("class", node.name)), scope)

    def named_tuple(self, node: ast.Assign, scope: Scope) -> bool:
        """Whether it is ``NAME = namedtuple("NAME", fields)``, which is the class that `typing.NamedTuple` makes."""
        target, call = node.targets[0], node.value
        if not (isinstance(target, ast.Name) and isinstance(call, ast.Call) and len(node.targets) == 1):
            return False
        if "namedtuple" not in ast.unparse(call.func) or self.facts(call.func, scope) != _NAMED_TUPLE:
            return False
        definition = self._written.setdefault(id(node), class_of_tuple(target.id, call) or ast.Pass())
        if not isinstance(definition, ast.ClassDef) or scope.outer is not None or target.id in self.classes:
            self.refuse(node, "dynamic_code", "a named tuple stands once, at the top of the file, with literal fields")
            return True
        facts = ClassFacts(target.id, definition, {}, (target.id,), is_module=False, is_record=True, is_tuple=True)
        self.classes[target.id] = facts
        body = Scope(self.table, id(definition), outer=scope, inline=True, of_class=True)
        for statement in definition.body:
            self._class_statement(statement, facts, scope, body)
        self.define(node, target.id, only(Value("class", target.id)), scope)
        return True

    def _class_decorators(self, node: ast.ClassDef, facts: ClassFacts, scope: Scope) -> None:
        for decorator in node.decorator_list:
            decorators = self.facts(decorator, scope)
            if {fact.name for fact in decorators} != {"dataclasses.dataclass"} or facts.is_module or facts.is_function:
                self.refuse(decorator, "dynamic_code", "a class may have dataclass as its decorator, a module none")
            facts.is_record = True

    def _base(self, node: ast.ClassDef, base: ast.expr, scope: Scope) -> Value:
        facts = self.facts(base, scope)
        fact = next(iter(facts)) if len(facts) == 1 else UNKNOWN
        if fact.kind != "class" and (fact.kind != "library" or fact.name not in _BASES | _OF_ENUMS):
            self.refuse(base, "inherits_reference", f"base {ast.unparse(base)} of {node.name} is not allowed")
        return fact

    def _class_statement(self, statement: ast.stmt, facts: ClassFacts, scope: Scope, body: Scope) -> None:
        if isinstance(statement, ast.FunctionDef):
            specials = {"__init__"} if facts.is_module or facts.is_function else _OWN
            special = statement.name.startswith("__") and statement.name not in specials
            if special or facts.is_enum or statement.name in names.NO_OVERRIDE:
                self.refuse(statement, "monkeypatch", f"a candidate may not define {statement.name} here")
            if statement.name == "forward" and is_property(statement):
                self.refuse(statement, "monkeypatch", "forward is a method")
            facts.methods[statement.name] = statement
            body.define(statement.name, self.define_function(statement, scope, facts.name, body))
        elif isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
            self._class_attributes(statement, statement.targets, self.value(statement.value, body), facts, body)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            self.value(statement.annotation, body)
            value = only(PLAIN) if statement.value is None else self.value(statement.value, body)
            if statement.value is not None or facts.is_record:
                self._class_attributes(statement, [statement.target], value, facts, body)
        elif not isinstance(statement, ast.Pass) and not _docstring(statement):
            self.refuse(statement, "forbidden_syntax", f"{type(statement).__name__} is not allowed in a class")

    def _class_attributes(
        self, node: ast.stmt, targets: Sequence[ast.expr], value: Facts, facts: ClassFacts, body: Scope
    ) -> None:
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if name.startswith("__") or name in names.NO_OVERRIDE or name == "forward":
                self.refuse(node, "monkeypatch", f"a candidate may not define {name}")
            if facts.is_enum and value != only(PLAIN):
                self.refuse(node, "dynamic_code", f"{name} of an enum is neither a number nor text")
            self._no_code(node, facts.name, value)
            body.define(name, value)
            self.table.grow(value, "attribute", facts.name, name)
            self.own_attributes.add(name)

    def call_class(self, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], hot: bool) -> Facts:
        """Follow ``__init__``; what it makes may be called later."""
        if self.classes[callee.name].is_enum:
            return only(PLAIN)
        if self.classes[callee.name].is_record:
            self._filled(callee.name, arguments, keywords)
            if self.method_of(callee.name, "__post_init__") is not None:
                self.call_method(callee.name, "__post_init__", [], {}, hot)
        if self.method_of(callee.name, "__init__") is not None:
            self.call_method(callee.name, "__init__", arguments, keywords, hot)
        return only(Value("instance", callee.name))

    def _filled(self, owner: str, arguments: list[Facts], keywords: dict[str, Facts]) -> None:
        """The fields of a record, by name; by position any of them."""
        anywhere = frozenset().union(*arguments, keywords.get("**", frozenset()))
        self._no_code(self.at, owner, anywhere.union(*keywords.values()))
        for one in self._order(owner):
            for statement in self.classes[one].node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    name = statement.target.id
                    self.table.grow(anywhere | keywords.get(name, frozenset()), "attribute", owner, name)

    def _no_code(self, node: ast.AST, owner: str, facts: Facts) -> None:
        """Refuse code in a named tuple: whatever goes through the tuple would have it."""
        if self.classes[owner].is_tuple and code_of(self.inmost(facts)):
            self.refuse(node, "unresolved_call", "a named tuple holds code, where it cannot be followed")

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
    merged: list[str] = []
    while sequences := [sequence for sequence in sequences if sequence]:
        heads = [sequence[0] for sequence in sequences]
        first = next((head for head in heads if not any(head in sequence[1:] for sequence in sequences)), heads[0])
        merged.append(first)
        sequences = [[name for name in sequence if name != first] for sequence in sequences]
    return merged
