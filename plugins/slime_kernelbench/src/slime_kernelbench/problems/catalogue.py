"""The problems that come with the plugin: files in KernelBench's format, with sizes for a processor."""

from __future__ import annotations

from pathlib import Path

from slime_kernelbench.problems.rows import of_file
from slime_kernelbench.types import KernelProblem

HERE = Path(__file__).parent
PREFIX = "slime"


def shipped() -> list[KernelProblem]:
    """Every problem of ours, by level and name: element-wise, reductions, row-wise, small products, fusions.

    Example: [problem.id for problem in shipped()][:2] == ["slime/1/add", "slime/1/argmax_rows"]
    """
    files = sorted((HERE / "shipped").glob("level*/*.py"))
    return [of_file(path, id=f"{PREFIX}/{path.parent.name[-1]}/{path.stem}") for path in files]


def answer(name: str) -> str:
    """The source of an honest kernel for a problem of ours; only `add` has one."""
    return (HERE / "answers" / f"{name}.py").read_text(encoding="utf-8")
