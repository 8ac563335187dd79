"""Rules about which samples train and are measured: sampling control, debug modes, evaluation.

Supervised stages, which generate and judge nothing, are left alone by the rules of sampling control.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict
from slime_core.plugins.backends import cluster_of, engine_of

if TYPE_CHECKING:
    from slime_core.config.schema import Config

SFT_LOSS = "sft_loss"
OVER, BATCH = "rollout.over_sampling_batch_size", "rollout.rollout_batch_size"
DYNAMIC = "rollout.dynamic_sampling"
SAVE, LOAD = "rollout.save_debug_rollout_data", "rollout.load_debug_rollout_data"
ROLLOUT, TRAIN = "rollout.debug_rollout_only", "rollout.debug_train_only"
KEY = "eval.eval_async"
IN_PLACE = "--no-eval-async   which evaluates between two steps"


def conflicts(config: Config) -> list[Problem]:
    """What cannot hold together."""
    return [
        *_conflicts_of_sampling(config),
        *_conflicts_of_debugging(config),
        *_conflicts_of_evaluation(config),
    ]


def notices(config: Config) -> list[str]:
    """Sentences about settings that are legal and seldom meant."""
    return [*_notices_of_sampling(config), *_notices_of_debugging(config), *_notices_of_evaluation(config)]


def _either(one: str, other: str, *, why: str) -> Problem:
    """Two keys of which one must go."""
    message = f"{one.partition('.')[2]} with {other.partition('.')[2]}"
    return conflict(message, [one, other], why=why, fix="remove one of them")


def _conflicts_of_sampling(config: Config) -> Iterator[Problem]:
    """Settings of sampling control that cannot hold together."""
    if config.train.loss_type == SFT_LOSS:
        return
    yield from _over_sampling(config)
    yield from _partial(config)
    yield from _dynamic(config)
    yield from _rewards(config)


def _notices_of_sampling(config: Config) -> list[str]:
    """Sentences about settings that are legal and seldom meant."""
    rollout, train = config.rollout, config.train
    corrected = rollout.mask_offpolicy_in_partial_rollout or train.use_tis or train.use_rollout_logprobs
    if rollout.partial_rollout and not corrected and train.loss_type != SFT_LOSS:
        return [
            "partial_rollout trains on tokens of older weights as if the present ones had made them; "
            "mask_offpolicy_in_partial_rollout leaves them out, use_tis weighs them"
        ]
    return []


def _over_sampling(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    over, batch = rollout.over_sampling_batch_size, rollout.rollout_batch_size
    if 0 < over < batch:
        yield conflict(
            f"over_sampling_batch_size = {over} is below rollout_batch_size = {batch}",
            [OVER, BATCH],
            why="it is how many prompts are in flight, and a step takes rollout_batch_size of them",
            fix=f"set over_sampling_batch_size above {batch}, or to 0",
        )
    if over <= batch:
        return
    if rollout.max_staleness:
        yield conflict(
            f"over_sampling_batch_size = {over} with max_staleness = {rollout.max_staleness}",
            [OVER, "rollout.max_staleness"],
            why="a collector that runs ahead is never held up by one slow group, and has no surplus to stop",
            fix="--max-staleness 0   or   --over-sampling-batch-size 0",
        )
    if rollout.rollout_function_path:
        reason = "a function that makes the whole rollout decides itself how many prompts it tries"
        yield _either(OVER, "rollout.rollout_function_path", why=reason)


def _partial(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.partial_rollout and rollout.over_sampling_batch_size <= rollout.rollout_batch_size:
        yield conflict(
            "partial_rollout without over-sampling",
            ["rollout.partial_rollout", OVER],
            why="a step that waits for all its prompts leaves nothing unfinished",
            fix=f"set over_sampling_batch_size above rollout_batch_size = {rollout.rollout_batch_size}",
        )
    if rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout:
        yield conflict(
            "mask_offpolicy_in_partial_rollout without partial_rollout",
            ["rollout.mask_offpolicy_in_partial_rollout", "rollout.partial_rollout"],
            why="no response is continued",
            fix="--partial-rollout   or leave the mask out",
        )


def _dynamic(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.dynamic_sampling == "off":
        return
    sizes = [task.n_samples_per_prompt or rollout.n_samples_per_prompt for task in config.data.tasks]
    if 1 in (sizes or [rollout.n_samples_per_prompt]):
        yield conflict(
            "dynamic_sampling = equal_rewards with n_samples_per_prompt = 1",
            [DYNAMIC, "rollout.n_samples_per_prompt"],
            why="the rewards of a group of one are all equal, so every group would be dropped",
            fix="set n_samples_per_prompt to 2 or more, or dynamic_sampling to off",
        )
    if rollout.rollout_function_path:
        reason = "a function that makes the whole rollout judges and filters its own groups"
        yield _either(DYNAMIC, "rollout.rollout_function_path", why=reason)


def _rewards(config: Config) -> Iterator[Problem]:
    reward, limit = config.reward, config.rollout.rollout_max_response_len
    if reward.overlong_buffer_len > limit:
        yield conflict(
            f"overlong_buffer_len = {reward.overlong_buffer_len} is more than rollout_max_response_len = {limit}",
            ["reward.overlong_buffer_len", "rollout.rollout_max_response_len"],
            why="the punishment grows over the last overlong_buffer_len tokens of a longest response",
            fix=f"set overlong_buffer_len to at most {limit}; a fifth of it is usual",
        )
    if reward.reward_terms_normalize and not reward.reward_weights:
        yield conflict(
            "reward_terms_normalize without reward_weights",
            ["reward.reward_terms_normalize", "reward.reward_weights"],
            why="nothing says which terms are normalised and added",
            fix="name them: reward_weights = { correct = 1.0, format = 0.2 }",
        )


def _conflicts_of_debugging(config: Config) -> Iterator[Problem]:
    """Debug settings that cannot hold together."""
    rollout = config.rollout
    if rollout.debug_rollout_only and rollout.debug_train_only:
        yield conflict(
            "debug_rollout_only and debug_train_only are both set",
            [ROLLOUT, TRAIN],
            why="one leaves training out, the other rolling out; nothing would be left",
            fix="--no-debug-rollout-only   or   --no-debug-train-only",
        )
    elif rollout.debug_train_only and not rollout.load_debug_rollout_data:
        yield conflict(
            "debug_train_only has nothing to train on",
            [TRAIN, LOAD],
            why="without an engine, rollouts come from files",
            fix="name a dump: --load-debug-rollout-data DIR   (a run writes one with --save-debug-rollout-data DIR)",
        )
    if rollout.debug_rollout_only and rollout.load_debug_rollout_data:
        yield _either(ROLLOUT, LOAD, why="nothing would be rolled out and nothing trained")
    if rollout.save_debug_rollout_data and rollout.load_debug_rollout_data:
        yield _either(SAVE, LOAD, why="what would be written is what was read")
    if rollout.load_debug_rollout_data and rollout.rollout_buffer_url:
        yield _either(LOAD, "rollout.rollout_buffer_url", why="each says where rollouts come from")
    for key, value in ((SAVE, rollout.save_debug_rollout_data), (LOAD, rollout.load_debug_rollout_data)):
        if "{" in value or value.endswith((".pt", ".pkl")):
            yield conflict(
                f"{key.split('.')[1]} = {value} is a file's name, not a folder",
                [key],
                code="CFG03",
                why="a dump is a folder with a file a step, step-000001.rollout, and never a pickle",
                fix=f"--{key.split('.')[1].replace('_', '-')} DIR",
            )


def _notices_of_debugging(config: Config) -> list[str]:
    """Sentences about debug settings that are legal and seldom meant."""
    rollout, evaluation = config.rollout, config.eval
    if rollout.debug_train_only and (evaluation.eval_prompt_data or evaluation.eval_tasks):
        return ["debug_train_only has no engine: evaluation sets are left out"]
    if rollout.debug_rollout_only and not rollout.save_debug_rollout_data:
        return ["debug_rollout_only without save_debug_rollout_data: the ledger alone keeps the samples"]
    return []


def _conflicts_of_evaluation(config: Config) -> Iterator[Problem]:
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


def _notices_of_evaluation(config: Config) -> Iterator[str]:
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
