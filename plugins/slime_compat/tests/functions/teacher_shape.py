"""Written as for THUDM/slime, in the shape of its distillation: a teacher's answer as reward, split up afterwards."""

import torch
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def reward_func(args, sample, **kwargs):
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"temperature": args.rollout_temperature, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return await post(args.rm_url, payload)


def post_process_rewards(args, samples: list[Sample], **kwargs):
    answers = [sample.get_reward_value(args) for sample in samples]
    for sample, answer in zip(samples, answers, strict=True):
        rows = answer["meta_info"]["input_token_logprobs"][1:]
        sample.teacher_log_probs = torch.tensor([row[0] for row in rows])[-sample.response_length :]
    return [0.0] * len(samples), [0.0] * len(samples)
