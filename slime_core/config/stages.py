"""One resolved config a stage, of a config with `[[stage]]` tables."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from slime_core.config.fields import core_keys, section_model, sections_of_keys
from slime_core.config.presets import settle
from slime_core.config.problems import Problem, dotted, error_of
from slime_core.config.schema import SECTIONS, Config
from slime_core.config.validate import check_model, unknown

MAIN = "main"
LEAST_SLOTS, MOST_SLOTS = 64, 1024  # sequences that an embedded engine decodes at once
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def stages(config: Config) -> list[Config]:
    """Each stage with its overrides applied, in order; a config without ``[[stage]]`` is one stage, "main".

    What ``auto`` leaves to the algorithm is settled. ``config.name`` stays; :func:`stage_name` tells the stages apart.
    Resolving a resolved stage changes nothing.

    Raises:
        ConfigError: a stage table that does not resolve (a loaded config has none).
    """
    if not config.stage:
        return [_settled(config)]
    resolved = []
    for index in range(len(config.stage)):
        stage = resolve_stage(config.model_dump(), index)
        if isinstance(stage, list):
            raise error_of(stage)
        resolved.append(_settled(stage))
    return resolved


def _settled(config: Config) -> Config:
    return config.model_copy(update={"train": settle(config.train)})


def stage_name(config: Config) -> str:
    """The name of a resolved stage."""
    return str(config.stage[0].get("name", MAIN)) if config.stage else MAIN


def resolve_stage(data: Mapping[str, Any], index: int) -> Config | list[Problem]:
    """Stage ``index`` of whole-config tables as a Config, or every problem of its table."""
    sections = sections_of_keys()
    table = data["stage"][index]
    out = copy.deepcopy({key: value for key, value in data.items() if key != "stage"})
    out["stage"] = ({"name": table.get("name", "")},)
    problems = check_table(table, index)
    for key, value in table.items():
        if key in SECTIONS and isinstance(value, Mapping):
            out.setdefault(key, {}).update(value)
        elif key == "plugin" and isinstance(value, Mapping):
            for name, options in value.items():
                out.setdefault("plugin", {}).setdefault(name, {}).update(options)
        elif key in sections:
            out.setdefault(sections[key], {})[key] = value
    return problems or check_model(Config, out)


def check_table(table: Mapping[str, Any], index: int) -> list[Problem]:
    """What is wrong with the keys and the name of one stage table."""
    keys, at = core_keys(), ("stage", index)
    problems = []
    name = table.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problems.append(
            Problem(
                code="CFG02",
                what=f"stage {index + 1} has no name" if name is None else f"stage name {name!r} cannot be used",
                keys=((*at, "name") if name is not None else at,),
                why="a name is 1 to 64 letters, digits, dots, dashes and underscores",
                fix='write name = "warmup" in the [[stage]] table',
            )
        )
    for key, value in table.items():
        nested = key in SECTIONS and isinstance(value, Mapping)
        names = list(section_model(key).model_fields if nested else sections_of_keys())
        for name in value if nested else [key]:
            path = (*at, key, name) if nested else (*at, key)
            if name in keys and keys[name].once:
                problems.append(_fixed(path))
            elif name not in names and (nested or name not in ("name", "plugin")):
                problems.append(unknown(path, names))
    return problems


def _fixed(path: tuple[str | int, ...]) -> Problem:
    return Problem(
        code="CFG04",
        what=f"{dotted(path)} cannot differ between stages",
        keys=(path,),
        why="model, engine and trainer are built once a run",
        fix="set it for the whole run, outside [[stage]]",
    )


def rollout_slots(config: Config, device: str = "") -> int:
    """Sequences that an embedded engine is to decode at once, as far as memory goes.

    The config's, or on a CPU 64, and on a GPU as many as serve a step of any stage in one round.

    Args:
        device: in place of the config's, where it is not that of this machine
    """
    if config.rollout.rollout_slots or (device or config.cluster.device) == "cpu":
        return config.rollout.rollout_slots or LEAST_SLOTS
    rollouts = [stage.rollout for stage in stages(config)]
    samples = max(max(r.rollout_batch_size, r.over_sampling_batch_size) * r.n_samples_per_prompt for r in rollouts)
    return min(MOST_SLOTS, max(LEAST_SLOTS, -(-samples // max(1, config.rollout.rollout_num_engines))))
