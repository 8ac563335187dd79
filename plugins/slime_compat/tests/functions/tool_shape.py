"""Written as for THUDM/slime, in the shape of its tool example: ids in, attributes of its own, a dict as reward."""

import re

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "partial rollout is not supported"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_masks, calls = "", [], [], 0
    for _turn in range(4):
        if args.rollout_max_context_len is not None:
            limit = args.rollout_max_context_len
        else:
            limit = args.context_parallel_size * args.max_tokens_per_gpu
        if len(prompt_ids) + len(response_ids) >= limit:
            sample.status = Sample.Status.TRUNCATED
            break
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        text = state.tokenizer.decode(ids)
        if sample.rollout_log_probs is None:
            sample.rollout_log_probs = []
        sample.rollout_log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        response += text
        response_ids += ids
        loss_masks += [1] * len(ids)
        if output["meta_info"]["finish_reason"]["type"] == "length":
            break
        code = re.search(r"<code>(.*?)</code>", text)
        if code is None:
            break
        calls += 1
        left, right = code.group(1).split("+")
        observed = state.tokenizer(f"<out>{int(left) + int(right)}</out>", add_special_tokens=False)["input_ids"]
        response += state.tokenizer.decode(observed)
        response_ids += observed
        loss_masks += [0] * len(observed)
        sample.rollout_log_probs += [0.0] * len(observed)
        assert len(response_ids) == len(sample.rollout_log_probs)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    sample.payload_text = sample.prompt + response
    sample.tool_call_count = calls
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    truth = sample.label if sample.label is not None else ""
    right = sample.response.endswith(f"={truth}")
    return {"score": 1.0 if right else -1.0, "calls": getattr(sample, "tool_call_count", 0), "pred": sample.response}
