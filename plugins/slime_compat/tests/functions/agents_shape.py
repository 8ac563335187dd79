"""Written as for THUDM/slime, in the shape of its multi-agent example: args changed, copied and fanned out."""

import asyncio
import random
from copy import deepcopy

from slime.rollout.rm_hub import batched_async_rm
from slime.utils.http_utils import post
from slime.utils.misc import load_function
from slime.utils.types import Sample
from transformers import AutoTokenizer

SETTINGS = {"custom_agents_function_path": "agents_shape.run_agents", "num_parallel": 3, "weight": 0.5}


async def ask(args, text, role):
    sample = deepcopy(args.sample)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    ids = args.tokenizer(text, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": ids, "sampling_params": args.sampling_params, "return_logprob": True}
    output = await post(url, payload)
    rows = output["meta_info"]["output_token_logprobs"]
    sample.prompt, sample.tokens = text, ids + [row[1] for row in rows]
    sample.response, sample.response_length = output["text"], len(rows)
    sample.rollout_log_probs = [row[0] for row in rows]
    sample.loss_mask = [1] * len(rows)
    sample.status = Sample.Status.TRUNCATED
    args.results[role].append(sample)
    return output["text"]


async def run_agents(args, sample):
    args = deepcopy(args)
    args.sample, args.results = sample, {"solver": [], "judge": []}
    texts = await asyncio.gather(*(ask(args, sample.prompt, "solver") for _ in range(args.num_parallel)))
    await ask(args, f"{sample.prompt}{texts[0][:2]}", "judge")
    for samples in args.results.values():
        for item, reward in zip(samples, await batched_async_rm(args, samples), strict=False):
            item.reward = reward * args.weight
            item.rollout_id = sample.index
    return args.results["solver"] + args.results["judge"]


async def generate(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    limit = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
    keys = {"sampling_params": sampling_params, "rollout_max_context_len": limit, "tokenizer": tokenizer, **SETTINGS}
    for name in keys:
        setattr(args, name, keys[name])
    rollouts = await load_function(args.custom_agents_function_path)(args, sample)
    return random.sample(rollouts, len(rollouts))


async def reward_func(args, samples, **kwargs):
    return [float(len(sample.response)) for sample in samples]
