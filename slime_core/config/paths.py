"""Absolute paths: a recipe's against its folder, the command line's against the cwd.

A name that is no local path stays what it is: `org/name` on the hub, a plugin's own data, `package.module:function`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.fields import core_keys
from slime_core.config.problems import KeyPath, Problem, dotted
from slime_core.config.schema import SECTIONS, Config
from slime_core.config.sections import fact
from slime_core.config.values import element, is_model, unwrap
from slime_core.errors import nearest

KNOWN = frozenset(Config.model_fields)  # other tables are those of backends
MOST_NAMES = 1000  # of a folder that are compared with a wrong one
_SLICE = re.compile(r"@\[[^\]]*\]$")
_FILES = (".jsonl", ".json", ".parquet", ".gz", ".zst", ".csv", ".toml", ".arrow")
_FUNCTION = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def absolute_paths(
    data: Mapping[str, Any], base: Path, models: Mapping[str, type[BaseModel] | None]
) -> dict[str, Any]:
    """A copy of recipe tables whose local paths are absolute, plugin options of type Path included."""
    return dict(_walk(dict(data), (), lambda path, text: _absolute(path, text, base, models)))


def missing_files(data: Mapping[str, Any]) -> list[Problem]:
    """A problem for every local path that leads nowhere."""
    problems: list[Problem] = []

    def look(path: KeyPath, text: str) -> str:
        local_path = _local_part(path, text)
        if local_path and Path(local_path).is_absolute() and not Path(local_path).exists():
            problems.append(_missing(path, local_path))
        return text

    _walk(dict(data), (), look)
    return problems


def folder_of_set(text: str) -> tuple[Path, str, str] | None:
    """Folder, configuration and split of ``FOLDER[#CONFIG][:SPLIT]``; None where there is no such folder.

    Example:
        folder_of_set("sets/gsm#main:test")    # (Path("sets/gsm"), "main", "test")
    """
    head, _, split = text.rpartition(":")
    for rest, part in ((text, ""), (head, split)):
        folder, _, config = rest.rpartition("#")
        for name, chosen in ((rest, ""), (folder, config)):
            if name and ":" not in chosen and Path(name).is_dir():
                return Path(name), chosen, part
    return None


def plugin_name(entry: str) -> str:
    """The name of a plugin that ``plugins`` lists: itself, or the stem of its file."""
    return Path(entry).stem if entry.endswith(".py") else entry


def plugin_path(entry: str, base: Path) -> str:
    """An entry of ``plugins`` whose file, if it is one, is absolute."""
    return _join(base, entry) if entry.endswith(".py") else entry


def _walk(value: Any, path: KeyPath, change: Callable[[KeyPath, str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _walk(item, (*path, key), change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_walk(item, (*path, index), change) for index, item in enumerate(value))
    return change(path, value) if isinstance(value, str) and value else value


def _kind(path: KeyPath) -> str:
    """``data``, ``model``, ``input``, ``start``, ``output``, ``program``, ``plugin``, ``function`` or nothing."""
    if len(path) == 2 and path[0] not in KNOWN and path[1] == "python":
        return "program"  # of a backend's own environment
    if not path or path[0] not in KNOWN or "plugin" in path:
        return ""
    if path[0] == "plugins":
        return "plugin"
    names = [part for part in path if isinstance(part, str)]
    names = names[1:] if names[0] == "stage" else names
    names = names[1:] if names and names[0] in SECTIONS else names
    fields: Mapping[str, FieldInfo] = {name: key.info for name, key in core_keys().items()}
    kind = ""
    for name in names:
        if (info := fields.get(name)) is None:
            return ""
        kind = fact(info, "path") or ("function" if name.endswith("_path") else "")
        fields = unwrap(element(info.annotation)).model_fields if is_model(element(info.annotation)) else {}
    pair_name = names == ["eval_prompt_data"] and isinstance(path[-1], int) and path[-1] % 2 == 0
    return "" if pair_name else kind


def _absolute(path: KeyPath, text: str, base: Path, models: Mapping[str, type[BaseModel] | None]) -> str:
    if "plugin" in path[:3:2]:
        return _of_plugin(path, text, base, models)
    kind = _kind(path)
    if kind == "function":
        match = _FUNCTION.fullmatch(text)
        return f"{_join(base, match[1])}:{match[2]}" if match else text
    if kind == "data":
        plain, part = _without_slice(text)
        local = _is_local(plain, base, _FILES) or folder_of_set(str(base / plain))
        return f"{_join(base, plain)}{part}" if local else text
    if kind == "plugin":
        return plugin_path(text, base)
    if kind in ("input", "start", "output"):
        return _join(base, text)
    if kind == "program":
        return _join(base, text) if "/" in text else text
    if kind == "model":
        return _join(base, text) if _is_local(text, base) or not _HUB.fullmatch(text) else text
    return text


def _of_plugin(path: KeyPath, text: str, base: Path, models: Mapping[str, type[BaseModel] | None]) -> str:
    at = path.index("plugin")
    if len(path) != at + 3:
        return text
    model = models.get(str(path[at + 1]))
    info = model.model_fields.get(str(path[-1])) if model is not None else None
    kind = unwrap(info.annotation) if info is not None else None
    return _join(base, text) if isinstance(kind, type) and issubclass(kind, Path) else text


def _local_part(path: KeyPath, text: str) -> str:
    kind = _kind(path)
    if kind == "function":
        match = _FUNCTION.fullmatch(text)
        return match[1] if match else ""
    if kind == "data":
        plain = _without_slice(text)[0]
        found_set = None if Path(plain).exists() else folder_of_set(plain)
        return str(found_set[0]) if found_set else plain
    return text if kind in ("model", "input") else ""


def _is_local(text: str, base: Path, suffixes: tuple[str, ...] = ()) -> bool:
    if "://" in text:
        return False
    return text.startswith((".", "/", "~")) or text.endswith(suffixes or ("\0",)) or (base / text).exists()


def _without_slice(text: str) -> tuple[str, str]:
    match = _SLICE.search(text)
    return (text[: match.start()], match[0]) if match else (text, "")


def _join(base: Path, text: str) -> str:
    return os.path.normpath(base / Path(text).expanduser())


def _near(path: Path) -> str:
    """The name beside a path that leads nowhere which is closest to its first missing part."""
    while not path.parent.is_dir():
        path = path.parent
    with suppress(OSError), os.scandir(path.parent) as entries:
        return nearest(path.name, {entry.name for entry in islice(entries, MOST_NAMES)})
    return ""


def _missing(path: KeyPath, file: str) -> Problem:
    near = _near(Path(file))
    return Problem(
        code="CFG05",
        what=f"{dotted(path)}: no such file or folder",
        keys=(path,),
        why=f"it resolves to {file}; the current folder is {Path.cwd()}; a recipe's paths start at its own folder",
        fix="\n".join(filter(None, [near, f"correct the path in {dotted(path)}"])),
    )
