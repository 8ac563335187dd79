"""A candidate's source as a module, with the names that the policy lets it have; its errors in its own lines.

Runs inside the candidate's process.
"""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import sys
import traceback
from types import ModuleType
from typing import Any

import torch

from slime_kernelbench.judge import names
from slime_kernelbench.judge.branches import CHOSEN, COMPARED, Branches, marked
from slime_kernelbench.judge.shelf import shelf
from slime_kernelbench.judge.spared import Spared
from slime_kernelbench.judge.wire import Tree

FILE = "candidate.py"
"""Its file, in tracebacks."""
LIBRARIES = ("torch", "triton", "numpy")
"""Whose C code may import its own modules in a candidate's frame."""
_TOLD = 600  # characters of a message


def executed(source: str, name: str, names: dict[str, Any], tree: ast.Module | None = None) -> dict[str, Any]:
    """Run a source, or what was made of its ``tree``, in this process, which is a sandbox's; ``names`` with those that
    it defines.

    Tracebacks and triton find its text under ``name``.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(tree or source, name, "exec"), names)
    return names


def imported(source: str, branches: Branches | None = None) -> ModuleType:
    """The candidate's module, run with the names that the policy lets it have; ``branches`` see what it compares."""
    module = ModuleType("candidate")
    module.__file__ = FILE
    module.__dict__["__builtins__"] = _builtins()
    sys.modules["candidate"] = module
    tree = Spared().visit(ast.parse(source))
    if branches is not None:
        module.__dict__.update({COMPARED: branches.compared, CHOSEN: branches.chosen})
        tree = marked(tree)
    executed(source, FILE, module.__dict__, tree)
    return module


def _builtins() -> dict[str, Any]:
    allowed = names.BUILTINS | names.KERNEL_BUILTINS
    functions = {name: getattr(builtins, name) for name in allowed if hasattr(builtins, name) and name != "__name__"}
    return functions | {
        "__build_class__": builtins.__build_class__,
        "__import__": _import,
        "getattr": _getattr,
        "hasattr": _hasattr,
        "type": _type,
    }


_NONE = object()
_TYPES = (bool, int, float, str, tuple, list, dict, set, type(None), torch.Size, torch.dtype, torch.device)


def _getattr(owner: Any, name: str, default: Any = _NONE) -> Any:
    """As Python's, for attributes that a candidate may spell out."""
    attribute = getattr(owner, name, default)
    closed = names.is_inside(name) or (isinstance(attribute, ModuleType) and attribute.__name__ not in names.IMPORTS)
    if closed or attribute is _NONE:
        raise AttributeError(f"{type(owner).__name__} has no attribute {name} that a candidate may use")
    return attribute


def _hasattr(owner: Any, name: str) -> bool:
    try:
        _getattr(owner, name)
    except AttributeError:
        return False
    return True


def _type(value: Any, /) -> Any:
    """Of numbers, texts, containers, tensors and the candidate's objects: what makes nothing else."""
    kind = type(value)
    is_candidate = kind.__module__ == "candidate" and not issubclass(kind, type)
    if not (is_candidate or issubclass(kind, torch.Tensor) or kind in _TYPES):
        raise TypeError("type(x) is for numbers, texts, containers, tensors and objects of one's own")
    return kind


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """The candidate's import statements; and what torch's own C code imports when the candidate calls it.

    `PyImport_Import` asks the builtins of the innermost Python frame, which is the candidate's.
    """
    frame = sys._getframe(1)
    dynamic = frame.f_code.co_code[frame.f_lasti] != dis.opmap["IMPORT_NAME"] and name.partition(".")[0] in LIBRARIES
    if not dynamic and not level and name in names.SHELF:
        return shelf(name)
    if not dynamic and (level or (name not in names.IMPORTS and name != "triton.runtime")):
        raise ModuleNotFoundError(f"import of {name} is not allowed")
    return __import__(name, globals, locals, fromlist, level)


def error_tree(error: BaseException) -> Tree:
    """An error in the candidate's words and lines."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == FILE]
    frames = frames or [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    line = getattr(cause, "lineno", None) if isinstance(cause, SyntaxError) else None
    return {
        "kind": type(cause).__name__,
        "message": " ".join(str(cause).split())[:_TOLD],
        "line": frames[-1].lineno if frames else line,
        "excerpt": (frames[-1].line or "")[:200] if frames else "",
        "traceback": "\n".join(f"line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-6:])[:2000],
    }
