"""`slime.rollout.sglang_rollout`: its state object, and generation of a sample or group over the loopback server."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from slime_compat.http import post
from slime_compat.served.rewards import async_rm, batched_async_rm
from slime_core.compat import owners
from slime_core.compat.sample import FINISH, Sample
from slime_core.plugins.boundary import together
from slime_core.plugins.locate import locate
from slime_core.rollout.groups import training_params
from slime_core.types import Status


class GenerateState:
    """One a run: ``tokenizer``, ``processor``, ``semaphore``, ``sampling_params``."""

    args: Any
    tokenizer: Any
    processor: Any
    semaphore: asyncio.Semaphore
    sampling_params: dict[str, Any]
    aborted: bool

    def __new__(cls, args: Any) -> GenerateState:
        session = args._session
        if session.state is None:
            state = super().__new__(cls)
            ctx = args._ctx
            if ctx is None or ctx.tokenizer is None:
                raise RuntimeError("GenerateState needs the run's tokenizer; there is none in this hook")
            state.args, state.tokenizer, state.processor = args, ctx.tokenizer, None
            state.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
            state.sampling_params = owners.sampling_params(training_params(ctx.config), 0)
            del state.sampling_params["sampling_seed"]
            state.aborted = False
            session.state = state
        return session.state  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Forget an abort."""
        self.aborted = False


def get_model_url(args: Any, name: str = "", endpoint: str = "/generate") -> str:
    """The address of the run's engine; there is one model."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One model turn: continue the sample's tokens (or its prompt's) and append what came."""
    state = GenerateState(args)
    if sample.status not in (Status.PENDING, Status.ABORTED):
        raise ValueError(f"sample {sample.id} is {sample.status}; only pending and aborted samples are generated")
    if not sample.tokens:
        sample.tokens = list(state.tokenizer.encode(sample.prompt, add_special_tokens=False))
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    answer = await post(get_model_url(args), payload)
    meta = answer["meta_info"]
    token_rows = meta["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in token_rows],
        log_probs=[item[0] for item in token_rows],
        meta_info=meta,
        text=answer["text"],
    )
    sample.status = FINISH[meta["finish_reason"]["type"]]
    return sample


async def generate_and_rm(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Generate one sample (by ``custom_generate_function_path`` where set) and judge it."""
    path = sample.generate_function_path or args.custom_generate_function_path
    output: Any
    if path:
        fn = locate(path, "custom_generate_function_path")
        offered = {"evaluation": evaluation} if "evaluation" in inspect.signature(fn).parameters else {}
        output = await fn(args, sample, sampling_params, **offered)
    else:
        output = await generate(args, sample, sampling_params)
    if args.group_rm:
        return output
    if isinstance(output, list):
        open_ones = [item for item in output if item.reward is None]
        for item, reward in zip(open_ones, await batched_async_rm(args, open_ones), strict=True):
            item.reward = reward
    elif output.reward is None and output.status is not Status.ABORTED:
        output.reward = await async_rm(args, output)
    return output


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """A whole group, side by side; with ``group_rm`` it is judged as one."""
    results = await together(generate_and_rm(args, sample, dict(sampling_params), evaluation) for sample in group)
    if args.group_rm:
        for sample, reward in zip(results, await batched_async_rm(args, results), strict=True):
            sample.reward = reward
    return results


__all__ = ["GenerateState", "generate", "generate_and_rm", "generate_and_rm_group", "get_model_url"]
