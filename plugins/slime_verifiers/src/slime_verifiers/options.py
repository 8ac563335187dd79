"""The keys of `[plugin.verifiers]`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

STRICT = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class EnvironmentOptions(BaseModel):
    """One environment: what `--env` names, or an entry of `environments`."""

    model_config = STRICT

    env: str = Field("", description="Id of an installed environment package, as vf-eval takes it.")
    env_args: dict[str, Any] = Field({}, description="verifiers' [env] block: taskset, agent, timeout, ...")
    eval_env_args: dict[str, Any] = Field({}, description="Laid over env_args in evaluation; then none is held out.")
    select: dict[str, Any] = Field({}, description="Which tasks: verifiers' [select] block (include, shuffle, limit).")
    eval_select: dict[str, Any] = Field({}, description="The same for evaluation; then no task is held out.")
    heldout: int = Field(16, ge=0, description="The first tasks, half at most, are for evaluation alone.")
    python: str = Field("", description="Interpreter that has the environment and verifiers; empty: slime's own.")

    @property
    def splits(self) -> bool:
        """Whether evaluation takes the first tasks of the training set, which then never train."""
        return not (self.eval_env_args or self.eval_select)

    def served(self, *, evaluation: bool) -> dict[str, Any]:
        """The [env] block that a worker loads, with ``select`` beside."""
        block = merged(self.env_args, self.eval_env_args if evaluation else {})
        select = (self.eval_select if evaluation else {}) or self.select
        return merged(block, {"taskset": {"id": self.env}}) | ({"select": select} if select else {})


class Options(EnvironmentOptions):
    """`[plugin.verifiers]`."""

    environments: dict[str, EnvironmentOptions] = Field(
        {}, description="More environments, by the name of their task; NAME_heldout is its evaluation."
    )
    processes: int = Field(1, ge=1, le=256, description="Processes an interpreter, which share the episodes.")
    memory_mb: int = Field(8192, ge=0, description="MiB of data of such a process; 0 is no limit.")
    episode_seconds: float = Field(1800.0, gt=0, description="Seconds for an episode; a longer one is lost.")
    load_seconds: float = Field(600.0, gt=0, description="Seconds for loading an environment and reading its tasks.")
    tool_parser: str = Field("auto", description="How the model writes tool calls; auto: as its chat template does.")
    leave_out: tuple[str, ...] = Field(
        ("temperature", "top_p", "top_k"), description="Parameters of the environment that the run's own replace."
    )


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``base``, table by table.

    Example: merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}) == {"a": {"b": 3, "c": 2}}
    """
    result = dict(base)
    for name, value in over.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
