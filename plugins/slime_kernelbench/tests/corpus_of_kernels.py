"""The corpus of cheats and honest kernels, as text: the first line of each names its problem."""

from __future__ import annotations

from pathlib import Path

from slime_kernelbench.types import KernelProblem

HERE = Path(__file__).parent / "corpus"


def sources(kind: str) -> dict[str, str]:
    """Name -> source of "honest" or "cheats"."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / kind).glob("*.txt"))}


def problem(name: str) -> KernelProblem:
    """A problem of the corpus."""
    text = (HERE / "problems" / f"{name}.txt").read_text(encoding="utf-8")
    return KernelProblem(id=f"corpus/{name}", name=name, source=text)


def problem_of(source: str) -> KernelProblem:
    """The problem that a source of the corpus is for."""
    return problem(source.splitlines()[0].removeprefix("# problem: "))


def attacks_of(source: str) -> list[str]:
    """The attacks that a cheat is an instance of."""
    return source.splitlines()[1].removeprefix("# attack: ").split(", ")
