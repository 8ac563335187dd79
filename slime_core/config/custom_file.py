"""slime's file of custom keys (`rollout.custom_config_path`): those that name a key of the config are laid over it.

They hold before recipe and flags, as in slime, and are checked like any key. All others are keys of ``args`` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_core.config.backend_tables import BackendTables
from slime_core.config.command_line import Override
from slime_core.config.fields import core_keys
from slime_core.config.problems import KeyPath, Origins, dotted
from slime_core.config.table_file import read_table
from slime_core.config.values import element, is_sequence, typed, unwrap

NAME = "custom_config_path"
KEY = f"rollout.{NAME}"


def overrides(data: Mapping[str, Any], tables: BackendTables) -> list[Override]:
    """The keys of a config that its file sets, and of each stage that names a file of its own.

    A file that is missing sets none; the check of paths says so.

    Raises:
        ConfigError: CFG06, CFG08, as :func:`read_table`.
    """
    backend = _table(data.get("train")).get("train_backend", "")
    listed = data.get("stage")
    stages = [_table(stage) for stage in listed] if isinstance(listed, list) else []
    files: list[tuple[KeyPath, Any]] = [((), _table(data.get("rollout")).get(NAME))]
    files += [(("stage", str(s.get("name"))), s.get(NAME) or _table(s.get("rollout")).get(NAME)) for s in stages]
    return [
        Override((*prefix, *(path[-1:] if prefix else path)), value, str(file))
        for prefix, file in files
        if isinstance(file, str) and file and Path(file).is_file()
        for path, value in _keys(read_table(Path(file), KEY), str(backend), tables)
    ]


def notices(laid: Sequence[Override], origins: Origins) -> list[str]:
    """What each file sets, and what had set it before: a line a file."""
    lines: dict[str, list[str]] = {}
    for override in laid:
        before = origins.of_own(override.path)
        lines.setdefault(override.place, []).append(dotted(override.path) + (f" (over {before})" if before else ""))
    return [f"notice: {file} sets {', '.join(keys)}" for file, keys in lines.items()]


def _keys(table: Mapping[str, Any], backend: str, tables: BackendTables) -> Iterator[tuple[KeyPath, Any]]:
    for name, value in table.items():
        if key := core_keys().get(name):
            yield tuple(key.path.split(".")), _value(value, key.info.annotation, key.info.get_default())
        elif (option := tables.bare.get(name)) and option[0] == backend:
            yield (backend, name), value


def _value(value: Any, annotation: Any, default: Any) -> Any:
    """``value`` as the schema takes it: null is the default, and YAML has 1e-6 as a text."""
    if value is None:
        return default
    if isinstance(value, list) and is_sequence(annotation):
        return [_value(item, element(annotation), item) for item in value]
    if isinstance(value, str):
        return typed(value, annotation)
    return float(value) if unwrap(annotation) is float and type(value) is int else value


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
