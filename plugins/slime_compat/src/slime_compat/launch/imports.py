"""Imports of slime in a function's file that are not served here, those inside functions too."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from slime_compat.finder import SERVED


def unserved(file: Path) -> list[str]:
    """Modules and names of slime that a Python file imports and this package does not serve, in order.

    Example:
        unserved(Path("generate.py")) == ["slime.backends.megatron_utils", "slime.utils.misc.Box"]
    """
    names: dict[str, None] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names.update(dict.fromkeys(name for name in _imports(node) if not _is_served(name)))
    return list(names)


def _imports(node: ast.AST) -> Iterator[str]:
    """What an import statement takes from slime, by full names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = []
    yield from (name for name in names if name.partition(".")[0] == "slime")


def _is_served(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    if name in SERVED or (attribute == "*" and module in SERVED):
        return True
    source = SERVED.get(module)
    return bool(source) and attribute in importlib.import_module(str(source)).__all__
