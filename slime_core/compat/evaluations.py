"""slime's evaluation function: sets by name, each with as many samples as it likes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.compat.owners import views
from slime_core.compat.rollouts import DataBuffer, called, leaves, number_of
from slime_core.compat.sample import Sample, plain
from slime_core.compat.session import CompatSession
from slime_core.types import Group, Prompt, Sample as CoreSample, Status

if TYPE_CHECKING:
    from slime_core.context import Context

Function = Callable[..., Any]
Sets = dict[str, list[Group]]


def evaluation(fn: Function, session: CompatSession) -> Function:
    """All sets of an evaluation by ``eval(args, rollout_id, data_buffer, evaluation=True)``, and numbers beside them.

    Its buffer holds the groups of the config's sets. It returns ``{name: {"rewards", "truncated", "samples"}}``, of
    which "rewards" or "samples" is enough, or a RolloutFnEvalOutput of it. A list belongs to the first set.
    """

    async def evaluate(sets: Mapping[str, list[Group]], ctx: Context) -> tuple[Sets, dict[str, float]]:
        buffer = DataBuffer([views(group, ctx) for groups in sets.values() for group in groups])
        output = await called(fn, session, ctx, buffer)
        data, metrics = getattr(output, "data", output), getattr(output, "metrics", None) or {}
        if not isinstance(data, Mapping):
            data = {next(iter(sets), "eval"): {"samples": data}}
        by_name = {str(name): _groups(str(name), part, sets.get(str(name), ()), ctx) for name, part in data.items()}
        scalars = {name: value.item() if _is_scalar(value) else value for name, value in metrics.items()}
        return by_name, {name: float(value) for name, value in scalars.items() if isinstance(value, (int, float))}

    return evaluate


def _is_scalar(value: Any) -> bool:
    """Whether a value is one number of numpy or torch."""
    return hasattr(value, "item") and value.ndim == 0


def _groups(name: str, part: Any, issued: Sequence[Group], ctx: Context) -> list[Group]:
    """The samples of a set by their prompts: an issued one, or one of their own.

    Raises:
        ValueError: lists of different lengths.
    """
    table = part if isinstance(part, Mapping) else {"samples": part}
    samples = list(leaves(table.get("samples") or ()))
    rewards = table.get("rewards")
    if rewards is None:
        rewards = [number_of(sample.reward, ctx) for sample in samples]
    samples = samples or [Sample() for _ in rewards]
    truncated = table.get("truncated")
    if truncated is None:
        truncated = [sample.status is Status.TRUNCATED for sample in samples]
    if not len(rewards) == len(truncated) == len(samples):
        counts = f"{len(rewards)} rewards, {len(truncated)} truncated, {len(samples)} samples"
        raise ValueError(f"returned set '{name}' with {counts}; return an entry of each for every sample")
    version = ctx.engine.version if ctx.engine is not None else ctx.version
    groups = {group.prompt.position: Group(prompt=group.prompt, samples=[], rollouts={}) for group in issued}
    for number, sample in enumerate(samples):
        plain(sample, version)
        sample.reward = None if rewards[number] is None else float(rewards[number])
        sample.status = Status.TRUNCATED if truncated[number] else Status.COMPLETED
        position = sample.group_index
        if position not in groups:
            position = -1 - number
            groups[position] = Group(prompt=_prompt(sample, f"eval/{name}/{number}"), samples=[], rollouts={})
        _add(groups[position], sample)
    return [group for group in groups.values() if group.samples]


def _prompt(sample: CoreSample, name: str) -> Prompt:
    return Prompt(
        id=name,
        prompt=sample.prompt,
        tokens=sample.tokens[: sample.prompt_length],
        label=sample.label,
        metadata=dict(sample.metadata),
    )


def _add(group: Group, sample: CoreSample) -> None:
    """Add a sample, as a rollout of its own unless it shares the id of one."""
    place = len(group.samples)
    rollout = -1 - place if sample.rollout_id is None else sample.rollout_id
    group.rollouts.setdefault(rollout, []).append(place)
    sample.id = sample.id or f"{group.prompt.id}-{place}"
    group.samples.append(sample)
