"""`slime.rollout.rm_hub`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from slime_compat.http import post
from slime_compat.served.grading_dapo import compute_score
from slime_compat.served.grading_deepscaler import get_deepscaler_rule_based_reward
from slime_compat.served.grading_f1 import f1_score
from slime_compat.served.grading_gpqa import compute_gpqa_reward
from slime_compat.served.grading_mathematics import extract_boxed_answer, grade_answer_verl
from slime_core.compat.sample import Sample
from slime_core.plugins.boundary import together
from slime_core.plugins.locate import locate

REMOTE_SECONDS = 120.0  # a try
REMOTE_WAIT = 30.0  # the longest between two


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """One sample's reward: ``sample.custom_rm_path``, ``args.custom_rm_path``, or by ``rm_type``.

    That of ``dapo`` is the dict of ``compute_score``.

    Raises:
        ValueError: neither is set.
        RuntimeError: a grader could not judge, such as a remote one that does not answer.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        value = locate(path, "custom_rm_path")(args, sample, **kwargs)
        return await value if inspect.isawaitable(value) else value
    name = sample.metadata.get("rm_type") or args.rm_type
    if not name:
        raise ValueError("no reward: set custom_rm_path or rm_type")
    if name in ("dapo", "boxed_dapo"):
        answer = sample.response if name == "dapo" else extract_boxed_answer(sample.response) or ""
        return compute_score(answer, sample.label)
    reward = await args._session.plugins.reward_by_type(str(name), sample, args._ctx)
    if reward.kind == "infra_error":
        raise RuntimeError(f"sample {sample.id} could not be judged by rm_type {name}: {reward.reason}")
    return reward.value


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> Any:
    """The rewards of several samples; ``custom_rm_path`` is called once, for all of them."""
    if args.custom_rm_path:
        value = locate(args.custom_rm_path, "custom_rm_path")(args, samples, **kwargs)
        return await value if inspect.isawaitable(value) else value
    return await together(async_rm(args, sample, **kwargs) for sample in samples)


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """What the reward model at ``args.rm_url`` answers for prompt, response and label; ``max_retries`` tries."""
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await post(args.rm_url, payload, max(max_retries - 1, 0), timeout=REMOTE_SECONDS, longest_wait=REMOTE_WAIT)


compute_score_dapo = compute_score
__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
]
