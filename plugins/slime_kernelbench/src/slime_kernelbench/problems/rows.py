"""A checked `KernelProblem` of a row or a file, or an error that says where and why.

    row                                              id
    {code, level, name, problem_id}                  kernelbench/LEVEL/PROBLEM_ID   as on the hub
    {label, extra_info: {level, problem_id, ...}}    kernelbench/LEVEL/PROBLEM_ID   as TritonForge's
    {code, id, ...}                                  the row's own
    {code}                                           the file's name and the line

What is checked is the text alone: it must parse, and define what KernelBench's format asks for. Nothing is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core import DataError
from slime_kernelbench.types import KernelProblem

MAX_SOURCE = 256 << 10  # bytes of a reference
ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}){0,5}")
PARTS = ("Model", "get_inputs", "get_init_inputs")
LEVEL = re.compile(r"level_?(\d+)")
NUMBERED = re.compile(r"(\d+)_(.+)")
LEVELS = 100
ONE_OF = "a row has `code` (KernelBench's), or `label` with `extra_info` (TritonForge's)"


def of_row(row: Mapping[str, Any], where: str, *, otherwise: str) -> KernelProblem:
    """The problem of a row; ``otherwise`` is the id of a row that has none.

    Raises:
        DataError: DAT18 a key is missing, DAT24 it has another type or the source is no problem, DAT34 a bad id.
    """
    info = row.get("extra_info", {})
    if not isinstance(info, Mapping):
        raise _wrong("extra_info", info, "an object", where)
    key = "code" if "code" in row else "label"
    if key not in row or (key == "label" and "extra_info" not in row):
        raise DataError(
            "the row has no reference",
            code="DAT18",
            where=where,
            why=f"its keys are {', '.join(map(repr, row)) or 'none'}",
            fix=ONE_OF,
        )
    source = row[key]
    if not isinstance(source, str):
        raise _wrong(key, source, "a string of Python", where)
    level = _level(row.get("level", info.get("level", 1)), where)
    number = row.get("problem_id", info.get("problem_id"))
    id_ = row.get("id", otherwise if number is None else f"kernelbench/{level}/{_number(number, where)}")
    name = row.get("name", info.get("problem_name", str(id_).rpartition("/")[2]))
    if not isinstance(name, str):
        raise _wrong("name", name, "a string", where)
    return checked(KernelProblem(id=id_, name=name, source=source, level=level, where=where))


def of_file(path: Path, *, id: str = "") -> KernelProblem:
    """The problem of a file in KernelBench's format: ``level1/19_ReLU.py`` is kernelbench/1/19, else the file's name.

    Raises:
        DataError: DAT20 it is not UTF-8, CFG05 it cannot be read, or as :func:`of_row`.
    """
    try:
        source = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path.name} is not UTF-8", code="DAT20", where=f"{path}, byte {error.start}", fix="save it as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}",
            code="CFG05",
            where=f"{path.absolute()}",
            fix="name a file in KernelBench's format",
        ) from error
    level = LEVEL.fullmatch(path.parent.name)
    stem = path.name.removesuffix(".py").removesuffix(".problem")
    numbered = NUMBERED.fullmatch(stem)
    default_id = f"kernelbench/{level[1]}/{numbered[1]}" if level and numbered else stem
    name = numbered[2] if numbered else stem
    return checked(
        KernelProblem(
            id=id or default_id, name=name, source=source, level=int(level[1]) if level else 1, where=f"{path}:1"
        )
    )


def checked(problem: KernelProblem) -> KernelProblem:
    """The same problem, when its id is one and its source defines Model, get_inputs and get_init_inputs.

    Raises:
        DataError: DAT34 a bad id, DAT21 a source that is too long, DAT24 one that is no problem.
    """
    if not isinstance(problem.id, str) or not ID.fullmatch(problem.id):
        raise DataError(
            f"{problem.id!r:.80} is not an id of a problem",
            code="DAT34",
            where=problem.where,
            why="ids become names of files and keys of metrics",
            fix="letters, digits, '.', '_' and '-', up to six parts with '/' between, none that begins with '.'",
        )
    size = len(problem.source.encode("utf-8", errors="replace"))
    if size > MAX_SOURCE:
        raise DataError(
            f"the source of {problem.id} has {size} bytes",
            code="DAT21",
            where=problem.where,
            fix=f"at most {MAX_SOURCE} bytes are taken",
        )
    tree = _parsed(problem)
    defined = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    defined |= {name.id for node in tree.body if isinstance(node, ast.Assign) for name in _names(node)}
    missing = [part for part in PARTS if part not in defined]
    if missing:
        raise DataError(
            f"the source of {problem.id} does not define {', '.join(missing)}",
            code="DAT24",
            where=problem.where,
            why=f"it defines {', '.join(sorted(defined)) or 'nothing'}",
            fix="class Model(nn.Module), def get_inputs() -> list, def get_init_inputs() -> list, at the top level",
        )
    return problem


def _parsed(problem: KernelProblem) -> ast.Module:
    try:
        return ast.parse(problem.source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise DataError(
            f"the source of {problem.id} is not Python: {getattr(error, 'msg', None) or error}",
            code="DAT24",
            where=problem.where + (f", line {line} of the source" if line else ""),
            fix="fix the source, or leave the row out",
        ) from error


def _names(node: ast.Assign) -> list[ast.Name]:
    return [target for target in node.targets if isinstance(target, ast.Name)]


def _level(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < LEVELS:
        raise _wrong("level", value, f"a whole number from 1 to {LEVELS - 1}", where)
    return value


def _number(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise _wrong("problem_id", value, "a number or a string", where)
    return str(value)


def _wrong(key: str, value: Any, expectation: str, where: str) -> DataError:
    return DataError(f"{key} is {value!r:.60}, not {expectation}", code="DAT24", where=where, fix=ONE_OF)
