"""A Python file as a module of its own, imported once per process."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_file(file: Path) -> ModuleType:
    """The module of ``file``; what lies beside it can be imported too, after everything else.

    Raises:
        Exception: whatever the file raises, SystemExit included; ImportError where Python cannot read such a file.
    """
    name = f"_slime_file_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    add_to_path(file.parent)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def add_to_path(folder: Path) -> None:
    """Search a folder for modules, after everything else."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
