"""Statements of a candidate's host code that choose, repeat or guard others."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from slime_kernelbench.judge.classes import Classes
from slime_kernelbench.judge.syntax import is_main
from slime_kernelbench.judge.values import PLAIN, UNKNOWN, Facts, Scope, TooComplex, only

_ROUNDS = 12  # of a loop: until nothing new is found
_LEAVES = (ast.Return, ast.Break, ast.Continue)


class Control(Classes):
    """Follows every way through them; what stands in a block is left to `Flow`."""

    @abstractmethod
    def block(self, body: list[ast.stmt], scope: Scope) -> None:
        """Follow statements in order."""

    def on_If(self, node: ast.If, scope: Scope) -> None:
        if is_main(node.test):
            return self.block(node.orelse, scope)
        self.value(node.test, scope)
        self._branches(scope, node.body, node.orelse)
        return None

    def on_For(self, node: ast.For, scope: Scope) -> None:
        items = self.value(node.iter, scope)
        for _ in self._rounds(scope):
            self.bind(node.target, self.opened(items), scope)
            self._branches(scope, node.body, [])
        self.block(node.orelse, scope)

    def on_While(self, node: ast.While, scope: Scope) -> None:
        for _ in self._rounds(scope):
            self.value(node.test, scope)
            self._branches(scope, node.body, node.orelse)

    def _rounds(self, scope: Scope) -> Iterator[None]:
        """Rounds of a loop: two, and more until its names are what they were before."""
        for number in range(_ROUNDS):
            before = dict(scope.names)
            yield
            if number and scope.names == before:
                return
        raise TooComplex

    def on_With(self, node: ast.With, scope: Scope) -> None:
        for item in node.items:
            if any(fact.kind in ("instance", "self") for fact in self.value(item.context_expr, scope)):
                self.refuse(node, "forbidden_syntax", "own context managers are not allowed")
            if item.optional_vars is not None:
                self.bind(item.optional_vars, only(UNKNOWN), scope)
        self.block(node.body, scope)

    def on_Try(self, node: ast.Try, scope: Scope) -> None:
        leaves = any(isinstance(part, _LEAVES) for last in node.finalbody for part in ast.walk(last))
        if (scope.hot and node.handlers) or leaves:
            message = "while the answer is made no error is caught: a kernel that fails must fail"
            self.refuse(node, "try_fallback", message)
        outer = self.guarded, self.trying
        self.guarded |= any(map(_catches_imports, node.handlers))
        self.trying |= bool(node.handlers)
        self.block(node.body, scope)
        self.guarded, self.trying = outer
        for handler in node.handlers:
            with self.perhaps(scope):
                self.value(handler.type, scope)
                if handler.name is not None:
                    self._named(handler, handler.name, only(UNKNOWN), scope)
                self.block(handler.body, scope)
        with self.perhaps(scope):
            self.block(node.orelse, scope)
        self.block(node.finalbody, scope)

    def _named(self, node: ast.AST, name: str, facts: Facts, scope: Scope) -> None:
        self.bind(ast.copy_location(ast.Name(name, ast.Store()), node), facts, scope)

    def on_Match(self, node: ast.Match, scope: Scope) -> None:
        subject = self.value(node.subject, scope)
        for case in node.cases:
            with self.perhaps(scope):
                self._pattern(case.pattern, subject | self.opened(subject) | only(PLAIN), scope)
                self.value(case.guard, scope)
                self.block(case.body, scope)

    def _pattern(self, pattern: ast.pattern, facts: Facts, scope: Scope) -> None:
        """The names of a pattern may be what is matched, or what that holds at any depth."""
        inside = facts | self.opened(facts)
        name = getattr(pattern, "rest" if isinstance(pattern, ast.MatchMapping) else "name", None)
        if isinstance(name, str):
            self._named(pattern, name, inside | only(UNKNOWN), scope)
        for part in ast.iter_child_nodes(pattern):
            if isinstance(part, ast.pattern):
                self._pattern(part, inside, scope)
            elif isinstance(part, ast.expr):
                self.value(part, scope)
        if isinstance(pattern, ast.MatchClass) and (pattern.kwd_attrs or pattern.patterns):
            self.refuse(
                pattern, "forbidden_syntax", "a class in a pattern stands alone: its attributes are read later"
            )

    @contextmanager
    def perhaps(self, scope: Scope, *, unsure: bool = True) -> Iterator[None]:
        """What is followed within may not come to pass: names may be what they were, too."""
        before = dict(scope.names)
        yield
        for name, facts in before.items() if unsure else ():
            scope.names[name] = scope.names.get(name, frozenset()) | facts

    def _branches(self, scope: Scope, *bodies: list[ast.stmt]) -> None:
        before = dict(scope.names)
        merged = dict(before)
        for body in bodies:
            scope.names = dict(before)
            self.block(body, scope)
            for name, facts in scope.names.items():
                merged[name] = merged.get(name, frozenset()) | facts if before.get(name) != facts else merged[name]
        scope.names = merged


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    """Whether an import that fails ends here."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        one is None or ast.unparse(one) in ("ImportError", "ModuleNotFoundError", "Exception") for one in caught
    )


__all__ = ["Control"]
