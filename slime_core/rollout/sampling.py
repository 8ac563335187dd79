"""The config's sampling parameters, for training and for evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.types import SamplingParams

if TYPE_CHECKING:
    from slime_core.config.schema import Config


def training_params(config: Config) -> SamplingParams:
    """How training samples are drawn, before `slime_sampling` has its say."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )


def evaluation_params(config: Config) -> SamplingParams:
    """How evaluation samples are drawn, before `slime_sampling` has its say."""
    return SamplingParams(
        max_new_tokens=config.eval.eval_max_response_len or config.rollout.rollout_max_response_len,
        temperature=config.eval.eval_temperature,
        top_p=config.eval.eval_top_p,
        top_k=config.eval.eval_top_k,
        stop=config.rollout.rollout_stop,
        stop_token_ids=config.rollout.rollout_stop_token_ids,
    )
