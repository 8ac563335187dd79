"""Calls of Python's own modules in a candidate's host code: what they call in turn is followed, and what they hold.

What they are at run time is in `shelf`: stand-ins where Python's own would keep a state or hide code.
"""

from __future__ import annotations

import ast
from abc import abstractmethod

from slime_kernelbench.judge import names
from slime_kernelbench.judge.calls import Calls
from slime_kernelbench.judge.spared import is_spared
from slime_kernelbench.judge.values import PLAIN, TENSOR, UNKNOWN, Facts, Scope, Value, code_of, only

_ROUNDS = 6  # of functools.reduce, until it gives nothing new
_IDENTITIES = frozenset({"functools.wraps", "functools.lru_cache", "functools.cache", "abc.abstractmethod"})
_MEMBERS = frozenset({"itertools.chain", "itertools.repeat"})  # they give what is in their arguments, not tuples of it


class Standard(Calls):
    """Follows imports, and calls of what `names.SHELF` has."""

    @abstractmethod
    def define(self, node: ast.AST, name: str, facts: Facts, scope: Scope) -> None:
        """Give a name its facts."""

    # Imports.

    def on_Import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            path = alias.name if alias.asname else alias.name.partition(".")[0]
            value = Value("module", path)
            if is_spared(alias.name):
                value = Value("outside", alias.name)
            elif alias.name not in names.IMPORTS and alias.name not in names.SHELF:
                if self.guarded:  # it raises, and is caught
                    continue
                self.refuse(node, "forbidden_import", f"import of {alias.name} is not allowed")
            self.define(node, alias.asname or path, only(value), scope)

    def on_ImportFrom(self, node: ast.ImportFrom, scope: Scope) -> None:
        root = node.module or ""
        for alias in node.names:
            path = f"{root}.{alias.name}"
            permitted = root in names.IMPORTS or root in names.SHELF or root == "triton.runtime" or is_spared(root)
            if node.level or alias.name == "*" or not permitted:
                if self.guarded and not node.level and alias.name != "*":
                    continue
                self.refuse(node, "forbidden_import", f"import of {path} is not allowed")
            elif root != "__future__":
                of_typing = root in names.TYPING_MODULES and alias.name not in names.TYPING
                outside = is_spared(root, alias.name) or of_typing
                facts = only(Value("outside", path)) if outside else self.library(node, path, scope.hot)
                self.define(node, alias.asname or alias.name, facts, scope)

    # Calls.

    def call_standard(
        self, node: ast.Call, path: str, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        root, _, last = path.partition(".")
        operands = frozenset().union(*arguments, *keywords.values())
        if root in ("functools", "dataclasses") and "**" in keywords:
            self.refuse(node, "dynamic_code", f"{path} takes neither * nor ** in a candidate: its code is followed")
            return only(UNKNOWN)
        if path in _IDENTITIES:
            return (frozenset() if last == "wraps" else code_of(operands)) | _decorator(path)
        match path:
            case "functools.partial":
                return self._partial(node, arguments, keywords)
            case "functools.reduce":
                return self._reduced(node, arguments, scope)
            case "dataclasses.dataclass":
                if arguments:
                    self.refuse(node, "dynamic_code", "dataclass is a decorator; it is not called with a class")
                return _decorator(path)
            case "dataclasses.field":
                results = (self._call(node, callee, [], {}, scope) for callee in keywords.get("default_factory", ()))
                self.escape([operands], hot=True)
                return keywords.get("default", frozenset()).union(*results) | only(PLAIN)
            case "logging.getLogger":
                return only(Value("library", "logging.Logger"))
        if root in ("collections", "contextlib"):
            return self._collected(node, last, arguments, keywords, scope)
        if root in ("operator", "numpy"):
            return self._operated(node, path, arguments, scope)
        if root == "itertools":
            items = self.opened(operands)
            inside = items | self.opened(self.boxes(items))
            return self.box(node, inside if path in _MEMBERS else self.box(node, items, scope, "inner"), scope)
        return only(PLAIN)  # a warning, a log's line, an enum's number

    def _partial(self, node: ast.Call, arguments: list[Facts], keywords: dict[str, Facts]) -> Facts:
        value = Value("partial", node=id(node))
        self.partials[value] = (len(arguments), tuple(keywords))
        for key, facts in [*enumerate(arguments), *keywords.items()]:
            self.table.grow(facts, "partial", value, key)
        return only(value)

    def call_partial(
        self, node: ast.Call, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        """A call of what `functools.partial` made: its own arguments first."""
        count, named = self.partials[callee]
        bound = {key: self.table.get("partial", callee, key) or frozenset() for key in (*range(count), *named)}
        values = [bound[number] for number in range(1, count)] + arguments
        named_facts = {name: bound[name] for name in named} | keywords
        if "**" in keywords:  # what is in it may stand anywhere
            named_facts["**"] = keywords["**"].union(*bound.values())
        facts: Facts = frozenset()
        for function in bound.get(0, frozenset()):
            facts |= self._call(node, function, values, named_facts, scope)
        return facts or only(UNKNOWN)

    def held_by_partial(self, value: Value) -> Facts:
        """What a partial function may call or give to what it calls."""
        count, named = self.partials[value]
        return frozenset().union(*(self.table.get("partial", value, key) or () for key in (*range(count), *named)))

    def _reduced(self, node: ast.Call, arguments: list[Facts], scope: Scope) -> Facts:
        if len(arguments) < 2:
            self.refuse(node, "dynamic_code", "functools.reduce needs a function and what it goes through")
            return only(UNKNOWN)
        items = self.opened(arguments[1])
        facts = items.union(*arguments[2:])
        for _ in range(_ROUNDS):
            results = frozenset().union(*(self._call(node, one, [facts, items], {}, scope) for one in arguments[0]))
            if results <= facts:
                return facts
            facts |= results
        self.escape([facts], hot=True)
        return only(UNKNOWN)

    def _collected(
        self, node: ast.Call, name: str, arguments: list[Facts], keywords: dict[str, Facts], scope: Scope
    ) -> Facts:
        operands = frozenset().union(*arguments, *keywords.values())
        if name in ("contextmanager", "namedtuple"):
            self.refuse(
                node, "dynamic_code", f"{name} stands at the top of the file, as a decorator or NAME = {name}()"
            )
        if name not in ("OrderedDict", "defaultdict"):
            return only(PLAIN) | code_of(operands)
        defaults = [self._call(node, one, [], {}, scope) for one in arguments[0]] if name == "defaultdict" else []
        inside = self.opened(operands)
        return self.box(node, inside.union(self.opened(self.boxes(inside)), code_of(operands), *defaults), scope)

    def _operated(self, node: ast.Call, path: str, arguments: list[Facts], scope: Scope) -> Facts:
        operands = frozenset().union(*arguments)
        for facts in arguments:
            self._computes(node, facts if facts == only(TENSOR) else self.opened(facts), scope, path)
        if path.startswith("operator.") and operands - only(PLAIN):
            boxes = any(fact.kind == "box" for fact in operands)
            result = (
                self.box(node, self.opened(operands), scope)
                if boxes
                else only(TENSOR if TENSOR in operands else UNKNOWN)
            )
            return result | code_of(operands)
        return only(PLAIN)


def _decorator(path: str) -> Facts:
    return only(Value("decorator", path))


__all__ = ["Standard"]
