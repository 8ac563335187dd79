"""`slime.rollout.sglang_rollout`: generation, and whole rollouts and evaluations over a data source.

As the value of ``--rollout-function-path`` slime's default is left empty by the config: the core's own collector.
Called by a function of yours, :func:`generate_rollout` is this equivalent over the groups of the step.
"""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from slime_compat.served.asynchronous import run
from slime_compat.served.datasets import Dataset
from slime_compat.served.evaluation import EvalDatasetConfig, build_eval_dataset_configs
from slime_compat.served.filters import MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from slime_compat.served.generation import (
    GenerateState,
    _prepare_prompt_ids,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    get_model_url,
)
from slime_compat.served.processing import load_processor, load_tokenizer
from slime_compat.served.rollouts import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime_core.compat import owners
from slime_core.compat.rollouts import DataBuffer
from slime_core.compat.sample import Sample
from slime_core.plugins.boundary import together
from slime_core.plugins.locate import locate
from slime_core.rollout.groups import evaluation_params
from slime_core.types import Status

ONLY_SET = ("min_new_tokens", "repetition_penalty")
"""Settings of an evaluation set that a request has only where they are set; `/generate` refuses those that matter."""
GetSamples = Callable[[int], list[list[Sample]]]


def first_of(group: Sequence[Any]) -> Sample:
    """The first sample of a group, whose members may be lists of one rollout's samples."""
    first: Any = group[0]
    return first[0] if isinstance(first, list) else first  # type: ignore[no-any-return]


async def abort(args: Any, rollout_id: int) -> list[list[Sample]]:
    """End the groups in flight; with ``partial_rollout`` returns them, with ``start_rollout_id`` in their metadata.

    Samples that have not begun stay aborted. A request that an engine works at ends by itself.
    """
    state = GenerateState(args)
    state.aborted = True
    groups = [await task for task in state.pendings]
    state.pendings = set()
    if not args.partial_rollout:
        return []
    for sample in (sample for group in groups for sample in group if sample.response):
        sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: GetSamples
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """``rollout_batch_size`` groups that the dynamic filter keeps, by their index; and the groups that were aborted.

    Args:
        args: slime's.
        rollout_id: the step.
        data_source: ``get_samples``, asked for ``over_sampling_batch_size`` groups at a time.

    Raises:
        RuntimeError: the source ended before.
    """
    return await _collect(args, rollout_id, data_source, args.rollout_batch_size, args.over_sampling_batch_size)


async def _collect(
    args: Any, rollout_id: int, get_samples: GetSamples, target: int, count: int
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    state, drops = GenerateState(args), MetricGatherer()
    path = args.dynamic_sampling_filter_path
    dynamic_filter = locate(path, "dynamic_sampling_filter_path") if path else None
    groups: list[list[Sample]] = []
    try:
        while len(groups) < target:
            for group in await _completed(state, get_samples, target, count):
                verdict = call_dynamic_filter(dynamic_filter, args, group)
                sizes = {"remaining_batch_size": state.remaining_batch_size, "target_data_size": target}
                if not should_drop_dynamic_filter_output(verdict, **sizes):
                    groups.append(group)
                    continue
                drops.on_dynamic_filter_drop(verdict.reason)
                state.remaining_batch_size -= 1
        aborted = await abort(args, rollout_id)
    finally:
        state.reset()
    groups = sorted(groups[:target], key=lambda group: first_of(group).index or 0)
    if args.rollout_sample_filter_path:
        locate(args.rollout_sample_filter_path, "rollout_sample_filter_path")(args, groups)
    return RolloutFnTrainOutput(samples=groups, metrics=drops.collect()), aborted


async def _completed(state: GenerateState, get_samples: GetSamples, target: int, count: int) -> list[list[Sample]]:
    """The next groups to complete; before, ``count`` more begin until ``target`` are in flight or kept."""
    while state.remaining_batch_size < target:
        state.submit_generate_tasks(_next(get_samples, count, target))
    tasks, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
    return [task.result() for task in tasks]


def _next(get_samples: GetSamples, count: int, target: int) -> list[list[Sample]]:
    groups = get_samples(count)
    if not groups:
        raise RuntimeError(
            f"the data source ended before the filter kept {target} groups; a rollout function of yours gets the "
            "groups of one step. To replace groups that the filter drops, set rollout_function_path to "
            "slime.rollout.sglang_rollout.generate_rollout, which is the core's own collector"
        )
    return groups


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[list[Sample]]]:
    """``rewards``, ``truncated`` and ``samples`` of each evaluation set of ``args``, and no aborted groups."""
    sets = build_eval_dataset_configs(args, [vars(item) for item in args.eval_datasets], {})
    results = await together(eval_rollout_single_dataset(args, rollout_id, dataset_cfg) for dataset_cfg in sets)
    return RolloutFnEvalOutput(data={name: part for result in results for name, part in result.items()}), []


async def eval_rollout_single_dataset(
    args: Any, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, list[Any]]]:
    """``rewards``, ``truncated`` and ``samples`` of one set, read from its file."""
    dataset = Dataset(
        dataset_cfg.path,
        tokenizer=load_tokenizer(args.hf_checkpoint) if args.hf_checkpoint else GenerateState(args).tokenizer,
        processor=load_processor(args.hf_checkpoint) if args.hf_checkpoint else None,
        max_length=args.eval_max_prompt_len,
        prompt_key=dataset_cfg.input_key or args.input_key,
        label_key=dataset_cfg.label_key,
        multimodal_keys=dataset_cfg.multimodal_keys,
        metadata_key=dataset_cfg.metadata_key or args.metadata_key,
        tool_key=dataset_cfg.tool_key,
        apply_chat_template=bool(dataset_cfg.apply_chat_template),
        apply_chat_template_kwargs=dataset_cfg.apply_chat_template_kwargs,
    )
    samples: list[Sample] = []
    for prompt in dataset.samples:
        for _ in range(dataset_cfg.n_samples_per_eval_prompt or 1):
            sample = copy.deepcopy(prompt)
            sample.index, sample.id = len(samples), f"{dataset_cfg.name}/{len(samples)}"
            sample.metadata = dataset_cfg.inject_metadata(sample.metadata)
            sample.custom_rm_path = dataset_cfg.custom_rm_path
            sample.generate_function_path = dataset_cfg.custom_generate_function_path
            samples.append(sample)
    return {dataset_cfg.name: await _evaluated(args, samples, _sampling(args, dataset_cfg))}


def _sampling(args: Any, dataset_cfg: EvalDatasetConfig) -> dict[str, Any]:
    skip = dataset_cfg.skip_special_tokens
    return {
        "temperature": dataset_cfg.temperature,
        "top_p": dataset_cfg.top_p,
        "top_k": dataset_cfg.top_k,
        "max_new_tokens": dataset_cfg.max_response_len,
        "stop": dataset_cfg.stop,
        "stop_token_ids": dataset_cfg.stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens if skip is None else skip,
        "no_stop_trim": True if dataset_cfg.no_stop_trim is None else dataset_cfg.no_stop_trim,
        "spaces_between_special_tokens": False,
        **{name: value for name in ONLY_SET if (value := getattr(dataset_cfg, name)) is not None},
    }


async def _evaluated(args: Any, samples: list[Sample], sampling_params: dict[str, Any]) -> dict[str, list[Any]]:
    """Generate and judge a set's samples, and put what slime reports of them together."""
    if args.group_rm:
        raise RuntimeError("group_rm judges groups of training; an evaluation judges sample by sample")
    results = await together(generate_and_rm(args, sample, dict(sampling_params), True) for sample in samples)
    flat = [sample for result in results for sample in (result if isinstance(result, list) else [result])]
    key = args.eval_reward_key or args.reward_key
    return {
        "rewards": [sample.reward[key] if key else sample.reward for sample in flat],
        "truncated": [sample.status is Status.TRUNCATED for sample in flat],
        "samples": flat,
    }


async def _evaluate_issued(args: Any, groups: list[list[Sample]]) -> RolloutFnEvalOutput:
    """The evaluation's own samples, which the core has issued, by the name of their set."""
    by_set: defaultdict[str, list[Sample]] = defaultdict(list)
    for group in groups:
        by_set[group[0].task] += group
    params = owners.sampling_params(args._ctx.sampling or evaluation_params(args._ctx.config), args._ctx.config, 0)
    del params["sampling_seed"]
    parts = await together(_evaluated(args, samples, params) for samples in by_set.values())
    return RolloutFnEvalOutput(data=dict(zip(by_set, parts, strict=True)))


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """A step's rollout over a data source, or an evaluation; aborted groups go back into the source.

    Of the groups that the core issued for a step none is left out, over-sampled ones included.
    """
    issued = len(data_source) if isinstance(data_source, DataBuffer) else 0
    if evaluation:
        evaluated = _evaluate_issued(args, data_source.get_samples(issued)) if issued else None
        return run(evaluated) if evaluated else run(eval_rollout(args, rollout_id))[0]

    def rest(count: int) -> list[list[Sample]]:
        return data_source.get_samples(min(count, len(data_source)))  # type: ignore[no-any-return]

    if issued:
        output, aborted = run(_collect(args, rollout_id, rest, issued, issued))
    else:
        output, aborted = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    if aborted:
        data_source.add_samples(aborted)
    return output


__all__ = [
    "GenerateState",
    "_prepare_prompt_ids",
    "abort",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
]
