"""Which provider answers an owner hook for a task: a config and what is loaded in, a table out.

    function by path for this run > the task's own choice > the plugin that owns the task > a plugin that owns no task
    > core

Two answers of equal rank are an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from slime_core.errors import ConfigError, PluginError, nearest
from slime_core.hookspecs import HOOKS
from slime_core.plugins.load import Loaded
from slime_core.plugins.provider import Answer

if TYPE_CHECKING:
    from slime_core.config.schema import Config, Task

OWNER_HOOKS = tuple(name for name, info in HOOKS.items() if info.kind == "owner")
DEFAULT_TASK = "default"


class Rank(IntEnum):
    """Lower answers first."""

    PATH = 0
    TASK = 1
    OWNER = 2
    OTHER = 3
    CORE = 4


@dataclass(slots=True, frozen=True)
class Candidate:
    """An answer and why it would be asked."""

    rank: Rank
    answer: Answer


def choose(hook: str, task: str, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate of the best rank, None where there is none.

    Raises:
        PluginError: PLG52 two of the best rank.
    """
    best = min((c.rank for c in candidates), default=None)
    first = [c for c in candidates if c.rank == best]
    if len(first) > 1:
        names = [c.answer.provider.name for c in first]
        raise PluginError(
            f"{' and '.join(map(str, (c.answer.provider for c in first)))} both answer {hook} for task '{task}'",
            code="PLG52",
            where=f"task '{task}'",
            why="their rank is equal, so which one would run is a matter of chance",
            fix="\n".join([f'name one: [[data.tasks]] name = "{task}", plugin = "{name}"' for name in names]),
        )
    return first[0] if first else None


def owners(config: Config, loaded: Mapping[str, Loaded]) -> dict[str, str]:
    """Task name to the name of the plugin that owns it, for every task that has one.

    Raises:
        ConfigError: CFG04 a task names a plugin that the run does not load.
        PluginError: PLG52 several plugins could own the only task.
    """
    found: dict[str, str] = {}
    for task in tasks_of(config):
        if task.plugin:
            if task.plugin not in loaded:
                raise ConfigError(
                    f"task '{task.name}' belongs to plugin '{task.plugin}', which this run does not load",
                    code="CFG04",
                    where="data.tasks or eval.eval_tasks",
                    why=f"loaded: {', '.join(loaded) or 'none'}",
                    fix="\n".join(filter(None, [nearest(task.plugin, tuple(loaded)), f"--plugin {task.plugin}"])),
                )
            found[task.name] = task.plugin
    if not config.data.tasks and not config.data.prompt_data and not config.rollout.data_source_path:
        sources = [name for name, plugin in loaded.items() if "slime_prompts" in plugin.answers]
        if len(sources) > 1:
            raise PluginError(
                f"plugins {' and '.join(sources)} both bring prompts, and no task says which is meant",
                code="PLG52",
                where="data",
                fix="\n".join(f'[[data.tasks]] name = "{name}", plugin = "{name}"' for name in sources),
            )
        if sources:
            found[DEFAULT_TASK] = sources[0]
    return found


def tasks_of(config: Config) -> list[Task]:
    """Every task that the config declares, for training and evaluation."""
    return [*config.data.tasks, *config.eval.eval_tasks]


def task_named(config: Config, name: str, evaluation: bool = False) -> Task | None:
    """The declared task of that name; in evaluation an evaluation set's comes first."""
    tasks = [*config.eval.eval_tasks, *config.data.tasks] if evaluation else config.data.tasks
    return next((task for task in tasks if task.name == name), None)


def candidates(
    hook: str,
    *,
    by_path: Answer | None,
    own_choice: Answer | None,
    owner: str,
    owning: set[str],
    loaded: Mapping[str, Loaded],
    core: Answer | None,
) -> list[Candidate]:
    """Everyone who could answer ``hook`` for a task; ``owning`` are the plugins that own some task."""
    found = [Candidate(Rank.PATH, by_path)] if by_path else []
    found += [Candidate(Rank.TASK, own_choice)] if own_choice else []
    for name, plugin in loaded.items():
        if hook not in plugin.answers:
            continue
        if name == owner:
            found.append(Candidate(Rank.OWNER, plugin.answers[hook]))
        elif name not in owning:
            found.append(Candidate(Rank.OTHER, plugin.answers[hook]))
    found += [Candidate(Rank.CORE, core)] if core else []
    return found
