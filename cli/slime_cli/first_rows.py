"""A first look at a stage's data before a model is loaded: missing, empty or broken files fail at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.data.opening import eval_tasks, no_data, open_rows, train_tasks
from slime_core.data.prompts import Encoder, Keys, Parsed, check_columns, parse_of
from slime_core.data.rows import split_slice
from slime_core.data.supply import BadRows, FileSupply

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.config.sections.data import DataTask

SMALL = 64 << 20  # bytes of a file that is read whole: a second at most


def first_rows(config: Config, tasks_with_prompts: frozenset[str]) -> dict[str, Parsed | None]:
    """The first row of each training task, None if not known yet; evaluation sets are checked too.

    Small files are checked as at the start of the stage, hub sets are fetched, folders and large files are left for
    then. ``tasks_with_prompts`` are tasks whose prompts come from a plugin.

    Raises:
        ConfigError: CFG04 no data at all, CFG03 a malformed slice, CFG05 no such file.
        DataError: DAT17 no rows, DAT18 a missing column, or what else the rows are refused for.
    """
    rows_by_task: dict[str, Parsed | None] = {}
    dumped = config.rollout.load_debug_rollout_data or config.rollout.data_source_path
    for task, key in () if dumped else train_tasks(config):
        if not task.prompt_data and task.name not in tasks_with_prompts:
            raise no_data(task.name, key)
        rows_by_task[task.name] = _first_row(config, task, key) if task.prompt_data else None
    for _, task, key in () if config.rollout.debug_train_only else eval_tasks(config):
        if task.prompt_data:
            _first_row(config, task, key)
    return rows_by_task


def _first_row(config: Config, task: DataTask, key: str) -> Parsed | None:
    path = Path(split_slice(task.prompt_data, key)[0]).expanduser()
    if path.is_dir() or (path.is_file() and path.stat().st_size > SMALL):
        return None
    keys = Keys.of(config, task)
    rows = open_rows(task.prompt_data, max_line_bytes=config.data.max_line_bytes, columns=keys.columns, key=key)
    try:
        check_columns(rows, keys)
        if config.data.max_bad_rows or not path.is_file():
            return None
        FileSupply(rows, task.name, keys, Encoder(None, template=False), BadRows(0, None))
        return parse_of(rows, 0, keys)
    finally:
        rows.close()
