"""Rules over a resolved stage: those of its sections, with what its backends and plugins say.

A rule names its keys, the loader their lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.backends import Backend
from slime_core.config.fields import core_keys
from slime_core.config.paths import plugin_name
from slime_core.config.problems import Problem, conflict
from slime_core.config.schema import Config
from slime_core.config.sections import fact
from slime_core.config.validate import check_table
from slime_core.errors import ConfigError
from slime_core.plugins.backends import (
    BROUGHT_BY,
    backend_problems,
    chosen,
    cluster_of,
    engine_of,
    implied,
    install,
    trainer_of,
    unread,
)


def conflicts(config: Config) -> list[Problem]:
    """Everything in one resolved stage that cannot hold together."""
    if problems := [*_backends(config)]:
        return problems
    cluster, data, rollout, train = config.cluster, config.data, config.rollout, config.train
    plugins, offline = [plugin_name(entry) for entry in config.plugins], train.offline
    algorithm = train.algorithm
    routed = engine_of(config).spreads(config)
    return [
        *data.conflicts(plugins, train.lora_adapters),
        *rollout.conflicts(cluster, data, offline=offline),
        *train.conflicts(data, rollout, log_probs_of_samples=_log_probs_of_samples(config)),
        *(algorithm.conflicts(config) if algorithm and algorithm.conflicts else ()),
        *config.reward.conflicts(rollout.rollout_max_response_len, offline=offline),
        *config.eval.conflicts(
            cluster, data, rollout, plugins, train.lora_adapters, engines=engines(config), routed=routed
        ),
        *backend_problems(config),
    ]


def incomplete(config: Config, *, data: bool = True) -> list[Problem]:
    """What a run cannot start without; without ``data``, what cannot be planned without it."""
    rollout = config.rollout
    fix = "name a model folder, or a model on the hub: --hf-checkpoint DIR   or   --hf-checkpoint ORG/NAME"
    model = conflict("no model is named", ["rollout.hf_checkpoint"], fix=fix)
    prompts = conflict(
        "there is nothing to train on",
        ["data.prompt_data"],
        why="no data set, task, data source or plugin is named",
        fix="name one: --prompt-data FILE.jsonl   or   --plugin NAME",
    )
    named = (config.data.prompt_data, config.data.tasks, rollout.data_source_path, rollout.rollout_function_path)
    trains = any((*named, rollout.load_debug_rollout_data, config.plugins))
    return [*([] if rollout.hf_checkpoint else [model]), *([] if trains or not data else [prompts])]


def notices(config: Config) -> list[str]:
    """Sentences about settings that are legal and seldom meant."""
    rollout, train = config.rollout, config.train
    algorithm = train.algorithm
    return [
        *rollout.notices(),
        *train.notices(rollout, log_probs_of_samples=_log_probs_of_samples(config)),
        *(algorithm.notices(config) if algorithm and algorithm.notices else ()),
        *config.eval.notices(rollout),
        *_without_reader(config),
        *(text for backend in chosen(config) for text in backend.notices(config)),
    ]


def engines(config: Config) -> int:
    """Engines that the keys ask for, 2 where a file says it; GPUs count where the device may be one."""
    rollout, engine = config.rollout, engine_of(config)
    if engine.count is not None:
        return engine.count(config)
    if rollout.rollout_num_engines:
        return rollout.rollout_num_engines
    placed = cluster_of(config).remote or not engine.embedded
    on_gpus = placed and config.cluster.device != "cpu"
    return max(1, rollout.rollout_num_gpus // rollout.rollout_num_gpus_per_engine) if on_gpus else 1


def _without_reader(config: Config) -> Iterator[str]:
    """Keys and tables that are set, and whose only readers the config does not choose."""
    engine, trainer, cluster = engine_of(config), trainer_of(config), cluster_of(config)
    remote, served = cluster.remote, not engine.embedded
    apart = bool(config.rollout.max_staleness or config.eval.eval_async)
    serving = f"rollout_engine = {engine.name}; servers read them"
    readers = {
        "servers": (served, serving),
        "servers or adapters": (served or config.train.lora_sync == "adapter", serving),
        "placed engines": (served or remote, serving),
        "separate engines": (served or remote or apart, serving),
        "other machines": (remote, f"cluster_backend = {cluster.name}"),
        "megatron hooks": (trainer.megatron_hooks, f"train_backend = {trainer.name}, which has no such place"),
    }
    idle: dict[str, list[str]] = {}
    for key in core_keys().values():
        present, choice = readers.get(fact(key.info, "reader"), (True, ""))
        if not present and getattr(config, key.section).changed([key.name]):
            idle.setdefault(choice, []).append(key.name)
    for choice, names in idle.items():
        yield f"{', '.join(names)}: no effect with {choice}"
    used = {engine.name, trainer.name, cluster.name}
    for name, table in config.tables.items():
        if table and name not in used:
            yield f"[{name}] {', '.join(table)}: no effect without the backend {name}"


def _log_probs_of_samples(config: Config) -> bool:
    """Whether a plugin or a function is named that could set ``sample.teacher_log_probs``."""
    keys = [key for key in core_keys().values() if fact(key.info, "fills")]
    named = any(getattr(getattr(config, key.section), key.name) for key in keys)
    return named or bool(config.plugins) or any(task.generate or task.reward for task in config.data.tasks)


def _backends(config: Config) -> Iterator[Problem]:
    """Backends, and plugins that keys need, that cannot be had; tables of those that nobody has."""
    for find in (engine_of, trainer_of, cluster_of, implied):
        try:
            backend = find(config)
            yield from section(backend, config) if isinstance(backend, Backend) else ()
        except ConfigError as error:
            yield conflict(error.what, [error.where], why=error.why, fix=error.fix)
    for name in unread(config):
        message = f"nobody reads [{name}]: {BROUGHT_BY[name]}, whose table it is, is not installed here"
        yield conflict(message, [name], fix=f"{install(name)}   or leave [{name}] out")


def section(backend: Backend, config: Config) -> list[Problem]:
    """What is wrong with ``[NAME]`` by its own model."""
    if backend.section is None:
        return []
    problems = check_table((backend.name,), backend.section, config.table(backend.name))
    return problems if isinstance(problems, list) else []
