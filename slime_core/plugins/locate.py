"""A function by path: ``pkg.mod:fn``, ``pkg.mod.fn`` or ``file.py:fn``."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_core.errors import PluginError, nearest
from slime_core.plugins.backends import COMPAT, install, is_installed
from slime_core.plugins.files import add_to_path, import_file, import_place, import_text

FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
FOLDERS = ("examples", "tests", "scripts", "tools")  # of a repository; packages of these names are others
MODULE = re.compile(r"(?P<module>[A-Za-z_][\w.]*)(?::|\.)(?P<name>[A-Za-z_]\w*)")


def locate(path: str, key: str) -> Any:
    """The function (or class) at ``path``, which the config key ``key`` names.

    A file's own folder, and for a module the current folder, are searched for what it imports, after everything else.

    Raises:
        PluginError: PLG51 no such file, module or name (with what is there), PLG50 its import failed.
    """
    if match := FILE.fullmatch(path):
        module = _from_file(match["file"], path, key)
    elif match := MODULE.fullmatch(path):
        module = _from_module(match["module"], path, key)
    else:
        raise PluginError(
            f"{key} = '{path}' is not a path of a function",
            code="PLG51",
            where=key,
            fix="write pkg.mod:function, pkg.mod.function or file.py:function",
        )
    value = getattr(module, match["name"], None)
    if not callable(value):
        names = functions_of(module)
        raise PluginError(
            f"{key} = '{path}': there is no function '{match['name']}'",
            code="PLG51",
            where=str(getattr(module, "__file__", None) or module.__name__),
            why=f"it defines: {', '.join(names) or 'no function'}",
            fix=nearest(match["name"], tuple(names)) or f"define {match['name']} there, or set {key}",
        )
    return value


def functions_of(module: ModuleType) -> list[str]:
    """Public functions and classes that the module itself defines, or exports in its ``__all__``."""
    exported = getattr(module, "__all__", ())
    return sorted(
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and (value.__module__ == module.__name__ or name in exported)
        and not name.startswith("_")
    )


def _from_file(text: str, path: str, key: str) -> ModuleType:
    file = Path(text).expanduser().resolve()
    if not file.is_file():
        files = sorted(p.name for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise PluginError(
            f"{key} = '{path}': there is no file {file}",
            code="PLG51",
            where=key,
            why=f"Python files in that folder: {', '.join(files) or 'none'}; the current folder is {Path.cwd()}",
            fix=nearest(file.name, tuple(files)) or f"set {key}",
        )
    try:
        return import_file(file)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise _broken(error, path, key) from error


def _from_module(name: str, path: str, key: str) -> ModuleType:
    add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = _missing(error)
        if missing and (name == missing or name.startswith(missing + ".")):
            raise PluginError(
                f"{key} = '{path}': there is no module '{missing}'",
                code="PLG51",
                where=key,
                why=_missing_why(error),
                fix=_missing_fix(missing)
                if name.startswith("slime.")
                else f"pip install its package, or name a file: {key}=file.py:function",
            ) from error
        raise _broken(error, path, key) from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise _broken(error, path, key) from error


def _missing(error: BaseException) -> str | None:
    """The module that is not there; slime_compat's finder names it by the error's ``path``."""
    return error.name or error.path if isinstance(error, ModuleNotFoundError) else None


def _missing_why(error: ModuleNotFoundError) -> str:
    usual = str(error).startswith("No module named")
    return "it is neither installed nor in the current folder" if usual else str(error)


def _missing_fix(module: str) -> str:
    top = module.partition(".")[0]
    if top == "slime" and not is_installed(COMPAT):
        return install(COMPAT)
    if top == "slime":
        return "import only the modules in docs/compat.md, or copy what is missing into the function's file"
    if top in FOLDERS:
        return f"put the folder that holds {top}/ on PYTHONPATH: export PYTHONPATH=FOLDER"
    return f"install the package of the module {top}"


def _broken(error: BaseException, path: str, key: str) -> PluginError:
    missing = _missing(error)
    return PluginError(
        f"{key} = '{path}' could not be imported: {import_text(error)}",
        code="PLG50",
        where=import_place(error) or key,
        fix=_missing_fix(missing) if missing else "correct the file",
    )
