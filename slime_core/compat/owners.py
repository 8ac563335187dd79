"""slime's functions in the place of owner hooks: reward, generate, rollout and data source."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime_core.compat import shapes
from slime_core.compat.sample import Sample, plain
from slime_core.compat.session import CompatSession
from slime_core.plugins.boundary import together
from slime_core.plugins.router import task_named
from slime_core.types import Group, Sample as CoreSample, SamplingParams, Status

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context

Function = Callable[..., Any]
FANNED = "_fanned_out"  # on samples that one generate call returned in a list
ANSWER = "reward_answer"  # in the metadata of samples: the dict that a reward function returned
READERS = (  # keys of functions that see such a dict as the reward
    "rollout.dynamic_sampling_filter_path",
    "rollout.rollout_sample_filter_path",
    "rollout.buffer_filter_path",
    "rollout.rollout_all_samples_process_path",
    "reward.custom_reward_post_process_path",
    "train.custom_convert_samples_to_train_data_path",
    "report.custom_rollout_log_function_path",
    "report.custom_eval_rollout_log_function_path",
)


def views(group: Group, ctx: Context) -> list[Sample]:
    """The group's samples as slime's, which take their places in the group."""
    return _in_place(group, [whole(sample, ctx) for sample in group.samples], ctx)


def with_pictures(samples: Sequence[Sample], ctx: Context) -> None:
    """Give samples decoded pictures in place of references: slime's functions read PIL's."""
    for sample in samples:
        if ctx.media is not None and sample.multimodal_inputs:
            sample.multimodal_inputs = ctx.media.pictures(sample.multimodal_inputs, f"sample {sample.id}")


def _in_place(group: Group, samples: Sequence[Sample], ctx: Context) -> list[Sample]:
    group.samples[:] = [_with_prompt(sample, ctx) for sample in samples]
    return group.samples  # type: ignore[return-value]


def whole(sample: CoreSample, ctx: Context) -> Sample:
    """``sample`` as slime's: a response that the core wrote becomes the text of all its tokens.

    What a function wrote stays, also where it is read from the ledger.
    """
    view, config = Sample.of(sample), ctx.config
    if view.response != view.cut_response or ctx.tokenizer is None:
        return view
    task = task_named(config, sample.task, ctx.evaluation)
    if not (config.rollout.custom_generate_function_path or (task and task.generate)):
        skip = config.rollout.rollout_skip_special_tokens
        view.response = str(ctx.tokenizer.decode(view.tokens[view.prompt_length :], skip_special_tokens=skip))
        view.whole_response = view.response
    return view


def cut(samples: Sequence[CoreSample]) -> None:
    """Give samples of :func:`whole` the core's response again, for functions not of slime's, unless it was changed."""
    for sample in samples:
        if isinstance(sample, Sample) and sample.cut_response is not None:
            sample.response = {sample.whole_response: sample.cut_response}.get(sample.response, sample.response)


def _with_prompt(sample: Sample, ctx: Context) -> Sample:
    """slime's prompt is the text that the model sees, where the chat template renders it."""
    if isinstance(sample.prompt, list) and ctx.config.data.apply_chat_template and ctx.tokenizer is not None:
        kwargs = ctx.config.data.apply_chat_template_kwargs
        sample.prompt = ctx.tokenizer.apply_chat_template(
            sample.prompt, tokenize=False, add_generation_prompt=True, **kwargs
        )
    return sample


def sampling_params(params: SamplingParams, config: Config, seed: int) -> dict[str, Any]:
    """The ``sampling_params`` that slime hands to a generate function."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "max_new_tokens": params.max_new_tokens,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids) or None,
        "skip_special_tokens": config.rollout.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": seed,
    }


def reward(fn: Function, session: CompatSession) -> Function:
    """`slime_reward` by ``reward(sample)``, ``reward(args, sample, **kw)`` or, for a group, ``(args, samples, **kw)``.

    The first, which is not slime's, reads the response as the core wrote it, without its stop string.
    A sample whose reward is set already keeps it. Siblings that one generate call returned are judged together.
    """

    plain, context = shapes.is_plain(fn), shapes.takes(fn, "ctx")

    def ask(ctx: Context, subject: Any) -> Any:
        if plain:
            return fn(subject, **({"ctx": ctx} if context else {}))
        return fn(session.args(ctx.config, ctx), subject)

    def slime_reward(group: Group, ctx: Context) -> Any:
        samples = _in_place(group, [*map(Sample.of, group.samples)], ctx) if plain else views(group, ctx)
        group_rm = ctx.config.reward.group_rm
        parts = [list(range(len(samples)))] if group_rm else _parts(group, samples)
        listed = [group_rm or len(part) > 1 for part in parts]
        subjects = [[samples[i] for i in part] if many else samples[part[0]] for part, many in zip(parts, listed)]
        answers = [ask(ctx, subject) for subject in subjects]
        if any(inspect.isawaitable(answer) for answer in answers):
            return _later(group, parts, answers, ctx)
        return _numbers(group, _spread(group, parts, answers, group_rm), ctx)

    async def slime_reward_async(group: Group, ctx: Context) -> Any:
        rewards = slime_reward(group, ctx)
        return await rewards if inspect.isawaitable(rewards) else rewards

    return slime_reward_async if inspect.iscoroutinefunction(fn) else slime_reward


async def _later(group: Group, parts: list[list[int]], answers: list[Any], ctx: Context) -> Any:
    return _numbers(group, _spread(group, parts, await together(answers), ctx.config.reward.group_rm), ctx)


def _numbers(group: Group, values: Any, ctx: Context) -> Any:
    cut(group.samples)
    if not isinstance(values, (list, tuple)) or len(values) != len(group.samples):
        return values
    return [note_answer(sample, value, ctx) for sample, value in zip(group.samples, values, strict=True)]


def note_answer(sample: CoreSample, value: Any, ctx: Context) -> Any:
    """``value``, kept with the sample where it is a dict that a later function reads.

    0 in its place, where it lacks ``reward_key`` and a function that post-processes rewards makes the number.
    """
    keys = (key.split(".") for key in READERS)
    if not isinstance(value, Mapping) or not any(getattr(getattr(ctx.config, part), name) for part, name in keys):
        return value
    sample.metadata[ANSWER] = dict(value)
    section = ctx.config.reward
    unnamed = section.custom_reward_post_process_path and not ctx.evaluation and section.reward_key not in value
    return 0.0 if unnamed else value


@contextmanager
def as_returned(samples: Sequence[CoreSample]) -> Iterator[None]:
    """The block in which samples have the rewards that their function returned: the dict, where it was one."""
    numbers = [(sample, sample.reward, sample.metadata[ANSWER]) for sample in samples if ANSWER in sample.metadata]
    for sample, _, answer in numbers:
        sample.reward = answer
    try:
        yield
    finally:
        for sample, number, answer in numbers:
            if sample.reward is answer:
                sample.reward = number
        cut(samples)


def _parts(group: Group, samples: Sequence[Sample]) -> list[list[int]]:
    """Indices of samples that are judged together, those without a reward alone."""
    parts: list[list[int]] = []
    for indices in group.rollouts.values():
        unjudged = [i for i in indices if samples[i].reward is None]
        fanned = len(unjudged) > 1 and all(getattr(samples[i], FANNED, False) for i in unjudged)
        parts += [unjudged] if fanned else [[i] for i in unjudged]
    return parts


def _spread(group: Group, parts: list[list[int]], answers: list[Any], group_rm: bool) -> Any:
    """The results as one list over the group; a result for the whole group is checked by the caller."""
    if group_rm:
        return answers[0]
    values: list[Any] = [sample.reward for sample in group.samples]
    for part, answer in zip(parts, answers, strict=True):
        if len(part) == 1:
            values[part[0]] = answer
            continue
        if not isinstance(answer, (list, tuple)) or len(answer) != len(part):
            raise ValueError(f"returned {answer!r} for the {len(part)} samples of one rollout; return a list of them")
        for index, value in zip(part, answer, strict=True):
            values[index] = value
    return values


async def _with_log_probs(sample: CoreSample, ctx: Context) -> CoreSample:
    """Log-probs for a function that kept none, where the engine can score them exactly: draws from the plain softmax.

    Elsewhere they stay unknown, and the border before training refuses the sample.
    """
    params, engine = ctx.sampling, ctx.engine
    if sample.rollout_log_probs is not None or params is None or engine is None or "score" not in engine.abilities:
        return sample
    count = sample.response_length
    if 0 < count < len(sample.tokens) and (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0):
        scored = await ctx.score(engine, sample, len(sample.tokens) - count)
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * count
        sample.rollout_log_probs = [float(value) if on else 0.0 for value, on in zip(scored, mask, strict=True)]
    return sample


def generate(fn: Function, session: CompatSession) -> Function:
    """`slime_generate` by ``generate(args, sample, sampling_params[, evaluation])``, a sample at a time.

    A list of samples in place of one is fan-out: its members share the rollout and the group's share of the loss. An
    empty list aborts the sample.
    """

    async def one(sample: Sample, ctx: Context) -> list[CoreSample]:
        if ctx.sampling is None or ctx.engine is None:
            raise RuntimeError("this context has no engine")
        served = ctx.engine.version
        with session.call(sample, ctx) as call:
            offered = shapes.accepted(fn, {"evaluation": ctx.evaluation}) if shapes.takes(fn, "evaluation") else {}
            arguments = (session.args(ctx.config, ctx), sample, sampling_params(ctx.sampling, ctx.config, call.seed))
            if inspect.iscoroutinefunction(fn):
                output = await fn(*arguments, **offered)
            else:
                output = await session.threads.run(lambda: fn(*arguments, **offered))
                output = await output if inspect.isawaitable(output) else output
        items = list(output) if isinstance(output, (list, tuple)) else [output]
        if not items:
            sample.status = Status.ABORTED
            items = [sample]
        for item in items:
            if not isinstance(item, CoreSample):
                raise TypeError(f"returned {type(item).__name__}; return the sample, or a list of samples")
            if isinstance(output, (list, tuple)) and isinstance(item, Sample):
                setattr(item, FANNED, True)
        version = served if call.version is None else call.version
        return [await _with_log_probs(plain(item, version), ctx) for item in items]

    async def slime_generate(group: Group, ctx: Context) -> Group:
        samples = views(group, ctx)
        await asyncio.to_thread(with_pictures, samples, ctx)
        pending = [i for i, s in enumerate(samples) if s.status in (Status.PENDING, Status.ABORTED)]
        output = dict(zip(pending, await together(one(samples[i], ctx) for i in pending), strict=True))
        done = Group(prompt=group.prompt, samples=[], rollouts={})
        for rollout, indices in group.rollouts.items():
            parts = [item for i in indices for item in output.get(i, [samples[i]])]
            done.rollouts[rollout] = list(range(len(done.samples), len(done.samples) + len(parts)))
            done.samples += parts
        return done

    return slime_generate
