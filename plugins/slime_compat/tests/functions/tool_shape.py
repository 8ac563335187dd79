"""Written as for THUDM/slime, in the shape of its tool example: ids in, attributes of its own, a dict as reward."""

import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

ENDS = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED, "stop": Sample.Status.COMPLETED}
TURNS = 4


def context_of(args):
    return args.rollout_max_context_len or args.context_parallel_size * args.max_tokens_per_gpu


def sum_of(text):
    """The sum that a turn's code asks for, as the tool prints it; None without code."""
    code = re.search(r"<code>(\d+)\+(\d+)</code>", text)
    return code and f"<out>{int(code[1]) + int(code[2])}</out>"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    tokenizer = GenerateState(args).tokenizer
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    tokens, log_probs, mask = [], [], []  # of the response
    sample.tool_call_count, status = 0, None
    for _ in range(TURNS):
        if len(prompt) + len(tokens) >= context_of(args):
            status = Sample.Status.TRUNCATED
            break
        request = {"input_ids": prompt + tokens, "sampling_params": sampling_params, "return_logprob": True}
        meta = (await post(url, request))["meta_info"]
        status = ENDS[meta["finish_reason"]["type"]]
        if status is Sample.Status.ABORTED:
            break
        turn = [entry[1] for entry in meta["output_token_logprobs"]]
        tokens += turn
        log_probs += [entry[0] for entry in meta["output_token_logprobs"]]
        mask += [1] * len(turn)
        output = sum_of(tokenizer.decode(turn)) if status is Sample.Status.COMPLETED else None
        if output is None:
            break
        sample.tool_call_count += 1
        observed = tokenizer(output, add_special_tokens=False)["input_ids"]
        tokens += observed
        log_probs += [0.0] * len(observed)
        mask += [0] * len(observed)
    sample.tokens, sample.response_length, sample.response = prompt + tokens, len(tokens), tokenizer.decode(tokens)
    sample.loss_mask, sample.rollout_log_probs, sample.status = mask, log_probs, status
    sample.payload_text = sample.prompt + sample.response
    return sample


async def reward_func(args, sample, **kwargs):
    assert isinstance(sample, Sample)
    correct = sample.response.endswith(f"={sample.label or ''}")
    return {"score": 2.0 * correct - 1.0, "calls": getattr(sample, "tool_call_count", 0), "pred": sample.response}
