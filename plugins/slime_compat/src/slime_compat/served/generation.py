"""Part of `slime.rollout.sglang_rollout`: its state object, and generation of a sample or group by `/generate`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from slime_compat.http import post
from slime_compat.served.http import get_rollout_num_engines
from slime_compat.served.processing import PictureProcessor, encode_image_for_rollout_engine, load_processor
from slime_compat.served.rewards import async_rm, batched_async_rm
from slime_compat.served.sample_hooks import apply_rollout_sample_hooks
from slime_core.compat import owners
from slime_core.compat.sample import Sample
from slime_core.plugins.boundary import together
from slime_core.plugins.locate import locate
from slime_core.rollout.groups import training_params
from slime_core.types import Status


class GenerateState:
    """One a run: what all generation shares. ``sampling_params`` are training's, without a seed.

    ``pendings`` are the tasks of groups, ``remaining_batch_size`` the groups in flight or kept; ``aborted`` keeps
    further samples from being generated, until :meth:`reset`.
    """

    args: Any
    tokenizer: Any
    sampling_params: dict[str, Any]

    def __new__(cls, args: Any) -> GenerateState:
        session = args._session
        if session.state is None:
            session.state = super().__new__(cls)
            session.state._start(args)
        return session.state  # type: ignore[no-any-return]

    def _start(self, args: Any) -> None:
        ctx = args._ctx
        if ctx is None or ctx.tokenizer is None:
            raise RuntimeError("GenerateState needs the run's tokenizer; there is none in this hook")
        self.args, self.tokenizer = args, ctx.tokenizer
        self.sampling_params = owners.sampling_params(training_params(ctx.config), ctx.config, 0)
        del self.sampling_params["sampling_seed"]
        self.group_sampling_seeds = [args.rollout_seed + number for number in range(args.n_samples_per_prompt)]
        self.worker: Any = None  # of `slime.rollout.fully_async_rollout`
        self.dp_counts, self.dp_rank = [0] * args.sglang_dp_size, 0
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self.reset()

    @cached_property
    def processor(self) -> Any:
        """The model's processor of images and videos; None where it has none."""
        media = self.args._ctx.media
        if media is not None:
            return PictureProcessor(self.tokenizer, media)
        return load_processor(self.args.hf_checkpoint) if self.args.hf_checkpoint else None

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """As many generations as the engines serve at once; one semaphore an event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            self._semaphores[loop] = asyncio.Semaphore(concurrency(self.args))
        return self._semaphores[loop]

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The block in which a data-parallel rank of the engine serves one more: the rank that serves the fewest."""
        rank = self.dp_rank = self.dp_counts.index(min(self.dp_counts))
        self.dp_counts[rank] += 1
        try:
            yield rank
        finally:
            self.dp_counts[rank] -= 1

    def reset(self) -> None:
        """Forget tasks, and an abort."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[list[Any]]] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Start a task for each group, in the running event loop."""
        for group in samples:
            self.pendings.add(asyncio.create_task(generate_and_rm_group(self.args, group, dict(self.sampling_params))))
        self.remaining_batch_size += len(samples)


def concurrency(args: Any) -> int:
    """Requests that the run's engines serve at once."""
    return int(args.sglang_server_concurrency) * get_rollout_num_engines(args)


def get_model_url(args: Any, name: str = "", endpoint: str = "/generate") -> str:
    """The address of the run's engine; there is one model."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def require_text(sample: Sample, *kinds_accepted: str) -> None:
    """Refuse media of other kinds than ``kinds_accepted``.

    Raises:
        ValueError: the sample has some.
    """
    if kinds := [
        kind for kind, media in (sample.multimodal_inputs or {}).items() if media and kind not in kinds_accepted
    ]:
        accepted = " and ".join(("text", *kinds_accepted))
        raise ValueError(
            f"sample {sample.id} has {', '.join(kinds)}, and the model takes {accepted}: take multimodal_keys away"
        )


def _prepare_prompt_ids(sample: Sample, tokenizer: Any, processor: Any = None) -> list[int]:
    """The sample's tokens, or those of its prompt where it has none; its pictures' arrays are set where they are not.

    Raises:
        ValueError: media that the model does not take.
    """
    images = (sample.multimodal_inputs or {}).get("images")
    if not images or processor is None:
        require_text(sample)
        return sample.tokens or list(tokenizer.encode(sample.prompt, add_special_tokens=False))
    require_text(sample, "images")
    if sample.tokens and sample.multimodal_train_inputs is not None:
        return sample.tokens
    output = processor(text=sample.prompt, images=images)
    if sample.multimodal_train_inputs is None:
        arrays = {name: value for name, value in output.items() if name not in ("input_ids", "attention_mask")}
        sample.multimodal_train_inputs = arrays
    return [int(token) for token in output["input_ids"][0]]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One model turn: continue the sample's tokens (or its prompt's) and append what came.

    Tokens of an earlier turn count for ``max_new_tokens``; where none is left the sample is truncated.
    """
    state = GenerateState(args)
    if sample.status not in (Status.PENDING, Status.ABORTED):
        raise ValueError(f"sample {sample.id} is {sample.status}; only pending and aborted samples are generated")
    sample.tokens = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    params = {**sampling_params, "max_new_tokens": sampling_params["max_new_tokens"] - sample.response_length}
    if params["max_new_tokens"] <= 0:
        sample.status = Status.TRUNCATED
        return sample
    payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    payload["return_routed_experts"] = args.use_rollout_routing_replay
    if images := (sample.multimodal_inputs or {}).get("images"):
        payload["image_data"] = [encode_image_for_rollout_engine(image) for image in images]
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
    return sample


async def generate_and_rm(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Generate one sample (by ``custom_generate_function_path`` where set), call the sample hooks, and judge it.

    A sample that is complete stays as it is. The draw is keyed by the sample, as where the core generates it.
    """
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (Status.COMPLETED, Status.TRUNCATED):
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Status.ABORTED
            return sample
        with state.dp_rank_context(), _call(args, sample, sampling_params) as params:
            output = await _generated(args, sample, params, evaluation)
    output = await apply_rollout_sample_hooks(args, output, evaluation=evaluation)
    if not args.group_rm:
        await _judge(args, output)
    return output


async def _generated(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
    path = sample.generate_function_path or args.custom_generate_function_path
    if not path:
        return await generate(args, sample, sampling_params)
    fn = locate(path, "custom_generate_function_path")
    offered = {"evaluation": evaluation} if "evaluation" in inspect.signature(fn).parameters else {}
    return await fn(args, sample, sampling_params, **offered)


@contextmanager
def _call(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The parameters of a sample's requests, keyed by the sample unless it has no name or they have a key already."""
    if "sampling_seed" in sampling_params or not sample.id:
        yield sampling_params
        return
    with args._session.call(sample, args._ctx) as call:
        yield {**sampling_params, "sampling_seed": call.seed}


async def _judge(args: Any, output: Any) -> None:
    """Set the rewards of one sample, or of the list that one generate call returned, unless it was aborted."""
    samples = output if isinstance(output, list) else [output]
    unjudged = [sample for sample in samples if sample.reward is None]
    if not unjudged or any(sample.status is Status.ABORTED for sample in samples):
        return
    many = isinstance(output, list)
    rewards = await batched_async_rm(args, unjudged) if many else [await async_rm(args, output)]
    for sample, reward in zip(unjudged, rewards, strict=True):
        sample.reward = reward


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """A whole group, side by side; with ``group_rm`` it is judged as one. After an abort it stays as it is."""
    state = GenerateState(args)
    if state.aborted:
        return group
    results = await together(generate_and_rm(args, sample, dict(sampling_params), evaluation) for sample in group)
    if args.group_rm and not state.aborted:
        for sample, reward in zip(results, await batched_async_rm(args, results), strict=True):
            sample.reward = reward
    return results


__all__ = [
    "GenerateState",
    "_prepare_prompt_ids",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "get_model_url",
]
