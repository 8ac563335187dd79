"""The plugin `openenv`: options, rows without data, episodes and their rewards, through slime's hooks alone.

Without `data.prompt_data` a task has a row a seed: any name the first ``episodes``, a name that ends in ``_heldout``
others that the first never meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core import Context, Group, Prompt, Reward, Status, hookimpl

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.config.problems import Problem
    from slime_core.config.schema import Config
    from slime_core.types import Message
    from slime_openenv.options import Options
    from slime_openenv.servers import EnvServers

HELDOUT = "_heldout"
FIRST_HELDOUT = 1_000_000_000
"""Their first seed; those of training are below."""


class Seeds:
    """Rows that differ in the seed of their reset."""

    def __init__(self, prompt: str, first: int, count: int) -> None:
        self._prompt, self._first, self._count = prompt, first, count

    def __len__(self) -> int:
        return self._count

    def at(self, position: int) -> Prompt:
        """The episode number ``position``."""
        if not 0 <= position < self._count:
            raise IndexError(position)
        metadata = {"reset": {"seed": self._first + position}}
        return Prompt(id="", position=position, prompt=self._prompt, metadata=metadata)

    def state(self) -> dict[str, Any]:
        """What another run must have too."""
        return {"version": 1, "prompt": self._prompt, "first": self._first, "count": self._count}


class OpenEnv:
    """One process's plugin: it holds the servers of its runs while they go on."""

    slime_api = 1

    def __init__(self) -> None:
        self._servers: list[EnvServers] = []

    @hookimpl
    def slime_options(self) -> type[BaseModel]:
        """The model of `[plugin.openenv]`."""
        from slime_openenv.options import Options

        return Options

    @hookimpl
    def slime_config_rules(self, config: Config) -> list[Problem]:
        """Say what the environment and the data cannot do together."""
        from slime_core.config.problems import conflict
        from slime_openenv.options import Options

        options, problems = Options.model_validate(config.plugin.get("openenv", {})), []
        for key, table in options.tables():
            if not table.url and not table.command:
                fix = f'set {key}.url=["http://127.0.0.1:8000"], or {key}.command=[...]'
                problems.append(conflict("it is not said where the OpenEnv environment is", [key], fix=fix))
            if table.tools and not config.data.apply_chat_template:
                problems.append(
                    conflict(
                        f"tools = {table.tools} without a chat template",
                        [f"{key}.tools", "data.apply_chat_template"],
                        why="the template offers the tools to the model, and writes down their results",
                        fix="set data.apply_chat_template=true",
                    )
                )
        return problems

    @hookimpl
    def slime_prompts(self, task: str, ctx: Context) -> Seeds:
        """A row a seed."""
        options: Options = ctx.options.of(task.removesuffix(HELDOUT))
        if task.endswith(HELDOUT):
            return Seeds(options.prompt, FIRST_HELDOUT, options.heldout_episodes)
        return Seeds(options.prompt, 0, options.episodes)

    @hookimpl
    def slime_messages(
        self, messages: list[Message], tools: list[Any] | None, metadata: dict[str, Any]
    ) -> tuple[list[Message], list[Any] | None]:
        """Keep a row's messages: the template renders them again, together with the first observation."""
        from slime_openenv.episode import MESSAGES

        metadata[MESSAGES] = messages
        return messages, tools

    @hookimpl
    async def slime_generate(self, group: Group, ctx: Context) -> Group:
        """An episode a sample, all of a group side by side."""
        from slime_core.plugins.boundary import together
        from slime_openenv.episode import EpisodePlayer

        player = EpisodePlayer(self._of(group, ctx), ctx)
        waiting = [sample for sample in group.samples if sample.status in (Status.PENDING, Status.ABORTED)]
        await together(player.play(sample, group.prompt) for sample in waiting)
        return group

    @hookimpl
    def slime_reward(self, group: Group, ctx: Context) -> list[Reward]:
        """What the environment gave."""
        from slime_openenv.episode import reward_of

        options: Options = ctx.options.of(group.prompt.task.removesuffix(HELDOUT))
        return [reward_of(sample, options) for sample in group.samples]

    @hookimpl
    async def slime_run_done(self, ctx: Context) -> None:
        """End the servers."""
        servers, self._servers = self._servers, []
        for part in servers:
            await part.aclose()

    def _of(self, group: Group, ctx: Context) -> EnvServers:
        from slime_openenv.servers import EnvServers

        task = group.prompt.task.removesuffix(HELDOUT)
        options: Options = ctx.options.of(task)
        for servers in self._servers:
            if servers.options == options:
                return servers
        self._servers.append(EnvServers(options, ctx.run_dir, f"openenv-{len(self._servers)}"))
        return self._servers[-1]
