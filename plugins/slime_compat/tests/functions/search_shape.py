"""Written as for THUDM/slime, in the shape of its search example: text in, tools between turns, exact match."""

import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TURNS = 3
LIBRARY = {"capital of france": "paris"}
TAG = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


async def search(query):
    return LIBRARY.get(query.strip(), "nothing")


async def look_up(text):
    """What the environment says after a model's turn; None ends the dialogue."""
    tag = TAG.search(text)
    if tag is None:
        return "try again\n"
    return None if tag[1] == "answer" else f"\n<info>{await search(tag[2])}</info>\n"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    tokenizer = GenerateState(args).tokenizer
    sample.tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.loss_mask, sample.rollout_log_probs = [], []

    def extend(text, entries, trained):
        sample.response += text
        sample.tokens = sample.tokens + [token for _, token, *_ in entries]
        sample.rollout_log_probs += [log_prob for log_prob, *_ in entries]
        sample.loss_mask += [trained] * len(entries)
        sample.response_length += len(entries)

    for _ in range(TURNS):
        output = await post(
            f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
            {"text": sample.prompt + sample.response, "sampling_params": sampling_params, "return_logprob": True},
        )
        finish = output["meta_info"]["finish_reason"]["type"]
        if finish == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        extend(output["text"], output["meta_info"]["output_token_logprobs"], 1)
        sample.status = Sample.Status.TRUNCATED if finish == "length" else Sample.Status.COMPLETED
        observation = None if finish == "length" else await look_up(output["text"])
        if observation is None:
            break
        observed = tokenizer(observation, add_special_tokens=False)["input_ids"]
        extend(observation, [(0.0, token) for token in observed], 0)
    return sample


async def reward_func(args, sample, **kwargs):
    assert isinstance(sample, Sample)
    answers = [content for name, content in TAG.findall(sample.prompt + sample.response) if name == "answer"]
    return float(answers[-1:] == [sample.label["ground_truth"]])
