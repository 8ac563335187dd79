"""A Python file as a module of its own, imported once per process; and the text of an import that failed."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from slime_core.errors import text_of
from slime_core.plugins.boundary import CORE_FOLDER

FOLDER_PACKAGE = "_slime_folder_"
"""What the names of modules of files begin with."""


def import_file(file: Path) -> ModuleType:
    """The module of ``file``; what lies beside it can be imported too, after everything else.

    ``from .name import x`` in it imports what lies beside it, without the folder's ``__init__.py``.

    Raises:
        Exception: whatever the file raises, SystemExit included; ImportError where Python cannot read such a file.
    """
    name = f"{_package(file.parent)}.{file.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    add_to_path(file.parent)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _package(folder: Path) -> str:
    """The name of an empty package whose modules are a folder's files."""
    name = f"{FOLDER_PACKAGE}{hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()}"
    if name not in sys.modules:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return name


def add_to_path(folder: Path) -> None:
    """Search a folder for modules, after everything else."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def import_text(error: BaseException) -> str:
    """What made an import fail; of a name that a module without a file lacks, with the names that it has."""
    if isinstance(error, ModuleNotFoundError) and error.name and str(error).startswith("No module named"):
        return f"module '{error.name}' is missing"
    text, unknown = text_of(error), " (unknown location)"
    if isinstance(error, ImportError) and text.endswith(unknown):
        names = getattr(sys.modules.get(error.name or ""), "__all__", ())
        return f"{text.removesuffix(unknown)}; it has {', '.join(sorted(names)) or 'nothing'}"
    return text


def import_place(error: BaseException) -> str:
    """``file:line`` at which an import failed, outside of Python, finders and the core; empty where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    outside = ("<frozen", CORE_FOLDER, str(Path(importlib.__file__).parent))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(outside)]
    frames = [f for f in frames if f.name != "find_spec"]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
