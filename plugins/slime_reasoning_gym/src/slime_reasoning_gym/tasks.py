"""A task of a run: reasoning_gym's name, perhaps with a level, and its parameters, checked before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slime_core.config.problems import KeyPath, Problem
from slime_core.errors import nearest
from slime_reasoning_gym.options import Options
from slime_reasoning_gym.workers import WorkerError, Workers

TABLE = ("plugin", "reasoning_gym", "parameters")
LEVEL = re.compile(r"(?P<dataset>\w+)\.(?P<level>\d+)")


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """One task: ``chain_sum`` with its defaults and the parameters, ``chain_sum.3`` at level 3 of its curriculum."""

    name: str  # as the run has it
    dataset: str  # reasoning_gym's name
    level: int | None
    top: int | None  # highest level of its curriculum; None without one
    parameters: str  # JSON
    follows: bool  # whether its level follows the measured success

    def address(self, seed: int, index: int, level: int | None) -> dict[str, Any]:
        """What an entry is a function of, as `worker.EntryAddress` has it."""
        facts = {"dataset": self.dataset, "level": level, "parameters": self.parameters}
        return {**facts, "seed": seed, "index": index}


def task_of(name: str, options: Options, workers: Workers) -> TaskSettings:
    """The task that a run calls ``name``."""
    match = LEVEL.fullmatch(name)
    dataset, level = (match["dataset"], int(match["level"])) if match else (name, None)
    top = workers.describe()["levels"].get(dataset)
    parameters = json.dumps(options.parameters.get(dataset, {}), sort_keys=True)
    return TaskSettings(
        name, dataset, level, top, parameters, options.curriculum and level is None and top is not None
    )


def problems_of(task: TaskSettings, options: Options, workers: Workers, keys: KeyPath) -> Iterator[Problem]:
    """What is wrong with a task that ``keys`` name: an unknown name, a level that it does not have, its parameters."""
    if task.dataset not in workers.describe()["levels"]:
        yield unknown_task(task.dataset, workers, keys)
    elif task.level is not None and (task.top is None or task.level > task.top):
        yield Problem(
            code="CFG03",
            what=f"task '{task.dataset}' has no level {task.level}",
            keys=(keys,),
            why="it has no curriculum" if task.top is None else f"its curriculum has levels 0 to {task.top}",
            fix=f"name it {task.dataset}" if task.top is None else f"name it {task.dataset}.{task.top}",
        )
    else:
        yield from _problems_of_parameters(task, options, workers, keys)


def unknown_task(name: str, workers: Workers, keys: KeyPath) -> Problem:
    """CFG03: reasoning_gym has no such task."""
    names = list(workers.describe()["levels"])
    listing = f"`slime reasoning_gym tasks` lists all {len(names)}"
    return Problem(
        code="CFG03",
        what=f"reasoning_gym has no task '{name}'",
        keys=(keys,),
        fix="\n".join(filter(None, [nearest(name, names), listing])),
    )


def _problems_of_parameters(
    task: TaskSettings, options: Options, workers: Workers, keys: KeyPath
) -> Iterator[Problem]:
    parameters, table = options.parameters.get(task.dataset, {}), (*TABLE, task.dataset)
    level = min(options.start_level, task.top or 0) if task.follows else task.level
    try:
        facts = workers.ask("check", **task.address(seed=0, index=0, level=level))
    except WorkerError as error:
        yield Problem(
            code="CFG04",
            what=f"reasoning_gym cannot make task '{task.dataset}' here",
            keys=(keys,),
            why=str(error),
            fix="install what it needs, or leave the task out",
        )
        return
    unknown = [key for key in parameters if key not in facts["fields"]]
    for key in unknown:
        yield Problem(
            code="CFG01",
            what=f"task '{task.dataset}' has no parameter '{key}'",
            keys=((*table, key),),
            why="slime numbers the rows: seed and size are its own" if key in ("seed", "size") else "",
            fix=nearest(key, facts["fields"]) or f"it has {', '.join(facts['fields'])}",
        )
    levelled = [key for key in parameters if level is not None and key in facts["curriculum"]]
    for key in levelled:
        yield Problem(
            code="CFG04",
            what=f"parameter '{key}' of task '{task.dataset}' is set by its level",
            keys=((*table, key),),
            why=f"the curriculum sets {', '.join(facts['curriculum'])}",
            fix=f"remove the parameter, or name the task without a level and leave out --curriculum: {task.dataset}",
        )
    if facts["problem"] and not unknown:
        blamed = [key for key in parameters if re.search(rf"\b{key}\b", facts["problem"])] or list(parameters)
        yield Problem(
            code="CFG02",
            what=f"task '{task.dataset}' refuses its parameters: {facts['problem']}",
            keys=tuple((*table, key) for key in blamed) or (keys,),
            why=f"{', '.join(blamed) or 'its defaults'}: it got {json.dumps(parameters)}",
            fix="change the value, or remove the key to take the task's own",
        )
