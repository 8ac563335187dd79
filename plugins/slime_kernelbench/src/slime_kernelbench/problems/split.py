"""Split of problems into a side to train on and one that is held out, without near duplicates.

A problem's side is a hash of its id, so it does not move when others come or go. Problems that differ in sizes, names
and comments alone are near duplicates: of such a pair on both sides, the one to train on is left out, by name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from slime_kernelbench.types import KernelProblem

SHINGLE = 4  # tokens in a row
ALIKE = 0.9  # Jaccard index of two problems' shingles from which they are near duplicates


@dataclass(slots=True, frozen=True, kw_only=True)
class Split:
    """Two sides that share nothing.

    Example: Split(train=[relu], heldout=[gelu], left_out=[(relu_again, gelu)])
    """

    train: list[KernelProblem]
    heldout: list[KernelProblem]
    left_out: list[tuple[KernelProblem, KernelProblem]]  # (not trained on, its near duplicate that is held out)


def split(problems: Sequence[KernelProblem], *, heldout: float = 0.2, seed: int = 0) -> Split:
    """Part problems by their ids; ``heldout`` is a share, and another ``seed`` another split.

    Example: {p.id for p in split(shipped()).train} & {p.id for p in split(shipped()).heldout} == set()
    """
    heldout_problems = [problem for problem in problems if is_held_out(problem.id, heldout, seed)]
    others = [problem for problem in problems if not is_held_out(problem.id, heldout, seed)]
    twins = near_duplicates(others, heldout_problems)
    train = [problem for problem in others if problem.id not in twins]
    left_out = [(problem, twins[problem.id]) for problem in problems if problem.id in twins]
    return Split(train=train, heldout=heldout_problems, left_out=left_out)


def is_held_out(id: str, share: float, seed: int) -> bool:
    """Whether a hash of the id lies in the lowest ``share`` of hashes."""
    number = int.from_bytes(sha256(f"{seed}:{id}".encode()).digest()[:8], "big")
    return number < share * 2.0**64


def near_duplicates(problems: Iterable[KernelProblem], others: Sequence[KernelProblem]) -> dict[str, KernelProblem]:
    """By id, those of ``problems`` that one of ``others`` is a near duplicate of, and that one."""
    sources = [(other, shingles(other.source)) for other in others]
    duplicates: dict[str, KernelProblem] = {}
    for problem in problems:
        words = shingles(problem.source)
        twin = next((other for other, other_words in sources if likeness(words, other_words) >= ALIKE), None)
        if twin is not None:
            duplicates[problem.id] = twin
    return duplicates


def likeness(one: frozenset[str], other: frozenset[str]) -> float:
    """The Jaccard index of two sets of shingles: 1 for equal ones, 0 where they share nothing.

    Source: P. Jaccard, "The distribution of the flora in the alpine zone", New Phytologist 11 (1912).
    """
    union = len(one | other)
    return len(one & other) / union if union else 1.0


def shingles(source: str) -> frozenset[str]:
    """Runs of tokens of what the reference computes: no comments, docstrings, sizes, or names of its own."""
    tree = ast.parse(source)
    computing = [
        node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign))
    ]
    computing = [node for node in computing if getattr(node, "name", "") not in ("get_inputs", "get_init_inputs")]
    words = _Words()
    for node in computing:
        words.visit(node)
    tokens = words.tokens
    return frozenset(" ".join(tokens[i : i + SHINGLE]) for i in range(max(1, len(tokens) - SHINGLE + 1)))


class _Words(ast.NodeVisitor):
    """Kinds of nodes, names of functions and attributes; a name of the author's is its number of appearance."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self._numbers: dict[str, int] = {}

    def generic_visit(self, node: ast.AST) -> None:
        """One node, then what is in it."""
        if not isinstance(node, (ast.Load, ast.Store, ast.arguments)):
            self.tokens.append(type(node).__name__)
        super().generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """``torch`` and ``self`` say something; other names are what they are called here."""
        reserved = node.id in ("torch", "nn", "F", "self", "True", "False")
        self.tokens.append(node.id if reserved else f"name{self._numbers.setdefault(node.id, len(self._numbers))}")

    def visit_arg(self, node: ast.arg) -> None:
        """A parameter."""
        self._numbers.setdefault(node.arg, len(self._numbers))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``.softmax`` says what is computed; ``self.anything`` is a name of its own."""
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            self.tokens.append(f"self{self._numbers.setdefault('.' + node.attr, len(self._numbers))}")
            return
        self.tokens.append(node.attr)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Sizes and texts do not matter, switches do."""
        self.tokens.append(str(node.value) if isinstance(node.value, bool) or node.value is None else "0")

    def visit_keyword(self, node: ast.keyword) -> None:
        """An axis is no size."""
        self.tokens.append(ast.unparse(node) if node.arg in ("dim", "axis") else str(node.arg))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A docstring, or ``super().__init__()``, computes nothing."""
        if isinstance(node.value, ast.Constant) or ast.unparse(node.value).startswith("super("):
            return
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Its parameters and body; annotations are left out."""
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)
