"""Written as for THUDM/slime, in the shape of its own rollout: a loop that reads streams and ends with an abort."""

import asyncio
import json

from slime.backends.sglang_utils.server_control import abort_servers_until_idle
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, _prepare_prompt_ids
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.http_utils import get

from .rollout_shape import reward_func


async def generate(args, sample, sampling_params):
    state = GenerateState(args)
    sample.tokens = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True, "stream": True}
    prompt = list(sample.tokens)
    async with http_utils._http_client.stream("POST", url, json=payload, headers=None) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            meta = chunk["meta_info"]
            rows = meta["output_token_logprobs"]
            sample.tokens, sample.response, sample.response_length = list(prompt), "", 0
            sample.rollout_log_probs = sample.loss_mask = None
            sample.append_response_tokens(
                args,
                tokens=[row[1] for row in rows],
                log_probs=[row[0] for row in rows],
                trainable=True,
                meta_info=meta,
                text=chunk["text"],
                update_terminal_info=bool(meta.get("finish_reason")),
            )
    sample.reward = await reward_func(args, sample)
    return sample


async def collect(args, get_samples):
    params = GenerateState(args).sampling_params
    groups = get_samples(args.rollout_batch_size)
    for group in groups:
        await asyncio.gather(*(generate(args, sample, params.copy()) for sample in group))
    workers = (await get(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers"))["workers"]
    assert len(workers) == 1
    await abort_servers_until_idle([worker["url"] for worker in workers])
    return RolloutFnTrainOutput(samples=groups)


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    return run(collect(args, data_source.get_samples))
