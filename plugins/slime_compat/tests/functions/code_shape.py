"""Written as for THUDM/slime, in the shape of its code-tool example: one list of masks, a grader of the hub."""

from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.rollout_top_p_token_ids = None
    sample.response, sample.response_length, sample.loss_mask = "", 0, []
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    response, response_ids, loss_masks, calls = "", [], sample.loss_mask, 0
    limit = args.rollout_max_context_len or args.context_parallel_size * args.max_tokens_per_gpu
    for _turn in range(3):
        room = limit - len(prompt_ids) - len(response_ids)
        params = {**sampling_params, "max_new_tokens": min(sampling_params["max_new_tokens"], room)}
        output = await post(
            url, {"input_ids": prompt_ids + response_ids, "sampling_params": params, "return_logprob": True}
        )
        rows = output["meta_info"]["output_token_logprobs"]
        ids = [row[1] for row in rows]
        response += state.tokenizer.decode(ids)
        response_ids += ids
        sample.append_response_tokens(
            args,
            tokens=ids,
            log_probs=[row[0] for row in rows],
            trainable=True,
            meta_info=output["meta_info"],
        )
        observed = state.tokenizer("\nAnswer: 7\n", add_special_tokens=False)["input_ids"]
        response_ids += observed
        response += state.tokenizer.decode(observed)
        sample.append_response_tokens(args, tokens=observed, trainable=False)
        assert len(response_ids) == len(sample.rollout_log_probs)
        calls += 1
    sample.tokens = prompt_ids + response_ids
    sample.response_length, sample.response, sample.loss_mask = len(response_ids), response, loss_masks
    sample.tool_call_count = calls
    sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    result = compute_score(sample.prompt + sample.response, str(sample.label), strict_box_verify=False)
    return {**result, "pred": result["pred"] or "", "calls": sample.tool_call_count}
