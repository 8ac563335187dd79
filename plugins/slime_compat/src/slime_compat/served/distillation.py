"""`slime.rollout.on_policy_distillation`: a teacher behind HTTP scores the student's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_compat.http import post
from slime_compat.served.generation import require_text
from slime_core.compat.sample import Sample


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """What the teacher at ``args.rm_url``, an SGLang `/generate`, says of a sample's tokens: their log-probs.

    Raises:
        ValueError: no ``rm_url``, or a sample with images.
    """
    if not args.rm_url:
        raise ValueError("args.rm_url is not set: give the teacher's address, --rm-url http://HOST:PORT/generate")
    require_text(sample)
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return await post(args.rm_url, payload)


def post_process_rewards(args: Any, samples: Sequence[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Set each sample's ``teacher_log_probs``, a response token each, from its teacher's answer; rewards are 0.

    What trains is the distance to the teacher: set ``opd_kl_coef``, or the estimator on_policy_distillation.
    """
    for sample in samples:
        answer = sample.get_reward_value(args)
        log_probs = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]]
        sample.teacher_log_probs = log_probs[len(log_probs) - sample.response_length :]
    return [0.0] * len(samples), [0.0] * len(samples)


__all__ = ["post_process_rewards", "reward_func"]
