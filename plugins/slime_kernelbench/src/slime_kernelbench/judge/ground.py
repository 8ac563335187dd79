"""What every part of the analysis has: tables that grow, containers, calls that a later part follows."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod

from slime_kernelbench.judge.libraries import Libraries
from slime_kernelbench.judge.values import UNKNOWN, ClassFacts, Facts, Scope, Table, Value, code_of, only

FUEL = 60_000  # AST nodes looked at before the analysis gives up


class Ground(Libraries, ABC):
    """The analysis before it knows of any syntax; `Flow` is the whole of it."""

    def __init__(self, allow: frozenset[str]) -> None:
        super().__init__(allow)
        self.table = Table()
        self.classes: dict[str, ClassFacts] = {}
        self.launched: set[str] = set()
        self.own_attributes: set[str] = set()
        self.partials: dict[Value, tuple[int, tuple[str, ...]]] = {}  # how many arguments they hold, and which by name
        self.escaped: set[Value] = set()  # objects and classes that were handed to somebody else's code
        self.guarded = False  # an import that fails is caught here
        self.trying = False  # and any statement may not be reached
        self.fuel = FUEL
        self.at: ast.AST = ast.Pass()  # the call that is looked at

    @abstractmethod
    def call_function(self, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], hot: bool) -> Facts:
        """What a call of a function of the candidate's gives."""

    @abstractmethod
    def call_class(self, callee: Value, arguments: list[Facts], keywords: dict[str, Facts], hot: bool) -> Facts:
        """What making an object of a class of the candidate's gives."""

    @abstractmethod
    def call_method(
        self,
        owner: str,
        method: str,
        arguments: list[Facts],
        keywords: dict[str, Facts],
        hot: bool,
        bound: Facts = frozenset(),
    ) -> Facts:
        """What a call of a method of an object of the candidate's gives."""

    @abstractmethod
    def define_lambda(self, node: ast.Lambda, scope: Scope) -> Facts:
        """A lambda as a value; its body is looked at."""

    @abstractmethod
    def escape(self, arguments: list[Facts], hot: bool) -> None:
        """Code that is handed to somebody else may be called there with anything."""

    @abstractmethod
    def bind(self, target: ast.expr, facts: Facts, scope: Scope) -> None:
        """Give ``target`` of an assignment its facts."""

    def box(self, node: ast.AST, contents: Facts, scope: Scope, part: str = "") -> Facts:
        """A container that ``node`` makes, and which holds ``contents`` among others.

        Where it is made in set-up it is ``kept``: still there in the next call. ``part``: the tuples within.
        """
        box = Value("box", part or ("" if scope.hot else "kept"), node=id(node))
        self.table.grow(contents, "held", box)
        return only(box)

    def opened(self, facts: Facts) -> Facts:
        """What iterating over, indexing or unpacking gives."""
        contents: set[Value] = set()
        for value in facts:
            if value.kind == "box":
                contents |= self.table.get("held", value) or frozenset()
            else:
                contents.add(value if value.kind in ("tensor", "plain", "refused") else UNKNOWN)
                contents |= code_of(only(value))
        return frozenset(contents)

    def inmost(self, facts: Facts) -> Facts:
        """What containers hold, and those within them, at any depth; and what is no container."""
        reached, waiting = set(facts), list(facts)
        while waiting:
            new = self.opened(only(fact)) - reached if (fact := waiting.pop()).kind == "box" else frozenset()
            reached |= new
            waiting += new
        return frozenset(fact for fact in reached if fact.kind != "box")
