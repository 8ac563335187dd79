"""slime's file of evaluation sets (`eval.eval_config`: YAML, JSON or TOML), as tables of `eval.eval_tasks`.

    eval:
      defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: deepscaler, temperature: 1.0}

A set's own key stands before the file's defaults, those before `eval_*` keys. Relative paths start at the file's
folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.config.paths import absolute_paths
from slime_core.config.problems import Origins
from slime_core.config.sections.evaluation import EvalTask
from slime_core.config.table_file import read_table
from slime_core.errors import ConfigError, nearest

KEY = "eval.eval_config"
NAMES = {
    "path": "prompt_data",
    "rm_type": "reward",
    "custom_rm_path": "reward",
    "custom_generate_function_path": "generate",
    "n_samples_per_eval_prompt": "n_samples_per_prompt",
}
"""slime's name -> ours, where they differ."""


def read_sets(path: Path) -> list[dict[str, Any]]:
    """The sets of a file, each as a table of `[[eval.eval_tasks]]`.

    Raises:
        ConfigError: CFG05 no such file, CFG06 it cannot be read or has another shape, CFG07 a key twice under two
            names, CFG01 an unknown key, CFG08 too large.
    """
    file = read_table(path, KEY)
    table = file.get("eval", file)
    if not isinstance(table, dict) or set(table) - {"defaults", "datasets"} or "datasets" not in table:
        raise _shape(path, f"it has {', '.join(map(str, table)) or 'nothing'}" if isinstance(table, dict) else "")
    defaults, sets = table.get("defaults") or {}, table["datasets"]
    if not isinstance(defaults, dict) or not isinstance(sets, list) or not all(isinstance(s, dict) for s in sets):
        raise _shape(path, "defaults is a table, datasets a list of tables")
    base = _renamed(defaults, path, "defaults")
    renamed = [base | _renamed(one, path, f"datasets[{number}]") for number, one in enumerate(sets)]
    resolved: list[dict[str, Any]] = absolute_paths({"eval": {"eval_tasks": renamed}}, path.parent, {})["eval"][
        "eval_tasks"
    ]
    return resolved


def expand(data: dict[str, Any], origins: Origins) -> None:
    """Put the sets of `eval.eval_config` behind those of `eval.eval_tasks`; the key is then empty.

    ``origins`` learns that they come from the file.

    Raises:
        ConfigError: as :func:`read_sets`.
    """
    table = data.get("eval")
    named = table.get("eval_config") if isinstance(table, dict) else None
    if isinstance(table, dict) and isinstance(named, str) and named:
        written, sets = list(table.get("eval_tasks", [])), read_sets(Path(named))
        for number in range(len(sets)):
            origins["eval", "eval_tasks", len(written) + number] = named
        data["eval"] = {**table, "eval_tasks": [*written, *sets], "eval_config": ""}


def _renamed(table: Mapping[Any, Any], path: Path, place: str) -> dict[str, Any]:
    fields = set(EvalTask.model_fields) - {"weight"}
    renamed: dict[str, Any] = {}
    for key, value in table.items():
        name = NAMES.get(key, key)
        if name not in fields:
            hint = nearest(str(key), sorted({*fields, *NAMES}))
            raise ConfigError(
                f"an evaluation set has no key {key!r}",
                code="CFG01",
                where=f"{path}: {place}",
                fix=hint or f"keys are {', '.join(sorted({*fields, *NAMES}))}",
            )
        if name in renamed:
            raise ConfigError(
                f"{key!r} sets {name!r} a second time", code="CFG07", where=f"{path}: {place}", fix="keep one of them"
            )
        field = EvalTask.model_fields[name].annotation
        renamed[name] = float(value) if field is float and type(value) is int else value
    return renamed


def _shape(path: Path, why: str) -> ConfigError:
    fix = "write eval: {defaults: {...}, datasets: [{name: ..., path: ...}]}"
    where = f"{KEY} = {path}"
    return ConfigError(f"{path.name} holds no evaluation sets", code="CFG06", where=where, why=why, fix=fix)
