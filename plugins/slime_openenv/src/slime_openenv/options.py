"""The keys of `[plugin.openenv]`: where the environment is, then what the model reads, does and gets for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from slime_core.data.tool_calls import PARSERS
from slime_openenv.templates import compiled

PORT = "{port}"
AUTO = "auto"
DEFAULT_PROMPT = "You act in an environment. Answer each observation with your next action."


class Options(BaseModel):
    """`[plugin.openenv]`; a table `[plugin.openenv.tasks.NAME]` has the keys that differ for a task."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    url: tuple[str, ...] = Field((), description="EnvServers that run elsewhere, all with the same environment.")
    token_env: str = Field("", description="Environment variable that holds the bearer token of `url`.")
    command: tuple[str, ...] = Field((), description="A server that slime starts: words, of which one has {port}.")
    command_dir: str = Field("", description="The folder in which `command` runs; the current one by default.")
    command_env: dict[str, str] = Field({}, description="Environment variables of `command`, besides slime's own.")
    servers: int = Field(1, ge=1, le=256, description="Processes of `command`.")
    sessions: int = Field(64, ge=1, description="Sessions (connections) of a server at once; it may allow fewer.")
    start_timeout: float = Field(
        120.0, gt=0, description="Seconds in which `command` answers, and pauses between resets, at most."
    )
    reset_timeout: float = Field(60.0, gt=0, description="Seconds for a connection and a reset.")
    step_timeout: float = Field(60.0, gt=0, description="Seconds for a step.")
    reset_tries: int = Field(3, ge=1, description="Resets, each on another connection, before a sample is dropped.")
    max_message_bytes: int = Field(1 << 20, ge=1024, description="A longer message is an infrastructure error.")

    reset: dict[str, Any] = Field({}, description="Arguments of every reset; a row's metadata.reset comes first.")
    episodes: int = Field(10_000, ge=1, le=1_000_000_000, description="Without prompt_data: seeds to train on.")
    heldout_episodes: int = Field(100, ge=1, description="Seeds of a task whose name ends in _heldout.")
    prompt: str = Field(DEFAULT_PROMPT, min_length=1, description="Without prompt_data: what every episode asks.")
    prompt_template: str = Field(
        "{{ prompt }}\n\n{{ text }}",
        description="The first message, of: prompt, text, observation, schema (of an action), tools.",
    )
    observation_template: str = Field(
        "{{ text }}",
        description="An observation, of: its fields, observation, reward, done, and text (its one text, or JSON).",
    )
    observation_path: str = Field("", description="A function in its place, fn(observation) -> str, or message parts.")
    action_field: str = Field("", description="The action's field that an answer fills; JSON where it has several.")
    action_path: str = Field("", description="In its place: a function by path, fn(text) -> dict.")
    tools: str = Field(
        "", description="MCP tools are offered, and called in this format: auto (the chat template's), hermes, ..."
    )
    max_turns: int = Field(8, ge=1, description="Answers in an episode.")
    cut_answer: Literal["end", "act"] = Field(
        "end", description="An answer of rollout_max_response_len tokens: ends the episode, or is an action."
    )
    reward: Literal["sum", "last"] = Field("sum", description="An episode's reward, of those of its turns.")
    invalid_reward: float = Field(0.0, description="The reward of a turn whose answer is not a valid action.")

    tasks: dict[str, dict[str, Any]] = Field({}, description="By task: the keys that differ there.")

    def of(self, task: str) -> Options:
        """The options of a task."""
        return Options.model_validate({**self.model_dump(exclude={"tasks"}), **self.tasks.get(task, {})})

    def tables(self) -> Iterator[tuple[str, Options]]:
        """Key and options of the tables in which an environment is described."""
        if not self.tasks or self.url or self.command:
            yield "plugin.openenv", self
        for task in self.tasks:
            yield f"plugin.openenv.tasks.{task}", self.of(task)

    @field_validator("url")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            try:
                parts = urlsplit(url)
                valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:  # a port that is none
                valid = False
            if not valid:
                raise ValueError(f"'{url}' is not an address like http://127.0.0.1:8000")
        return tuple(url.rstrip("/") for url in urls)

    @field_validator("command")
    @classmethod
    def _with_port(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if words and not any(PORT in word for word in words):
            raise ValueError(f"no word of the command has {PORT}, which slime replaces by a free port")
        return words

    @field_validator("tools")
    @classmethod
    def _a_format(cls, name: str) -> str:
        if name and name not in (AUTO, *PARSERS):
            raise ValueError(f"'{name}' is not a format of tool calls: {AUTO}, {', '.join(PARSERS)}")
        return name

    @field_validator("prompt_template", "observation_template")
    @classmethod
    def _templates(cls, text: str) -> str:
        compiled(text)
        return text

    @model_validator(mode="after")
    def _together(self) -> Self:
        for one, other in (("url", "command"), ("action_field", "action_path"), ("tools", "action_path")):
            if getattr(self, one) and getattr(self, other):
                raise ValueError(f"{one} and {other} exclude each other")
        for task, keys in self.tasks.items():
            if "tasks" in keys:
                raise ValueError(f"tasks.{task} cannot have tasks of its own")
            self.of(task)
        return self
