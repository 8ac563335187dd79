"""Verdicts of files of kernels: each candidate beside the problem that it answers.

x.py has Model and ModelNew       its own Model is the problem, and the candidate is what is left of the file
x.py beside x.problem.py          that file is the problem
--problem ID or FILE              that is the problem of every file
else                              `slime/1/add`: the sum of two matrices
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import DataError
from slime_core.errors import nearest
from slime_kernelbench.codec import verdict_to_json
from slime_kernelbench.problems import load, shipped
from slime_kernelbench.problems.rows import PARTS, checked, of_file
from slime_kernelbench.types import Diagnostic, Judge, KernelProblem, Verdict

BUILT_IN = "slime/1/add"
PROBLEM = ".problem.py"
LARGEST = 16 << 20
"""Bytes of a file; the policy refuses far shorter texts."""


@dataclass(slots=True, frozen=True, kw_only=True)
class CandidateEntry:
    """A candidate, and what it answers.

    Example: CandidateEntry(file="kernels/relu.py", source="import triton ...", problem=KernelProblem(...))
    """

    file: str
    source: str
    problem: KernelProblem
    unread: str = ""  # why there is no source


def entries(path: Path, problem: KernelProblem | None) -> list[CandidateEntry]:
    """The candidates of a file or folder; ``problem`` is that of every file, None looks beside each.

    Raises:
        DataError: CFG05 there is no such file, DAT17 the folder has no candidate, or a problem beside one is none.
    """
    if not path.exists():
        raise DataError(
            f"there is no {path}", code="CFG05", where=str(path.absolute()), fix="name a file of Python, or a folder"
        )
    files = sorted(file for file in path.rglob("*.py") if not file.is_dir()) if path.is_dir() else [path]
    files = [file for file in files if not file.name.endswith(PROBLEM) and file.name != "__init__.py"]
    if not files:
        raise DataError(f"{path} has no candidates", code="DAT17", where=str(path.absolute()), fix="files named *.py")
    return [_entry(file, problem) for file in files]


def find_problem(text: str, where: str = "shipped") -> KernelProblem:
    """The problem of a file, or the one of ``where`` whose id, or the last part of it, is ``text``.

    Raises:
        DataError: CFG05 there is none, DAT22 there are several.
    """
    if text.endswith(".py"):
        return of_file(Path(text))
    problems = load(where)
    matches = [problem for problem in problems if problem.id == text]
    matches = matches or [problem for problem in problems if text in (problem.name, problem.id.rpartition("/")[2])]
    if len(matches) == 1:
        return matches[0]
    names = [problem.id for problem in problems] + [problem.name for problem in problems]
    raise DataError(
        f"{len(matches) or 'no'} problems are named '{text}'",
        code="DAT22" if matches else "CFG05",
        where=where,
        why=", ".join(problem.id for problem in matches),
        fix="name its id"
        if matches
        else nearest(text, names) or f"slime kernelbench problems list --problems {where}",
    )


async def judge_all(entries: Sequence[CandidateEntry], judge: Judge, *, at_once: int) -> list[dict[str, Any]]:
    """A row a candidate, in order; ``at_once`` are judged at the same time."""
    free = asyncio.Semaphore(at_once)

    async def one(entry: CandidateEntry) -> dict[str, Any]:
        async with free:
            return row(entry, _unread(entry) if entry.unread else await judge.judge(entry.source, entry.problem))

    return list(await asyncio.gather(*(one(entry) for entry in entries)))


def row(entry: CandidateEntry, verdict: Verdict) -> dict[str, Any]:
    """What `--json` prints of a candidate; ``flags`` are names of rules, ``evidence`` says more of them."""
    fields = verdict_to_json(verdict)
    return {
        "file": entry.file,
        "problem": entry.problem.id,
        "correct": verdict.correct,
        "status": verdict.status,
        "flags": sorted({flag.rule for flag in verdict.flags}),
        "speedup": None if verdict.timing is None else verdict.timing.speedup,
        "evidence": fields.pop("flags"),
        **{key: value for key, value in fields.items() if key not in ("status",)},
    }


def _entry(file: Path, problem: KernelProblem | None) -> CandidateEntry:
    source, unread = _source(file)
    if problem is None:
        beside = file.with_name(file.stem + PROBLEM)
        if beside.is_file():
            problem = of_file(beside)
        elif (parts := _parted(source)) is not None:
            source, reference = parts
            problem = checked(KernelProblem(id=_safe(file.stem), name=file.stem, source=reference, where=f"{file}:1"))
        else:
            problem = next(problem for problem in shipped() if problem.id == BUILT_IN)
    return CandidateEntry(file=str(file), source=source, problem=problem, unread=unread)


def _source(file: Path) -> tuple[str, str]:
    """A file's text, or "" and why it cannot be had."""
    try:
        if not file.is_file():
            return "", "it is not a regular file" if file.exists() else "it is a link to nothing"
        if (size := file.stat().st_size) > LARGEST:
            return "", f"it has {size} bytes; at most {LARGEST}"
        return file.read_bytes().decode("utf-8-sig", errors="surrogateescape"), ""
    except OSError as error:
        return "", f"it cannot be read: {error.strerror}"


def _unread(entry: CandidateEntry) -> Verdict:
    diagnostic = Diagnostic(
        stage="static", kind="unreadable", message=f"{entry.unread}; name a file of Python that you can read"
    )
    return Verdict(status="compile_error", reached="static", diagnostics=(diagnostic,))


def _safe(stem: str) -> str:
    name = "".join(char if char.isascii() and (char.isalnum() or char in "_-") else "_" for char in stem)
    return name[:128] or "problem"


def _parted(source: str) -> tuple[str, str] | None:
    """Candidate and reference of a file that holds both, each with its lines where they were; None where it does not.

    The reference keeps what Model, get_inputs and get_init_inputs name, at any distance; the candidate all but these
    three, one of which stays where the rest of it names it.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = {name: node for node in tree.body for name in _defined(node)}
    if not {"Model", "ModelNew", "get_inputs"} <= set(nodes):
        return None
    needed = _reached(set(PARTS), nodes)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    reference = [*imports, *(nodes[name] for name in needed if name in nodes)]
    others = [node for node in tree.body if not set(_defined(node)) & set(PARTS)]
    reachable = _reached(set().union(*(_named(node) for node in others)), nodes)
    candidate = [*others, *(nodes[name] for name in PARTS if name in reachable and name in nodes)]
    return _lines(source, candidate), _lines(source, reference)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _named(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _reached(names: set[str], nodes: dict[str, ast.stmt]) -> set[str]:
    """``names`` and whatever their definitions name."""
    reached, waiting = set(names), list(names)
    while waiting:
        node = nodes.get(waiting.pop())
        new = (_named(node) if node is not None else set()) - reached
        reached |= new
        waiting += new
    return reached


def _lines(source: str, nodes: Sequence[ast.stmt]) -> str:
    """The source with every line empty that belongs to none of ``nodes``."""
    numbers: set[int] = set()
    for node in nodes:
        first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
        numbers |= set(range(first, (node.end_lineno or first) + 1))
    lines = source.split("\n")
    return "\n".join(line if number in numbers else "" for number, line in enumerate(lines, 1)).rstrip("\n") + "\n"
