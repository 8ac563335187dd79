"""Rules between keys of a resolved stage. A rule names its keys, the loader their lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.backends import Backend
from slime_core.config import algorithm_rules, rollout_rules, server_rules
from slime_core.config.paths import plugin_name
from slime_core.config.problems import Problem, conflict
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

if TYPE_CHECKING:
    from slime_core.config.schema import Config

SFT = "sft_loss"


def conflicts(config: Config) -> list[Problem]:
    """Everything in one resolved stage that cannot hold together."""
    if problems := [*_backends(config)]:
        return problems
    return [
        *_batches(config),
        *_lengths(config),
        *_sampling(config),
        *algorithm_rules.conflicts(config),
        *rollout_rules.conflicts(config),
        *_staleness(config),
        *_schedule(config),
        *_tasks(config),
        *backend_problems(config),
    ]


def incomplete(config: Config) -> list[Problem]:
    """What a run cannot start without."""
    problems = []
    data, rollout = config.data, config.rollout
    if not rollout.hf_checkpoint:
        problems.append(
            conflict("no model is named", ["rollout.hf_checkpoint"], fix="name a model folder: --hf-checkpoint DIR")
        )
    named = (data.prompt_data, data.tasks, rollout.data_source_path, rollout.rollout_function_path)
    sources = (*named, rollout.load_debug_rollout_data, config.plugins)
    if not any(sources):
        problems.append(
            conflict(
                "there is nothing to train on",
                ["data.prompt_data"],
                why="no data set, task, data source or plugin is named",
                fix="name one: --prompt-data FILE.jsonl   or   --plugin NAME",
            )
        )
    return problems


def notices(config: Config) -> list[str]:
    """Sentences about settings that are legal and seldom meant."""
    evaluation = config.eval
    notices = [*algorithm_rules.notices(config), *rollout_rules.notices(config), *server_rules.notices(config)]
    notices += [text for backend in chosen(config) for text in backend.notices(config)]
    if evaluation.eval_temperature == 0 and evaluation.n_samples_per_eval_prompt > 1:
        notices.append("eval_temperature = 0 is greedy: all n_samples_per_eval_prompt samples will be equal")
    return [*notices, *_ahead_notices(config)]


def _ahead_notices(config: Config) -> Iterator[str]:
    rollout, train = config.rollout, config.train
    if rollout.stale_policy != "wait" and (not rollout.max_staleness or rollout.async_schedule == "lockstep"):
        reason = "lockstep makes no older group" if rollout.max_staleness else "nothing runs ahead of training"
        yield f"stale_policy = {rollout.stale_policy} has no effect: {reason}"
    if rollout.max_staleness and train.loss_type != SFT and not (train.use_tis or train.use_rollout_logprobs):
        yield (
            f"max_staleness = {rollout.max_staleness} trains on tokens of older weights as if the present ones had "
            "made them; use_tis weighs them, use_rollout_logprobs clips against those that did"
        )


def _batches(config: Config) -> Iterator[Problem]:
    rollout, train = config.rollout, config.train
    prompts, n, batch = rollout.rollout_batch_size, rollout.n_samples_per_prompt, train.global_batch_size
    if any(task.n_samples_per_prompt not in (0, n) for task in config.data.tasks):
        return  # rollouts a step then depend on the tasks that were drawn
    rollouts, steps = prompts * n, train.num_steps_per_rollout
    rollouts_text = f"rollout_batch_size * n_samples_per_prompt = {prompts} * {n} = {rollouts} rollouts a step"
    keys = ["rollout.rollout_batch_size", "rollout.n_samples_per_prompt", "train.global_batch_size"]
    if batch > rollouts:
        yield conflict(
            f"global_batch_size = {batch} is more than there is",
            keys,
            why=rollouts_text,
            fix=f"set global_batch_size to {rollouts} or less, or raise rollout_batch_size",
        )
    elif batch and rollouts % batch:
        yield conflict(
            f"{rollouts} rollouts do not divide into optimizer steps of global_batch_size = {batch}",
            keys,
            why=rollouts_text,
            fix=f"set global_batch_size to a divisor of {rollouts}, such as {_divisor(rollouts, batch)}",
        )
    elif batch and steps > 1 and batch * steps != rollouts:
        yield conflict(
            f"num_steps_per_rollout = {steps} and global_batch_size = {batch} contradict each other",
            [*keys, "train.num_steps_per_rollout"],
            why=rollouts_text,
            fix="set one of them and leave the other out",
        )
    elif not batch and rollouts % steps:
        yield conflict(
            f"{rollouts} rollouts do not divide into num_steps_per_rollout = {steps} optimizer steps",
            [*keys[:2], "train.num_steps_per_rollout"],
            why=rollouts_text,
            fix=f"set num_steps_per_rollout to a divisor of {rollouts}, such as {_divisor(rollouts, steps)}",
        )


def _divisor(of: int, near: int) -> int:
    """The largest divisor of ``of`` that is at most ``near``."""
    return next(d for d in range(min(near, of), 0, -1) if of % d == 0)


def _lengths(config: Config) -> Iterator[Problem]:
    rollout, data = config.rollout, config.data
    context, response = rollout.rollout_max_context_len, rollout.rollout_max_response_len
    if not context:
        return
    keys = ["rollout.rollout_max_response_len", "rollout.rollout_max_context_len"]
    if response >= context:
        yield _no_room(keys[0], response, context)
    elif data.rollout_max_prompt_len + response > context:
        yield conflict(
            f"rollout_max_prompt_len + rollout_max_response_len = {data.rollout_max_prompt_len} + {response} "
            f"is more than rollout_max_context_len = {context}",
            ["data.rollout_max_prompt_len", *keys],
            why="the context holds prompt and response",
            fix=f"set rollout_max_prompt_len to at most {context - response}, or 0 for what the context leaves",
        )
    evaluated = config.eval.eval_max_response_len
    if evaluated >= context:
        yield _no_room("eval.eval_max_response_len", evaluated, context)


def _no_room(key: str, length: int, context: int) -> Problem:
    return conflict(
        f"{key.partition('.')[2]} = {length} leaves no room in rollout_max_context_len = {context}",
        [key, "rollout.rollout_max_context_len"],
        why="the context holds prompt and response",
        fix="lower the response length or raise the context",
    )


def _sampling(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    supervised = config.train.loss_type == SFT
    if rollout.rollout_temperature == 0 and rollout.n_samples_per_prompt > 1 and not supervised:
        yield conflict(
            f"rollout_temperature = 0 with n_samples_per_prompt = {rollout.n_samples_per_prompt}",
            ["rollout.rollout_temperature", "rollout.n_samples_per_prompt"],
            code="CFG03",
            why="greedy samples of one prompt are all equal, so a group teaches nothing",
            fix="set rollout_temperature above 0",
        )
    if config.reward.group_rm and not config.reward.custom_rm_path:
        yield conflict(
            "group_rm is set and custom_rm_path is not",
            ["reward.group_rm"],
            why="group_rm says how custom_rm_path is called",
            fix="name the function: --custom-rm-path FILE.py:FUNCTION",
        )


def _staleness(config: Config) -> Iterator[Problem]:
    ahead = config.rollout.max_staleness
    if ahead and config.cluster.colocate:
        yield conflict(
            f"max_staleness = {ahead} with colocate = true",
            ["rollout.max_staleness", "cluster.colocate"],
            why="an engine that shares the trainer's device cannot generate while it trains",
            fix="--no-colocate   or   --max-staleness 0",
        )


def _schedule(config: Config) -> Iterator[Problem]:
    train = config.train
    if train.min_lr > train.lr:
        yield conflict(
            f"min_lr = {train.min_lr} is above lr = {train.lr}",
            ["train.min_lr", "train.lr"],
            why="the learning rate decays from lr to min_lr",
            fix=f"set min_lr to at most {train.lr}",
        )
    if train.lr_decay_iters and train.lr_warmup_iters >= train.lr_decay_iters:
        yield conflict(
            f"lr_warmup_iters = {train.lr_warmup_iters} is not below lr_decay_iters = {train.lr_decay_iters}",
            ["train.lr_warmup_iters", "train.lr_decay_iters"],
            why="decay starts where the warm-up ends",
            fix="lower lr_warmup_iters or raise lr_decay_iters",
        )


def _tasks(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.prompt_data and data.tasks:
        yield conflict(
            "data.prompt_data and [[data.tasks]] are both set",
            ["data.prompt_data", "data.tasks"],
            why="each names what to train on",
            fix="move prompt_data into a [[data.tasks]] entry, or remove one",
        )
    for section, key, tasks in (("data", "tasks", data.tasks), ("eval", "eval_tasks", config.eval.eval_tasks)):
        names = [task.name for task in tasks]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield conflict(f"two {section}.{key} are named '{name}'", [f"{section}.{key}"], fix="rename one of them")
        for task in tasks:
            if task.plugin and task.plugin not in map(plugin_name, config.plugins):
                yield conflict(
                    f"task '{task.name}' belongs to plugin '{task.plugin}', which the run does not load",
                    [f"{section}.{key}", "plugins"],
                    fix=f"--plugin {task.plugin}",
                )
    if len(config.eval.eval_prompt_data) % 2:
        yield conflict(
            "eval_prompt_data is not made of pairs",
            ["eval.eval_prompt_data"],
            why="it lists NAME PATH NAME PATH ...",
            fix="--eval-prompt-data NAME PATH",
        )


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
