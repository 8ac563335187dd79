"""Written as for THUDM/slime, in the shape of its search example: text in, tools between turns, exact match."""

import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

CONFIG = {"max_turns": 3, "return_logprob": True}
LIBRARY = {"capital of france": "paris"}


async def search(query):
    return LIBRARY.get(query.strip(), "nothing")


async def act(text):
    found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
    if found is None:
        return "try again\n", False
    if found.group(1) == "answer":
        return "", True
    return f"\n<info>{await search(found.group(2))}</info>\n", False


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "partial rollout is not supported"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = sample.prompt
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs = "", [], [], []
    for _ in range(CONFIG["max_turns"]):
        payload = {"text": prompt + response, "sampling_params": sampling_params}
        if CONFIG["return_logprob"]:
            payload["return_logprob"] = True
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        text = output["text"]
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        response += text
        response_ids += ids
        loss_mask += [1] * len(ids)
        if output["meta_info"]["finish_reason"]["type"] == "length":
            break
        observation, done = await act(text)
        if done:
            break
        observed = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response += observation
        response_ids += observed
        loss_mask += [0] * len(observed)
        log_probs += [0.0] * len(observed)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("sample must be a Sample")
    found = re.findall(r"<answer>(.*?)</answer>", sample.prompt + sample.response)
    return float(bool(found) and found[-1].strip() == sample.label["ground_truth"])
