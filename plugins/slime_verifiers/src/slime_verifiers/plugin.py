"""The plugin `verifiers`: an environment's tasks, its episodes and its rewards, through slime's hooks alone.

Tasks: ``verifiers`` is the environment that `--env` names, ``verifiers_heldout`` its evaluation; those of
`[plugin.verifiers.environments]` have their own names.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Context, Group, Reward, hookimpl

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.config.problems import Problem
    from slime_core.config.schema import Config
    from slime_core.protocols import PromptSource
    from slime_verifiers.options import Options
    from slime_verifiers.pool import WorkerPool


class Verifiers:
    """One process's plugin: it holds the pools of workers while a run goes on."""

    slime_api = 1

    def __init__(self) -> None:
        self._pools: dict[str, WorkerPool] = {}  # by the options that make them
        atexit.register(self._close)

    @hookimpl
    def slime_options(self) -> type[BaseModel]:
        """The model of `[plugin.verifiers]`."""
        from slime_verifiers.options import Options

        return Options

    @hookimpl
    def slime_recipes(self) -> Mapping[str, Path]:
        """The recipes of this folder, by file name."""
        return {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}

    @hookimpl
    def slime_config_rules(self, config: Config) -> list[Problem]:
        """Environments that are not there or do not load, before anything is trained; deadlines that contradict."""
        from slime_verifiers.rules import problems

        return problems(config, self._pool)

    @hookimpl
    def slime_prompts(self, task: str, ctx: Context) -> PromptSource:
        """An environment's tasks."""
        from slime_verifiers.episodes import EnvironmentTasks, environment_of

        environment, evaluation = environment_of(task, ctx.options)
        return EnvironmentTasks(self._pool(ctx.options), environment, evaluation=evaluation)

    @hookimpl
    async def slime_generate(self, group: Group, ctx: Context) -> Group:
        """A group's episodes."""
        from slime_verifiers.episodes import play

        return await play(group, ctx, self._pool(ctx.options))

    @hookimpl
    def slime_reward(self, group: Group, ctx: Context) -> list[Reward]:
        """What the environment said."""
        from slime_verifiers.episodes import reward_of

        return [reward_of(sample) for sample in group.samples]

    @hookimpl
    async def slime_run_done(self, ctx: Context) -> None:
        """End the workers."""
        await asyncio.to_thread(self._close)

    def _pool(self, options: Options) -> WorkerPool:
        from slime_verifiers.pool import WorkerPool

        shared = {"python", "processes", "memory_mb", "load_seconds"}
        return self._pools.setdefault(options.model_dump_json(include=shared), WorkerPool(options))

    def _close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()
