"""Written as for THUDM/slime, in the shape of its agent example: an adapter, a session by id, an agent over HTTP."""

import asyncio

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def agent(url, key, question):
    messages, headers = [{"role": "user", "content": question}], {"authorization": f"Bearer {key}"}
    for _ in range(2):
        answer = await post(f"{url}/v1/chat/completions", {"model": "m", "messages": messages}, headers=headers)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "more"}]


async def generate(args, base_sample: Sample, sampling_params, evaluation=False):
    adapter = OpenAIAdapter(
        tokenizer=GenerateState(args).tokenizer,
        sglang_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        tool_parser=getattr(args, "sglang_tool_call_parser", None) or None,
        reasoning_parser=getattr(args, "sglang_reasoning_parser", None) or None,
        fork_threshold_tokens=None,
    )
    runner = {"handler_cancellation": True, "access_log_class": FilteredAccessLogger}
    handle = run_app_in_thread(adapter.app, host="0.0.0.0", port=0, thread_name="adapter", runner_kwargs=runner)
    sid = base_sample.session_id = f"agent-{base_sample.index}-{base_sample.group_index}"
    adapter.open_session(sid, sampling_defaults=sampling_params, max_context_tokens=args.rollout_max_context_len or 0)
    try:
        await agent(f"http://127.0.0.1:{handle.port}", sid, base_sample.prompt)
        return await adapter.finish_session(
            sid, base_sample=base_sample, reward=0.5, extra_metadata={"grading_solved": False}
        )
    finally:
        await adapter.drop_session(sid, wait_timeout=30)
        await asyncio.to_thread(handle.stop)
