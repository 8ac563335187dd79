"""The plugin `kernelbench`, through slime's hooks alone: each is a line into a room.

Tasks: ``kernelbench`` holds the problems to train on, ``kernelbench_heldout`` those that never train, and more (see
`problems.prompts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Context, Estimator, Group, Reward, hookimpl

if TYPE_CHECKING:
    import click
    from pydantic import BaseModel

    from slime_core.protocols import PromptSource
    from slime_kernelbench.run import KernelbenchRun


class KernelBench:
    """One process's plugin: it holds what its runs share, a judge and the file of turns, while they go on."""

    slime_api = 1

    def __init__(self) -> None:
        self._run: KernelbenchRun | None = None

    @property
    def run(self) -> KernelbenchRun:
        """What is open."""
        from slime_kernelbench.run import KernelbenchRun

        if self._run is None:
            self._run = KernelbenchRun()
        return self._run

    @hookimpl
    def slime_options(self) -> type[BaseModel]:
        """The model of `[plugin.kernelbench]`."""
        from slime_kernelbench.options import Options

        return Options

    @hookimpl
    def slime_recipes(self) -> Mapping[str, Path]:
        """The recipes of this folder, by file name."""
        return {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}

    @hookimpl
    def slime_command(self) -> click.Group:
        """`slime kernelbench`."""
        from slime_kernelbench.commands import kernelbench

        return kernelbench

    @hookimpl
    def slime_prompts(self, task: str, ctx: Context) -> PromptSource:
        """A task's problems, as prompts."""
        from slime_kernelbench.run import prompts

        return prompts(task, ctx)

    @hookimpl
    async def slime_generate(self, group: Group, ctx: Context) -> Group:
        """A group's dialogues; every answer is judged between two turns."""
        done: Group = await self.run.generate(group, ctx)
        return done

    @hookimpl
    async def slime_reward(self, group: Group, ctx: Context) -> list[Reward]:
        """The turns' returns, from verdicts that are there."""
        return await self.run.reward(group, ctx)

    @hookimpl
    def slime_advantage(self) -> list[Estimator]:
        """``turn_grpo`` and ``turn_rloo``."""
        from slime_kernelbench.dialogue.advantages import estimators

        return estimators()

    @hookimpl
    async def slime_run_done(self, ctx: Context) -> None:
        """End the judge."""
        run, self._run = self._run, None
        if run is not None:
            await run.aclose()
