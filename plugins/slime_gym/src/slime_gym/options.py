"""The keys of `[plugin.gym]`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Opponent = Literal["self", "random", "frozen"]


class Options(BaseModel):
    """`[plugin.gym]`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    game: str = Field("", description="Id of TextArena's or Gymnasium's; empty: each task's name is one.")
    game_args: dict[str, Any] = Field({}, description="Keyword arguments of the game's class.")
    modules: tuple[str, ...] = Field((), description="Modules or Python files that register games of your own.")
    players: int = Field(0, ge=0, le=15, description="Number of players; 0: the fewest that the game takes.")
    opponent: Opponent = Field(
        "self", description="Other players: the model itself, random legal moves, or a frozen engine."
    )
    eval_opponent: Literal["", "self", "random", "frozen"] = Field(
        "random", description="The same in evaluations; empty: as in training."
    )
    random_actions: tuple[str, ...] = Field(
        (), description="Moves that a random player tries, beside those in brackets in the game's text."
    )
    invalid_moves: int = Field(
        -1, ge=-1, description="Invalid moves in a row before a loss; -1: the game's own number."
    )
    max_turns: int = Field(0, ge=0, description="Answers of a player in an episode; 0: as many as the game takes.")
    unfinished_reward: float = Field(0.0, description="Of a TextArena game that a limit ended before its end.")
    turn_rewards: bool = Field(
        False, description="Credit rewards to the turns that earned them: see train.credit_level."
    )
    system_prompt: str = Field("", description="A system message before the game's first text.")
    instructions: str = Field("", description="In place of the game's own instructions.")
    template: str = Field("", description="Of Gymnasium's observations: {observation}, or {0}, {1} for its parts.")
    pictures: bool = Field(
        False, description="Show Gymnasium's environments as pictures: their drawing, render mode rgb_array."
    )
    actions: tuple[str, ...] = Field((), description="Names of Gymnasium's numbered actions, in order.")
    between: str = Field("\n\n{{feedback}}\n\n", description="Text between two answers, without a chat template.")
    workers: int = Field(1, ge=1, le=64, description="GameProcesses that play the games.")
    step_timeout: float = Field(30.0, gt=0, description="Seconds for one move in the game.")
    worker_memory_gb: float = Field(8.0, gt=0.25, description="GiB of address space of a process that plays.")

    @model_validator(mode="after")
    def _has_feedback(self) -> Options:
        if "{{feedback}}" not in self.between:
            raise ValueError("between has no {{feedback}}")
        return self

    def opponent_in(self, *, evaluation: bool) -> str:
        """The opponent in training, or in an evaluation."""
        return (self.eval_opponent if evaluation else "") or self.opponent
