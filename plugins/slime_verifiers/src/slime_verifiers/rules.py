"""What cannot hold together in a stage's config: it is said before a model is loaded, and by --dry-run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict
from slime_core.config.validate import validate_options
from slime_core.errors import ConfigError
from slime_verifiers.options import EnvironmentOptions, Options

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_verifiers.pool import WorkerPool

OWN = "plugin.verifiers"


def problems(config: Config, pool_of: Callable[[Options], WorkerPool]) -> list[Problem]:
    """All of them; every environment is loaded once."""
    options = validate_options("verifiers", Options, config.plugin.get("verifiers", {}))
    assert isinstance(options, Options)
    environments: dict[str, EnvironmentOptions] = {OWN: options} if options.env else {}
    environments |= {f"{OWN}.environments.{name}": one for name, one in options.environments.items()}
    conflicts: list[Problem] = []
    if not environments:
        conflicts.append(conflict("no environment is named", [f"{OWN}.env"], fix="--env ID   of an installed package"))
    if options.episode_seconds >= config.rollout.generate_timeout:
        conflicts.append(
            conflict(
                "an episode may take longer than its group",
                [f"{OWN}.episode_seconds", "rollout.generate_timeout"],
                why="a group that misses generate_timeout ends the run; a late episode is only dropped",
                fix="--generate-timeout SECONDS   above episode_seconds",
            )
        )
    for key, environment in environments.items():
        try:
            for evaluation in (False,) if environment.splits else (False, True):
                if pool_of(options).load(environment, evaluation=evaluation) == 0:
                    conflicts.append(conflict(f"{environment.env} has no tasks", [f"{key}.env"], fix="see select"))
        except ConfigError as error:
            conflicts.append(conflict(error.what, [f"{key}.env"], why=error.why, fix=error.fix, code=error.code))
    return conflicts
