"""Rules of evaluation: a resolved stage in; what cannot hold, and what has no effect, out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict
from slime_core.plugins.backends import cluster_of, engine_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config

KEY = "eval.eval_async"
IN_PLACE = "--no-eval-async   which evaluates between two steps"


def conflicts(config: Config) -> Iterator[Problem]:
    """What keeps an engine from serving one version while others are trained."""
    rollout, cluster = config.rollout, config.cluster
    if config.eval.eval_config:
        yield conflict(
            "a stage has an eval_config of its own",
            ["eval.eval_config"],
            why="the file is read once, for the whole recipe",
            fix="name it in [eval], or give the stage eval_tasks",
        )
    if not config.eval.eval_async or rollout.debug_train_only:
        return
    if engine_of(config).spreads(config):
        yield conflict(
            f"eval_async = true with rollout_router = {rollout.rollout_router}",
            [KEY, "rollout.rollout_router"],
            why="SGLang's router spreads requests over all servers, also over the one that keeps the weights",
            fix=f"--rollout-router builtin   or   {IN_PLACE}",
        )
    if cluster.colocate:
        yield conflict(
            "eval_async = true with colocate = true",
            [KEY, "cluster.colocate"],
            why="an engine that shares the trainer's device cannot generate while it trains",
            fix=f"--no-colocate   or   {IN_PLACE}",
        )
    if engines(config) < 2:
        yield conflict(
            "eval_async = true with one engine",
            [KEY, "rollout.rollout_num_engines"],
            why="one engine keeps the weights that are evaluated, and rollouts need another",
            fix=f"--rollout-num-engines 2   or   {IN_PLACE}",
        )
    for key in _functions(config):
        yield conflict(
            f"eval_async = true with {key}",
            [KEY, key],
            why="functions by path reach all engines by one address: an evaluation could get tokens of other weights",
            fix=f"{IN_PLACE}   or generate in a plugin's slime_generate",
        )


def notices(config: Config) -> Iterator[str]:
    """Settings that nothing reads."""
    if config.eval.eval_async and config.rollout.debug_train_only:
        yield "eval_async: no effect with debug_train_only, which has no engine"
    for task in config.eval.eval_tasks:
        if task.temperature == 0 and (task.n_samples_per_prompt or config.eval.n_samples_per_eval_prompt) > 1:
            yield f"evaluation set {task.name}: temperature = 0 is greedy: all samples of a question will be equal"


def engines(config: Config) -> int:
    """Engines that the keys ask for, 2 where a file says it; GPUs count where the device may be one."""
    rollout, cluster = config.rollout, config.cluster
    engine = engine_of(config)
    if engine.count is not None:
        return engine.count(config)
    if rollout.rollout_num_engines:
        return rollout.rollout_num_engines
    placed = cluster_of(config).remote or not engine.embedded
    on_gpus = placed and cluster.device != "cpu"
    return max(1, rollout.rollout_num_gpus // rollout.rollout_num_gpus_per_engine) if on_gpus else 1


def _functions(config: Config) -> Iterator[str]:
    """Keys of functions that generate by the door of slime's address."""
    if config.rollout.custom_generate_function_path:
        yield "rollout.custom_generate_function_path"
    if config.rollout.rollout_function_path:
        yield "rollout.rollout_function_path"
    if config.eval.eval_function_path:
        yield "eval.eval_function_path"
    if any(task.generate for task in config.data.tasks):
        yield "data.tasks"
    if any(task.generate for task in config.eval.eval_tasks):
        yield "eval.eval_tasks"
