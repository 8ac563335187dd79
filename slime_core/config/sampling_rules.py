"""Rules about which samples train: over-sampling, partial rollout, dynamic sampling, reward terms, overlong responses.

Supervised stages, which generate and judge nothing, are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime_core.config.problems import Problem, conflict

if TYPE_CHECKING:
    from slime_core.config.schema import Config

SFT_LOSS = "sft_loss"
OVER, BATCH = "rollout.over_sampling_batch_size", "rollout.rollout_batch_size"


def conflicts(config: Config) -> Iterator[Problem]:
    """Settings of sampling control that cannot hold together."""
    if config.train.loss_type == SFT_LOSS:
        return
    yield from _over_sampling(config)
    yield from _partial(config)
    yield from _dynamic(config)
    yield from _rewards(config)


def notices(config: Config) -> list[str]:
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
        yield conflict(
            "over_sampling_batch_size with rollout_function_path",
            [OVER, "rollout.rollout_function_path"],
            why="a function that makes the whole rollout decides itself how many prompts it tries",
            fix="remove one of them",
        )


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
    keys = ["rollout.dynamic_sampling"]
    sizes = [task.n_samples_per_prompt or rollout.n_samples_per_prompt for task in config.data.tasks]
    if 1 in (sizes or [rollout.n_samples_per_prompt]):
        yield conflict(
            "dynamic_sampling = equal_rewards with n_samples_per_prompt = 1",
            [*keys, "rollout.n_samples_per_prompt"],
            why="the rewards of a group of one are all equal, so every group would be dropped",
            fix="set n_samples_per_prompt to 2 or more, or dynamic_sampling to off",
        )
    if rollout.rollout_function_path:
        yield conflict(
            "dynamic_sampling with rollout_function_path",
            [*keys, "rollout.rollout_function_path"],
            why="a function that makes the whole rollout judges and filters its own groups",
            fix="remove one of them",
        )


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
