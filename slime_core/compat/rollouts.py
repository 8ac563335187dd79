"""slime's whole-rollout functions and data sources in the place of `slime_rollout` and `slime_prompts`."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from slime_core.compat.owners import note_answer, views, with_pictures
from slime_core.compat.sample import Sample, plain
from slime_core.compat.session import CompatSession
from slime_core.types import Group, Prompt, Sample as CoreSample

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.protocols import PromptSource

Function = Callable[..., Any]


class DataBuffer:
    """What a rollout function knows as its data buffer: the groups that the core issued, once each.

    A run has one for all its steps, so that a background worker that keeps it gets the groups of the next step too.
    """

    EMPTY = 100_000  # answers in a row after which a caller waits for what never comes

    def __init__(self, groups: Iterable[list[Sample]] = ()) -> None:
        self._waiting: deque[list[Sample]] = deque()
        self.refill(groups)

    def refill(self, groups: Iterable[list[Sample]]) -> None:
        """Begin a step with its groups."""
        self._waiting.clear()
        self._waiting.extend(groups)
        self._issued = len(self._waiting)
        self._empty = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The next groups of the step, at most ``num_samples``; an empty list when all were given out.

        Raises:
            RuntimeError: the caller repeats the question without end.
        """
        groups = [self._waiting.popleft() for _ in range(min(num_samples, len(self._waiting)))]
        self._empty = 0 if groups else self._empty + 1
        if self._empty > self.EMPTY:
            raise RuntimeError(
                f"get_samples({num_samples}) was called again and again, but all {self._issued} groups of this step "
                "were given out; an empty list is their end. Request args.rollout_batch_size in all, or raise it"
            )
        return groups

    def add_samples(self, samples: Iterable[list[Sample]]) -> None:
        """Put groups back, to be taken again in this step."""
        self._waiting.extend(samples)

    def get_buffer_length(self) -> int:
        """Groups that are left."""
        return len(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)


async def called(fn: Function, session: CompatSession, ctx: Context, buffer: DataBuffer) -> Any:
    """What a rollout function, sync or async, returns."""
    arguments = (session.args(ctx.config, ctx), ctx.version, buffer)
    if inspect.iscoroutinefunction(fn):
        return await fn(*arguments, evaluation=ctx.evaluation)
    output = await session.threads.run(lambda: fn(*arguments, evaluation=ctx.evaluation))
    return await output if inspect.isawaitable(output) else output


def rollout(fn: Function, session: CompatSession) -> Function:
    """`slime_rollout` by ``generate_rollout(args, rollout_id, data_buffer, evaluation=False)``, a step at a time."""
    buffer, lock = DataBuffer(), asyncio.Lock()

    async def slime_rollout(groups: list[Group], ctx: Context) -> list[Group]:
        async with lock:
            issued = [list(views(group, ctx)) for group in groups]
            for samples in issued:
                await asyncio.to_thread(with_pictures, samples, ctx)
            buffer.refill(issued)
            output = await called(fn, session, ctx, buffer)
        return _sorted_in(groups, list(leaves(output)), ctx)

    return slime_rollout


def leaves(output: Any) -> Iterable[CoreSample]:
    """Every sample of whatever nesting slime allows: RolloutFnTrainOutput, RolloutFnEvalOutput, dicts, lists."""
    for name in ("samples", "data"):
        output = getattr(output, name) if hasattr(output, name) and not isinstance(output, CoreSample) else output
    if isinstance(output, CoreSample):
        yield output
    elif isinstance(output, dict):
        for part in output.values():
            yield from leaves(part["samples"] if isinstance(part, dict) and "samples" in part else part)
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from leaves(part)
    else:
        raise TypeError(f"returned {type(output).__name__}; return a list of groups of samples")


def _sorted_in(groups: list[Group], samples: list[CoreSample], ctx: Context) -> list[Group]:
    """The samples back in their groups and rollouts; a group that did not come back stays away.

    New samples with the group's index alone are its rollouts that nothing else came back for, in order.

    Raises:
        ValueError: a sample that belongs to no group, or to none of its rollouts.
    """
    version = ctx.engine.version if ctx.engine is not None else ctx.version
    placed: list[Group] = []
    for group in groups:
        members = [sample for sample in samples if sample.group_index == group.prompt.position]
        if not members:
            continue
        by_rollout = _by_rollout(group, members)
        done = Group(prompt=group.prompt, samples=[], rollouts={})
        for rollout, parts in by_rollout.items():
            done.rollouts[rollout] = list(range(len(done.samples), len(done.samples) + len(parts)))
            done.samples += [_trainable(plain(sample, version), ctx) for sample in parts]
        placed.append(done)
    positions = {group.prompt.position for group in groups}
    for sample in samples:
        if sample.group_index not in positions:
            raise _strange(sample, f"the step's groups are {', '.join(map(str, sorted(positions)))}")
    return placed


def _by_rollout(group: Group, members: list[CoreSample]) -> dict[int, list[CoreSample]]:
    """A group's samples by rollout: by their rollout id, else by the index of the issued sample."""
    by_rollout: dict[int, list[CoreSample]] = {rollout: [] for rollout in group.rollouts}
    by_index = {group.samples[i].index: rollout for rollout, indices in group.rollouts.items() for i in indices}
    new: list[CoreSample] = []
    for sample in members:
        rollout = by_index.get(sample.index) if sample.rollout_id is None else sample.rollout_id
        by_rollout.get(rollout, new).append(sample)  # type: ignore[arg-type]
    for parts in by_rollout.values():
        if not parts and new:
            parts.append(new.pop(0))
    if new:
        count = len(by_rollout)
        raise _strange(new[0], f"its group has {count} rollouts, {', '.join(map(str, by_rollout))}, none of them free")
    return by_rollout


def _strange(sample: CoreSample, reason: str) -> ValueError:
    numbers = f"group_index={sample.group_index}, rollout_id={sample.rollout_id}, index={sample.index}"
    return ValueError(
        f"returned a sample with {numbers}, but {reason}; return the samples of the data buffer, copies of them, or "
        "new ones with the group_index and the rollout_id of the sample that they stand for"
    )


def number_of(reward: Any, ctx: Context) -> float | None:
    """A reward as a number: the entry of `reward.reward_key` where it is a dict; None for None."""
    value = reward[ctx.config.reward.reward_key] if isinstance(reward, dict) else reward
    return None if value is None else float(value)


def _trainable(sample: CoreSample, ctx: Context) -> CoreSample:
    """Its reward as a number: a rollout function judges its own samples."""
    reward = number_of(note_answer(sample, sample.reward, ctx), ctx)
    if reward is None and not ctx.config.train.offline:
        raise ValueError(f"sample {sample.id} was returned without a reward; a rollout function sets sample.reward")
    sample.reward = reward or 0.0
    if ctx.config.train.offline and sample.rollout_log_probs is None:
        sample.rollout_log_probs = [0.0] * sample.response_length
    return sample


class PulledRows:
    """A slime data source as rows by number: read in order, and cached while they may be needed again."""

    KEPT = 100_000

    def __init__(self, source: Any) -> None:
        self._source = source
        self._rows: dict[int, Prompt] = {}
        self._pulled = 0

    def __len__(self) -> int:
        if not hasattr(self._source, "__len__"):
            raise TypeError("this data source has no length")
        return len(self._source)

    def at(self, position: int) -> Prompt:
        """The row at ``position``; all rows before it are read first, in order.

        Raises:
            IndexError: a row that has left the cache.
        """
        while self._pulled <= position:
            groups = self._source.get_samples(1)
            if not groups:
                raise IndexError(f"the data source ended after {self._pulled} rows")
            self._rows[self._pulled] = _prompt(groups[0], self._pulled)
            self._rows.pop(self._pulled - self.KEPT, None)
            self._pulled += 1
        if position not in self._rows:
            raise IndexError(f"row {position} was pulled more than {self.KEPT} rows ago")
        return self._rows[position]

    def state(self) -> dict[str, Any]:
        """The class's name: a source by path has no fingerprint."""
        return {"source": f"{type(self._source).__module__}.{type(self._source).__qualname__}"}


def _prompt(group: Any, position: int) -> Prompt:
    """A group's row: what its first sample has, which the others have too.

    Raises:
        ValueError: samples with different prompts, or with attributes, which a row has no place for.
    """
    samples = list(group) if isinstance(group, (list, tuple)) else [group]
    sample = samples[0]
    rows = [(other.prompt, list(other.tokens), other.label) for other in samples]
    if any(row != rows[0] for row in rows):
        raise ValueError(f"group {position} has samples of different prompts; return a group for each prompt")
    empty = vars(Sample())
    names = sorted(name for name, value in vars(sample).items() if value != empty.get(name))
    if names:
        raise ValueError(
            f"group {position} has samples with the attributes {', '.join(names)}, which would be lost: a row is a "
            "prompt, tokens, a label and metadata; put them in sample.metadata"
        )
    return Prompt(
        id="",
        position=position,
        prompt=sample.prompt,
        tokens=list(sample.tokens)[: len(sample.tokens) - sample.response_length],
        label=sample.label,
        multimodal_inputs=sample.multimodal_inputs,
        metadata=dict(sample.metadata or {}),
        where=f"data source row {position}",
    )


def prompts(source_class: Function, session: CompatSession) -> Function:
    """`slime_prompts` by a class ``C(args)`` with ``get_samples(n)``; one instance a task."""
    sources: dict[str, PromptSource] = {}

    def slime_prompts(task: str, ctx: Context) -> PromptSource:
        if task not in sources:
            source = source_class(session.args(ctx.config, ctx))
            if not callable(getattr(source, "get_samples", None)):
                raise TypeError(f"{type(source).__name__} has no get_samples(num_samples)")
            sources[task] = PulledRows(source)
        return sources[task]

    return slime_prompts
