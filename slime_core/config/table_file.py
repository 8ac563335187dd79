"""Files of keys beside a recipe: TOML, JSON or YAML."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError

MAX_BYTES = 1 << 20


def read_table(path: Path, key: str) -> dict[str, Any]:
    """The table in the file that ``key`` names.

    Raises:
        ConfigError: CFG05 no such file, CFG06 it cannot be read or holds no table, CFG08 too large.
    """
    where = f"{key} = {path}"
    try:
        size = path.stat().st_size
        table = _parse(path) if size <= MAX_BYTES else None
    except FileNotFoundError as error:
        fix = f"fix the path in {key}"
        raise ConfigError(f"there is no file {path}", code="CFG05", where=where, fix=fix) from error
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{path.name} cannot be read: {error}"
        raise ConfigError(problem, code="CFG06", where=where, fix="fix the file") from error
    if size > MAX_BYTES:
        fix = f"name a file of keys in {key}; put rows into other files"
        raise ConfigError(f"{path.name} has more than {MAX_BYTES >> 20} MiB", code="CFG08", where=where, fix=fix)
    if not isinstance(table, dict):
        problem = f"{path.name} holds no table of keys"
        raise ConfigError(problem, code="CFG06", where=where, fix="write keys with their values")
    return table


def _parse(path: Path) -> Any:
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix not in (".yaml", ".yml"):
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{getattr(error, 'problem', '')} (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(place or str(error)) from error
