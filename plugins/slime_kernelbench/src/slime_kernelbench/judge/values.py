"""What an expression of a candidate's host code may be, as far as its text tells; and where such facts are kept.

An expression's facts are a set of `Value`; `{TENSOR, PLAIN}` means that it may be either.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

Facts = frozenset["Value"]


@dataclass(slots=True, frozen=True)
class Value:
    """One thing that an expression may be.

    ``kind`` is one of: plain (numbers, strings, dtypes), tensor, unknown, refused (enough was said of it), module,
    library (a function of torch or triton), function (of the candidate), class, instance, self, super, layer (of
    torch.nn), kernel, launcher (a kernel with its grid), method (of a value), partial (of functools), decorator (of
    triton or Python), outside (an import that a candidate does not get), box (a container; what it holds is in the
    analysis's `Table`).
    """

    kind: str
    name: str = ""
    items: Facts = frozenset()  # of a method or super: whose it is
    node: int = 0  # id of the defining AST node, for function, class and box


PLAIN = Value("plain")
TENSOR = Value("tensor")
UNKNOWN = Value("unknown")
REFUSED = Value("refused")
LAYER = Value("layer")
CODE = frozenset(
    {
        "function",
        "class",
        "library",
        "kernel",
        "launcher",
        "layer",
        "instance",
        "self",
        "method",
        "partial",
        "decorator",
    }
)
"""Kinds of what can be called."""


def only(*values: Value) -> Facts:
    """Facts that name exactly ``values``."""
    return frozenset(values)


def code_of(facts: Facts) -> Facts:
    """What of ``facts`` can be called."""
    return frozenset(fact for fact in facts if fact.kind in CODE)


def is_property(method: ast.FunctionDef) -> bool:
    """Whether reading an attribute of this name calls it."""
    return any(ast.unparse(decorator) == "property" for decorator in method.decorator_list)


def numbers_of(method: ast.FunctionDef | None) -> list[str]:
    """Parameters that say that they are numbers."""
    arguments = method.args.args if method is not None else []
    return [
        one.arg for one in arguments if isinstance(one.annotation, ast.Name) and one.annotation.id in ("float", "int")
    ]


class Table:
    """Facts that hold at any time: of variables as functions within see them, of attributes, of what containers hold.

    They only grow. ``stale`` says that one has grown after it was asked for: then all must be looked at once more.
    """

    def __init__(self) -> None:
        self._facts: dict[tuple[object, ...], Facts] = {}
        self._reads: set[tuple[object, ...]] = set()
        self.stale = False

    def begin(self) -> None:
        """A new look at everything, knowing what is known."""
        self._reads.clear()
        self.stale = False

    def get(self, *key: object) -> Facts | None:
        """Facts under a key; None where there are none so far."""
        self._reads.add(key)
        return self._facts.get(key)

    def grow(self, facts: Facts, *key: object) -> None:
        """Add facts."""
        before = self._facts.get(key)
        if before is None or not facts <= before:
            self._facts[key] = facts | (before or frozenset())
            self.stale |= key in self._reads


@dataclass(slots=True, frozen=True, order=True)
class Finding:
    """One thing that the policy refuses, with its line in the candidate's source."""

    line: int
    rule: str
    message: str


@dataclass(slots=True)
class Scope:
    """Names of one function body, of a class body, of a comprehension or of the module.

    A function that is defined within sees a name as it is when the function is called: all that it ever is.
    """

    table: Table
    place: int = 0  # id of the AST node
    names: dict[str, Facts] = field(default_factory=dict)
    outer: Scope | None = None
    hot: bool = False  # whether inputs may flow here: the answer is being made
    inline: bool = False  # it is run where it stands: a class body, a comprehension that is no generator
    of_comprehension: bool = False
    of_class: bool = False  # a class body, whose names nothing that stands within sees

    def define(self, name: str, facts: Facts) -> None:
        """Give a name its facts, from here on."""
        self.names[name] = facts
        self.table.grow(facts, "name", self.place, name)

    def find(self, name: str) -> Facts | None:
        """Facts of ``name``, here or further out; None where it is not defined."""
        if name in self.names:
            return self.names[name]
        now, scope = self.inline, self.outer
        while scope is not None:
            facts = scope.names.get(name) if now else scope.table.get("name", scope.place, name)
            if facts is not None and not scope.of_class:
                return facts
            now, scope = now and scope.inline, scope.outer
        return None


@dataclass(slots=True)
class ClassFacts:
    """A class of the candidate: its methods, and the candidate's classes in the order in which names are looked up.

    What self.NAME holds is in the analysis's `Table`.
    """

    name: str
    node: ast.ClassDef
    methods: dict[str, ast.FunctionDef]
    order: tuple[str, ...]  # itself first
    is_module: bool
    is_function: bool = False  # of torch.autograd
    is_enum: bool = False
    is_record: bool = False  # a dataclass or a typing.NamedTuple: its fields are what it is made with
    is_tuple: bool = False  # a typing.NamedTuple


class TooComplex(Exception):
    """The analysis gave up: the code is refused, since it cannot be vouched for."""
