"""Loading of one frozen Config. Custom key > flag > recipe > plugin default > core default.

    recipe.toml -> tables, lines -> ${NAME} -> absolute paths ---.
    command line -> words -> full keys, typed -> absolute paths -+-> custom keys
        -> schema -> options -> stages -> rules -> Config

Every problem of a stage of this way is named at once, with its file and line or its flag.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from slime_core.config import custom_file, evaluation_file, rules
from slime_core.config.backend_tables import TRACKER_TABLE, BackendTables
from slime_core.config.command_line import CommandLine as CommandLine, Override, resolve, split as split, unexpected
from slime_core.config.dump import secrets_in
from slime_core.config.fields import sections_of_keys
from slime_core.config.paths import absolute_paths, missing_files, plugin_path
from slime_core.config.problems import KeyPath, Origins, Problem, error_of, raise_all
from slime_core.config.quantisation import settled
from slime_core.config.recipe import Recipe, read_recipe
from slime_core.config.schema import SECTIONS, Config
from slime_core.config.stages import resolve_stage, stage_name as stage_name, stages as stages
from slime_core.config.validate import ModelsOf, check_model, check_table, not_finite, plain_options, unknown
from slime_core.plugins.backends import BRINGS, TRACKERS, is_installed

Models = Mapping[str, "type[BaseModel] | None"]


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadedConfig:
    """A config, and what a person should know beside it."""

    config: Config
    recipe: Path | None = None
    notices: tuple[str, ...] = ()
    secrets: frozenset[str] = frozenset()  # values to keep out of every sink
    origins: Origins = field(default_factory=Origins)

    def require_complete(self, *, data: bool = True) -> None:
        """Refuse a config that names no model or, with ``data``, nothing to train on.

        Raises:
            ConfigError: CFG04.
        """
        raise_all([self.origins.place(problem) for problem in rules.incomplete(self.config, data=data)])


def load_config(
    recipe: Path | None,
    overrides: Sequence[str] = (),
    *,
    models: ModelsOf | None = None,
) -> Config:
    """The Config of a recipe file (or of defaults) under flags such as ``["--lr", "1e-3", "train.clip_grad=0.5"]``.

    Raises:
        ConfigError: CFG01 to CFG11 and CFG15, each with where and the fix.
    """
    return read(recipe, overrides, models=models).config


def read(
    recipe: Path | None,
    overrides: Sequence[str] | CommandLine = (),
    *,
    models: ModelsOf | None = None,
    check: bool = True,
) -> LoadedConfig:
    """:func:`load_config`, with notices, secrets and the origin of every key.

    Args:
        recipe: TOML file; None is defaults alone.
        overrides: words of the command line, or what :func:`split` made of them.
        models: options models of plugins by name; without it plugin tables are left to the plugin loader.
        check: False reads an old run's config: files may be gone, backends not installed.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    file = read_recipe(recipe) if recipe is not None else Recipe(data={})
    words = overrides if isinstance(overrides, CommandLine) else split(overrides)
    if words is not overrides and words.recipe is not None:
        raise unexpected(words.recipe)
    base = file.path.parent if file.path is not None else Path.cwd()
    plugins = plugin_names(file.data, words, base)
    words.tables.add(plugins)
    options = models([*plugins, *_trackers(file.data, words)]) if models is not None else {}
    data, origins, laid = _merge(file, words, options, check)
    config = _validate(data, origins, options, words.tables)
    if check:
        config = settled(config, data)
    parts = _stages(config, origins, options)
    if check:
        problems = [origins.place(problem) for problem in missing_files(config.model_dump())]
        problems += [place.place(problem) for part, place in parts for problem in rules.conflicts(part)]
        problems += [
            origins.place(problem)
            for name in config.tables
            for backend in words.tables.backends(name)
            if backend.name == name
            for problem in (*rules.section(backend, config), *backend.problems(config, origins))
        ]
        raise_all(problems)
    return LoadedConfig(
        config=config,
        recipe=file.path,
        notices=(*_notices(file, words, parts, check), *laid),
        secrets=file.secrets | {value for _, value in secrets_in(config.model_dump())},
        origins=origins,
    )


def plugin_names(data: Mapping[str, Any], words: CommandLine, base: Path) -> list[str]:
    """Plugins that a recipe in ``base`` and flags name, in order, before anything is validated."""
    listed = data.get("plugins", [])
    names = [plugin_path(name, base) for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    return list(dict.fromkeys([*names, *(plugin_path(name, Path.cwd()) for name in words.plugins)]))


def _trackers(data: Mapping[str, Any], words: CommandLine) -> list[str]:
    """The plugin `trackers`, where a table or a flag is for it: it needs no ``--plugin``."""
    tables = data.get("plugin", {})
    named = isinstance(tables, dict) and TRACKERS in tables
    names = (word.name.removeprefix(f"{TRACKER_TABLE}.") for word in words.overrides)
    named = named or any(words.tables.bare.get(name, ("",))[0] == TRACKER_TABLE for name in names)
    return [TRACKERS] if named and is_installed(TRACKERS) else []


def _merge(
    file: Recipe, words: CommandLine, options: Models, check: bool
) -> tuple[dict[str, Any], Origins, list[str]]:
    """Recipe tables with the flags laid over them, then custom keys, which are named; all local paths absolute."""
    base = file.path.parent if file.path is not None else Path.cwd()
    data = absolute_paths(file.data, base, options)
    overrides, problems = resolve(words, options)
    origins = file.origins
    for override in overrides:
        problems += _apply(data, override, origins, options, words.tables)
    custom = custom_file.overrides(data, words.tables) if check else []
    notices = custom_file.notices(custom, origins)
    for override in custom:
        problems += _apply(data, override, origins, options, words.tables)
    problems += [origins.place(p) for p in not_finite(data)]
    raise_all(problems)
    evaluation_file.expand(data, origins)
    return data, origins, notices


def _apply(
    data: dict[str, Any], override: Override, origins: Origins, options: Models, backends: BackendTables
) -> list[Problem]:
    path, value = override.path, override.value
    if path == ("plugins", "+"):
        names, value = data.setdefault("plugins", []), plugin_path(value, Path.cwd())
        if isinstance(names, list) and value not in names:
            names.append(value)
        return []
    tables = data.get("stage")
    staged = [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
    if path[0] == "stage":
        at = next((i for i, table in enumerate(staged) if table.get("name") == path[1]), None)
        if at is None:
            return [_no_stage(override, staged)]
        path = ("stage", at, path[2])
    elif path == ("rollout", "num_rollout") and staged:
        path = ("stage", len(staged) - 1, "num_rollout")
        _forget(staged[-1], ("rollout", "num_rollout"))
    else:
        for table in staged:
            _forget(table, path)
    if path[0] not in Config.model_fields:
        inside = [table for backend in backends.backends(str(path[0])) for table in backend.tables]
        if all(part in inside for part in path[1:-1]):
            _forget_spellings(_get(data, path[:-1]), str(path[-1]))
    single: dict[str, Any] = {}
    _set(single, path, value)
    _set(data, path, _get(absolute_paths(single, Path.cwd(), options), path))
    origins[path] = override.place
    return []


def _forget(table: dict[str, Any], path: KeyPath) -> None:
    """Take a stage's own value of a key away, so that the flag's holds in every stage."""
    if len(path) < 2:
        return
    if path[0] in SECTIONS:
        table.pop(str(path[-1]), None)
    for part in path[:-1]:
        inner = table.get(str(part))
        if not isinstance(inner, dict):
            return
        table = inner
    table.pop(str(path[-1]), None)


def _forget_spellings(table: Any, name: str) -> None:
    """Take a recipe's own value of a backend's option away that is written with dashes."""
    for spelling in list(table) if isinstance(table, dict) else ():
        if spelling != name and spelling.replace("-", "_") == name:
            del table[spelling]


def _set(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set a nested key; where the recipe has no table on the way, the schema will say so."""
    current: Any = data
    for part in path[:-1]:
        if isinstance(current, dict):
            current = current.setdefault(part, {})
        elif isinstance(current, list) and isinstance(part, int):
            current = current[part]
    if isinstance(current, dict):
        current[path[-1]] = value


def _get(data: Any, path: KeyPath) -> Any:
    """What lies at ``path``; None where nothing does."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _no_stage(override: Override, staged: Sequence[Mapping[str, Any]]) -> Problem:
    names = ", ".join(str(table.get("name")) for table in staged)
    return Problem(
        code="CFG01",
        what=f"there is no stage '{override.path[1]}'",
        where=override.place,
        why=f"stages: {names}" if names else "the recipe has no [[stage]] tables",
        fix="use the name of a stage, or the plain key for all of them",
    )


def _validate(data: dict[str, Any], origins: Origins, options: Models, backends: BackendTables) -> Config:
    """The base config, with plugin tables filled where their models are known."""
    tables = data.get("plugin", {})
    problems: list[Problem] = []
    filled: dict[str, Any] = {}
    for name, model in options.items():
        table = tables.get(name, {}) if isinstance(tables, dict) else {}
        result = check_table(("plugin", name), model, table) if isinstance(table, dict) else None
        if isinstance(result, list):
            problems += result
        elif model is not None:
            filled[name] = plain_options(result)
    if isinstance(tables, dict) and filled:
        data = {**data, "plugin": {**tables, **filled}}
    problems += [
        _no_table(key, backends) for key in data if key not in Config.model_fields and not backends.is_table(key)
    ]
    sound = {key: value for key, value in data.items() if not any(p.keys == ((key,),) for p in problems)}
    config = check_model(Config, sound)
    if problems or isinstance(config, list):
        problems += config if isinstance(config, list) else []
        raise error_of([origins.place(problem) for problem in problems])
    return config


def _no_table(key: str, backends: BackendTables) -> Problem:
    """What is wrong with a key or table at the top that nobody has."""
    if error := backends.fault(key):
        return Problem(
            code="CFG01",
            what=f"nobody reads [{key}]: plugin '{key}' does not load",
            keys=((key,),),
            why=error.what,
            fix=error.fix,
        )
    problem = unknown((key,), [*Config.model_fields, *backends.names()])
    return replace(problem, fix=f"{problem.fix}\na backend's table: {BRINGS}")


def _stages(config: Config, origins: Origins, options: Models) -> list[tuple[Config, Origins]]:
    """Every stage, resolved, with the origins of its keys."""
    if not config.stage:
        return [(config, origins)]
    sections, data = sections_of_keys(), config.model_dump()
    parts: list[tuple[Config, Origins]] = []
    problems: list[Problem] = []
    for index in range(len(config.stage)):
        places = origins.for_stage(index, sections)
        stage = resolve_stage(copy.deepcopy(data), index)
        if isinstance(stage, list):
            problems += [places.place(problem) for problem in stage]
            continue
        for name, model in options.items():
            checked = check_table(("plugin", name), model, stage.plugin.get(name, {}))
            problems += [places.place(problem) for problem in checked] if isinstance(checked, list) else []
        parts.append((stage, places))
    names = [table.get("name") for table in config.stage]
    for repeated in dict.fromkeys(name for name in names if names.count(name) > 1):
        keys: tuple[KeyPath, ...] = tuple(("stage", i) for i, other in enumerate(names) if other == repeated)
        twice = Problem(code="CFG04", what=f"two stages are named '{repeated}'", keys=keys, fix="rename one of them")
        problems.append(origins.place(twice))
    raise_all(problems)
    return parts


def _notices(file: Recipe, words: CommandLine, parts: Sequence[tuple[Config, Origins]], check: bool) -> list[str]:
    notices = [
        f"warning CFG10: {key} looks like a secret ({file.origins.of(_path(key)) or 'recipe'}); it is kept out of "
        f"everything that slime writes, but better: export it and write ${{NAME}}"
        for key, _ in secrets_in(file.written)
    ]
    for word in words.overrides:
        for _key, _value in secrets_in({word.name: list(word.values)}):
            notices.append(
                f"warning CFG10: {word.shown} looks like a secret; a command line is seen by every user of the machine"
            )
            break
    for before, word in words.repeated():
        secret = next(secrets_in({word.name: list(word.values)}), None)
        values = "" if secret else f": {before.text}, then {word.text}"
        notices.append(f"notice: {word.shown} is given twice{values}; the last one holds")
    for config, _ in parts:
        stage = f"stage {stage_name(config)}: " if len(parts) > 1 else ""
        notices += [f"notice: {stage}{text}" for text in (rules.notices(config) if check else ())]
    return list(dict.fromkeys(notices))


def _path(key: str) -> KeyPath:
    parts: list[str | int] = []
    for part in key.replace("]", "").replace("[", ".").split("."):
        parts.append(int(part) if part.isdigit() else part)
    return tuple(parts)
