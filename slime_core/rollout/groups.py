"""A step's groups: where they come from, how their samples are issued and drawn, what they must be when they return.

Checked on the way back from `generate`: lengths agree, ids are in the vocabulary, log-probs are finite.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.config.sections.evaluation import EvalTask
from slime_core.context import unknown_adapter
from slime_core.errors import EngineError
from slime_core.media.references import plain_sample
from slime_core.protocols import GroupRecord
from slime_core.types import Group, Prompt, Sample, SamplingParams

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.media.processor import MediaProcessor
    from slime_core.protocols import Drops

SLACK = 1e-4  # a log-prob may exceed 0 by rounding


class Source(Protocol):
    """Where prompts come from, in the run's order."""

    async def prepare(self, count: int) -> None:
        """Make what the next :meth:`next` will read, without blocking the event loop."""

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer only where the source has ended for good."""

    def state(self) -> dict[str, Any]:
        """JSON-ready; ``position`` is the next prompt's."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`."""


class GroupSource(AbstractAsyncContextManager["GroupSource"], Protocol):
    """Where a step's groups come from: a collector, or a dump in its place."""

    async def take(self, count: int, recorded: Sequence[int] = ()) -> list[Group]:
        """The next step's groups; waits for them."""

    async def drain(self) -> None:
        """Wait until nothing is in flight under the old weights."""

    def admit(self, version: int) -> None:
        """Let new prompts start: the last step's groups are trained and ``version`` is being served."""

    def pop_counts(self) -> Counts:
        """The counts since the last call."""

    def progress(self) -> str:
        """How far the step that is being taken is, as text."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""


@dataclass(slots=True)
class Counts:
    """What happened since the last step."""

    issued: int = 0  # groups
    drops: Counter[str] = field(default_factory=Counter)  # samples by reason
    tokens: int = 0  # response tokens of finished groups
    metrics: dict[str, float] = field(default_factory=dict)  # of the step's groups

    def add(self, drops: Drops, record: GroupRecord | None = None) -> None:
        """Count drops, or those of a group that ended in an earlier process."""
        if record is not None and record.ended:
            self.drops.update(record.drops)
            return
        for samples, drop in drops:
            self.drops[drop.reason] += len(samples)


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that is issued and neither trained nor dropped, and where it is in its life."""

    data: Group  # pending, then scored; whoever generates may change it in place
    version: int = 0  # in training when it started; once finished, the lowest that made a trainable token
    newest: int = 0  # once finished, the highest that made a trainable token
    record: GroupRecord = field(default_factory=GroupRecord)  # in the ledger, of an earlier process
    by_plugin: bool = False  # a plugin or a function generates it, not the core
    generated: bool = False
    stale: bool = False  # it is too stale to train, and being stopped
    task: asyncio.Task[None] | None = None
    start_tick: int = 0  # of over-sampling, as the others
    end_tick: int = 0
    of_earlier_step: bool = False  # it was finished when the step began
    samples: list[Sample] = field(init=False)  # as they were issued; once finished, the group's

    def __post_init__(self) -> None:
        self.samples = list(self.data.samples)

    @property
    def position(self) -> int:
        """Of its prompt."""
        return self.data.prompt.position

    @property
    def ids(self) -> list[str]:
        """Ids of its samples."""
        return [sample.id for sample in self.samples]

    def next_attempt(self, config: Config) -> tuple[OpenGroup, list[Sample]]:
        """The same prompt once more, as its next attempt; and the samples of this one that have no successor."""
        attempt = OpenGroup(pending_group(self.data.prompt, config, attempt=self.samples[0].attempt + 1))
        return attempt, [sample for sample in self.samples if sample.id not in attempt.ids]


@dataclass(slots=True, eq=False)
class OpenGroups:
    """The open groups of a stage, by position."""

    in_flight: dict[int, OpenGroup] = field(default_factory=dict)
    finished: dict[int, OpenGroup] = field(default_factory=dict)  # in the order in which they finished
    in_training: int = 0

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.finished) + self.in_training


def pending_group(prompt: Prompt, config: Config, *, count: int = 0, attempt: int = 0, adapter: str = "") -> Group:
    """The pending samples of one prompt, ``count`` of them or as many as its task says, of ``adapter`` or its task's.

    Sample ids are ``PROMPT_ID-J``; ``rollout_id`` and ``index`` are unique in the stage and a function of the prompt's
    position alone.
    """
    default = config.rollout.n_samples_per_prompt
    of_task = {task.name: task.n_samples_per_prompt or default for task in config.data.tasks}
    n = count or of_task.get(prompt.task, default)
    first = prompt.position * max([default, n, *of_task.values()])
    adapters = {task.name: task.adapter for task in config.data.tasks}
    model = adapter or adapters.get(prompt.task) or next(iter(config.train.lora_adapters), "")
    samples = [
        Sample(
            id=f"{prompt.id}-{j}",
            task=prompt.task,
            model=model,
            prompt=prompt.prompt,
            tokens=list(prompt.tokens),
            label=prompt.label,
            metadata=dict(prompt.metadata),
            multimodal_inputs=deepcopy(prompt.multimodal_inputs),
            group_index=prompt.position,
            index=first + j,
            rollout_id=first + j,
            attempt=attempt,
            temperature=config.rollout.rollout_temperature or 1.0,
            session_id=f"{prompt.id}-{j}",
        )
        for j in range(n)
    ]
    return Group(prompt=prompt, samples=samples, rollouts={first + j: [j] for j in range(n)})


def sibling(issued: Sample, number: int, tokens: Sequence[int] = ()) -> Sample:
    """Another pending sample of a rollout: a later turn, or another branch of its dialogue, with its prompt's ids.

    Example:
        later = sibling(group.samples[0], 1, prompt_ids)      # "grpo/17-0.1"; it shares rollout_id with "grpo/17-0"
    """
    return Sample(
        id=f"{issued.id}.{number}",
        task=issued.task,
        role=issued.role,
        model=issued.model,
        prompt=issued.prompt,
        tokens=list(tokens),
        label=issued.label,
        metadata=dict(issued.metadata),
        group_index=issued.group_index,
        index=issued.index,
        rollout_id=issued.rollout_id,
        attempt=issued.attempt,
        temperature=issued.temperature,
        session_id=issued.session_id,
    )


def training_params(config: Config) -> SamplingParams:
    """How training samples are drawn, before `slime_sampling` has its say."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )


def evaluation_params(config: Config, task: EvalTask | None = None) -> SamplingParams:
    """How evaluation samples are drawn, before `slime_sampling` has its say; a set's own keys come first."""
    section, rollout = config.eval, config.rollout
    settings = task or EvalTask(name="default")
    return replace(
        training_params(config),
        max_new_tokens=settings.max_response_len or section.eval_max_response_len or rollout.rollout_max_response_len,
        temperature=settings.temperature if settings.temperature >= 0 else section.eval_temperature,
        top_p=settings.top_p or section.eval_top_p,
        top_k=settings.top_k if settings.top_k >= 0 else section.eval_top_k,
    )


def issued_ids(group: Group) -> dict[int, str]:
    """Rollout id to sample id of a pending group; taken before plugins may change the group in place."""
    return {rollout: group.samples[indices[0]].id for rollout, indices in group.rollouts.items()}


def issued_adapters(group: Group, config: Config) -> list[str]:
    """The run's adapters, a pending group's own first; none where they have no names."""
    names = config.train.lora_adapters
    return [group.samples[0].model, *names] if names else []


def check_group(
    group: Group,
    issued: Mapping[int, str],
    vocab_size: int,
    media: MediaProcessor | None = None,
    adapters: Sequence[str] = (),
) -> None:
    """Check every sample and the rollout table of a group, and name fan-out siblings after the sample issued for them.

    ``issued`` is :func:`issued_ids` of the group as it was handed out, ``adapters`` its :func:`issued_adapters`: a
    sample without a model is of the first. Media that a function put into a sample become what the ledger can keep.

    Raises:
        DataError: DAT24 media that are none, DAT38 placeholders that ``media`` finds without theirs.
        EngineError: ENG79 lengths, TOK44 ids, ENG80 log-probs, ENG82 a rollout table that does not fit, ENG09 an
            adapter that the run does not have.
    """
    members = sorted(i for indices in group.rollouts.values() for i in indices)
    if members != list(range(len(group.samples))):
        raise EngineError(
            f"the rollouts of group {group.id} name samples {members}, the group has {len(group.samples)}",
            code="ENG82",
            where=f"group {group.id}",
            fix="every sample belongs to exactly one rollout id of Group.rollouts",
        )
    if set(group.rollouts) != set(issued):
        raise EngineError(
            f"group {group.id} was returned with rollouts {sorted(group.rollouts)}, not {sorted(issued)}",
            code="ENG82",
            where=f"group {group.id}",
            fix="keep every rollout id; a rollout that failed keeps its sample with status FAILED",
        )
    for rollout, indices in group.rollouts.items():
        for k, index in enumerate(indices):
            sample = group.samples[index]
            sample.id = f"{issued[rollout]}.{k}" if k else issued[rollout]
            sample.rollout_id, sample.group_index, sample.task = rollout, group.prompt.position, group.prompt.task
            _check_sample(sample, vocab_size)
            _check_model(sample, adapters)
            plain_sample(sample)
            if media is not None:
                media.check(sample)


def _check_model(sample: Sample, adapters: Sequence[str]) -> None:
    """Tokens that train are of an adapter of the run; others may be a frozen model's."""
    if adapters and not sample.model:
        sample.model = adapters[0]
    trains = not sample.remove_sample and any(sample.loss_mask or ())
    if adapters and trains and sample.model not in adapters:
        raise unknown_adapter(sample.model, adapters[1:], f"sample {sample.id}")


def _check_sample(sample: Sample, vocab_size: int) -> None:
    count = sample.response_length
    if sample.loss_mask is None:
        sample.loss_mask = [1] * count
    if not sample.weight_versions:
        sample.weight_versions = [-1] * count
    lengths = {"loss_mask": len(sample.loss_mask), "weight_versions": len(sample.weight_versions)}
    if sample.rollout_log_probs is not None:
        lengths["rollout_log_probs"] = len(sample.rollout_log_probs)
    wrong = {name: length for name, length in lengths.items() if length != count}
    if wrong or not 0 <= count <= len(sample.tokens):
        raise EngineError(
            f"sample {sample.id} has {len(sample.tokens)} tokens, response_length {count}, and {wrong}",
            code="ENG79",
            where=f"sample {sample.id}",
            why="loss_mask, rollout_log_probs and weight_versions have one entry a response token",
            fix="add turns with sample.append_response(tokens, log_probs, mask)",
        )
    if sample.tokens and not 0 <= min(sample.tokens) <= max(sample.tokens) < vocab_size:
        outside = next(token for token in sample.tokens if not 0 <= token < vocab_size)
        raise EngineError(
            f"sample {sample.id} holds token id {outside}, outside the vocabulary of {vocab_size}",
            code="TOK44",
            where=f"sample {sample.id}",
            fix="use the model's own tokenizer; nothing may be re-encoded",
        )
    log_probs = sample.rollout_log_probs
    if log_probs and (not math.isfinite(sum(log_probs)) or max(log_probs) > SLACK):  # NaN and inf stay in a sum
        position, value = next((i, p) for i, p in enumerate(log_probs) if not math.isfinite(p) or p > SLACK)
        raise EngineError(
            f"sample {sample.id} has log-prob {value} at response token {position}",
            code="ENG80",
            where=f"sample {sample.id}",
            why="a log-prob is finite and not above 0",
        )
    if sample.loss_mask.count(0) + sample.loss_mask.count(1) != count:
        raise EngineError(f"sample {sample.id} has a loss_mask entry other than 0 and 1", code="ENG79")
