"""The plugin `gym`: text games by id, with self-play, through slime's hooks alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core import ConfigError, Context, Group, Reward, hookimpl

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.data.turns import Speech
    from slime_gym.episodes import EpisodeRows
    from slime_gym.processes import GameProcesses


class Gym:
    """One process's plugin: it holds the processes that play while a run goes on."""

    slime_api = 1

    def __init__(self) -> None:
        self._processes: GameProcesses | None = None
        self._descriptions: dict[str, dict[str, Any]] = {}  # games that were described, by spec

    @hookimpl
    def slime_options(self) -> type[BaseModel]:
        """The model of `[plugin.gym]`."""
        from slime_gym.options import Options

        return Options

    @hookimpl
    def slime_recipes(self) -> Mapping[str, Path]:
        """`default`: any game and any chat model, by flags."""
        return {"default": Path(__file__).parent / "recipes" / "default.toml"}

    @hookimpl
    def slime_prompts(self, task: str, ctx: Context) -> EpisodeRows:
        """Episodes of the game ``plugin.gym.game``, or of the game that has the task's name."""
        from slime_gym.episodes import EpisodeRows, spec_of

        spec = spec_of(ctx.options, task)
        facts = self._describe(spec)
        if facts["pictures"]:
            require_sight(spec.game, ctx)
        players = int(facts["players"])
        if players > 1 and ctx.options.opponent_in(evaluation=ctx.evaluation) == "random":  # which must find a move
            self._describe(replace(spec, players=players, random_players=(0, *range(2, players))))
        return EpisodeRows(task, spec, facts, ctx)

    @hookimpl
    async def slime_generate(self, group: Group, ctx: Context) -> Group:
        """One episode a rollout, and a sample for each player that the model plays."""
        from slime_gym.episodes import play_group
        from slime_gym.processes import GameProcesses

        options = ctx.options
        if self._processes is None:
            memory = int(options.worker_memory_gb * (1 << 30))
            self._processes = GameProcesses(options.workers, options.step_timeout, memory)
        return await play_group(group, ctx, self._processes, speech_of(ctx))

    @hookimpl
    def slime_reward(self, group: Group, ctx: Context) -> list[Reward]:
        """What the game gave each player."""
        from slime_gym.episodes import rewards

        return rewards(group.samples)

    @hookimpl
    async def slime_run_done(self, ctx: Context) -> None:
        """End the processes."""
        processes, self._processes = self._processes, None
        if processes is not None:
            await processes.close()

    def _describe(self, spec: Any) -> dict[str, Any]:
        from slime_gym.games import GameError
        from slime_gym.processes import described

        if not spec.game or spec.game == "default":
            raise ConfigError(
                "no game is named",
                code="CFG02",
                where="plugin.gym.game",
                fix="--game TicTacToe-v0, or give each [[data.tasks]] the name of a game",
            )
        name = json.dumps(asdict(spec), sort_keys=True)
        try:
            return self._descriptions.setdefault(name, self._descriptions.get(name) or described(spec))
        except GameError as error:
            raise ConfigError(
                error.what, code="CFG03", where=f"plugin.gym, game {spec.game}", why=error.why, fix=error.fix
            ) from error


def require_sight(game: str, ctx: Context) -> None:
    """Refuse a game that shows pictures where the model cannot read them.

    Raises:
        ConfigError: CFG03.
    """
    template = ctx.config.data.apply_chat_template
    if ctx.media is None or not template:
        raise ConfigError(
            f"{game} shows pictures, and " + ("the model takes none" if template else "no chat template is applied"),
            code="CFG03",
            where=f"plugin.gym, game {game}",
            fix="a model that sees pictures (docs/images.md), or plugin.gym.pictures=false where the game has words"
            if template
            else "--apply-chat-template",
        )


def speech_of(ctx: Context) -> Speech:
    """How a run puts games into ids; one a stage, since it remembers what it has encoded."""
    from slime_core.data.turns import Speech

    if "gym" not in ctx.shared:
        data = ctx.config.data
        ctx.shared["gym"] = Speech(
            ctx.tokenizer,
            template=data.apply_chat_template,
            kwargs=dict(data.apply_chat_template_kwargs),
            plain=ctx.options.between,
            media=ctx.media,
        )
    speech: Speech = ctx.shared["gym"]
    return speech
