"""What a hook may look at and not change: remembered before the call, compared after it.

Always: names, numbers, the length of lists and arrays, and the content of one that was put in another's place. With
``report.check_hooks`` the content of every list and array too, by a hash. Reports' figures are always compared whole.

    slime_sampling, slime_generate              the prompt
    slime_sample_done, slime_reward             and the samples' tokens, log-probs and versions; a group's members
    slime_filter                                and rewards and status
    slime_batch                                 which samples a step has, and their tokens
    slime_advantage                             everything that it is given
    slime_step_done                             the report
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from slime_core.errors import PluginError
from slime_core.plugins.boundary import wrong
from slime_core.plugins.provider import CORE, Answer
from slime_core.types import Batch, Group, Prompt, Sample, StepReport

PROMPT_OF = "prompt"
PROMPT = ("id", "task", "position", "tokens", "label")
SAMPLE = ("id", "tokens", "response_length", "rollout_log_probs", "weight_versions", "rollout_id", "attempt", "label")
JUDGED = (*SAMPLE, "reward", "status")
BATCH = ("sample_ids", "tokens", "offsets", "response_offsets")
SCORED = (*BATCH, "loss_mask", "reward", "group", "rollout")
REPORT = ("version", "stage", "step", "of", "metrics", "seconds")
OF_SAMPLES = {
    "slime_sample_done": SAMPLE,
    "slime_reward": SAMPLE,
    "slime_reward_types": SAMPLE,
    "slime_filter": JUDGED,
}
OWN_SAMPLES = {"rollout_sample_hook_path", "custom_generate_function_path"}  # slime's, which may return other samples

Whose = str | int  # of what a field is: the number of a group's sample, or a word
Row = tuple[Whose, str, Any, int, Any]
"""A field before the call: whose, its name, the list or array itself and its length (None and -1 for others), and the
value of one that is none, or its content's hash."""
PLAIN = (str, int, float, Enum, type(None))


class Protected:
    """The state of a call's arguments before it.

    Example:
        seen = Protected(answer, {"group": group}, content=True)
        ...
        seen.compare("prompt 'grpo/17'")
    """

    def __init__(self, answer: Answer, arguments: Mapping[str, Any], *, content: bool) -> None:
        self._answer, self._content = answer, content
        self._arguments = arguments if answer.provider.source != CORE else {}
        self._before = [self._row(*field) for field in self._fields()]

    def compare(self, about: str) -> None:
        """Look again.

        Raises:
            PluginError: PLG61 with plugin, hook, field and id.
        """
        now = {(whose, name): value for whose, name, value in self._fields()}
        for whose, name, kept, size, mark in self._before:
            if (whose, name) not in now or not self._same(now.pop((whose, name)), kept, size, mark):
                raise self._changed(whose, name, about)
        if now:
            raise self._changed(*next(iter(now)), about)

    def _changed(self, whose: Whose, name: str, about: str) -> PluginError:
        return wrong(
            self._answer,
            f"changed {name} of {self._named(whose)}",
            about,
            code="PLG61",
            why="what was sampled and what others have found is not a hook's to change",
            fix="work on a copy; annotations belong in sample.metadata",
        )

    def _named(self, whose: Whose) -> str:
        for value in self._arguments.values():
            if isinstance(value, Group) and whose != PROMPT_OF:
                return f"sample {whose} of group '{value.id}'" if isinstance(whose, int) else f"{whose} '{value.id}'"
            if isinstance(value, (Group, Prompt)):
                return f"{whose} '{value.id}'"
        return str(whose)

    def _row(self, whose: Whose, name: str, value: Any) -> Row:
        if isinstance(value, (list, np.ndarray)):
            return whose, name, value, len(value), _hash(value) if self._content else None
        return whose, name, None, -1, _plain(value)

    def _same(self, value: Any, kept: Any, size: int, mark: Any) -> bool:
        if size < 0:
            return value is mark or bool(_plain(value) == mark) or value != value  # a figure that is not a number
        if value is kept and mark is None:
            return len(value) == size
        if not isinstance(value, (list, np.ndarray)) or len(value) != size:
            return False
        if mark is not None:
            return bool(_hash(value) == mark)
        return bool(np.array_equal(np.asarray(value), np.asarray(kept)))

    def _fields(self) -> Iterator[tuple[Whose, str, Any]]:
        hook, given = self._answer.hook, self._arguments
        fields = OF_SAMPLES.get(hook, ())
        if self._answer.provider.name in OWN_SAMPLES:
            fields = ()
        for value in given.values():
            if isinstance(value, Prompt):
                yield from _of(value, PROMPT_OF, PROMPT)
            elif isinstance(value, Group) and (fields or hook == "slime_generate"):
                yield from _of(value.prompt, PROMPT_OF, PROMPT)
                yield from _of_group(value, fields)
            elif isinstance(value, Sample) and fields:
                yield from _of(value, "the sample", fields)
            elif isinstance(value, Batch):
                yield from _of(value, "the batch", BATCH if hook == "slime_batch" else SCORED)
                if hook != "slime_batch":
                    yield from (("the batch", f"columns[{name!r}]", column) for name, column in value.columns.items())
            elif isinstance(value, StepReport):
                yield from _of(value, "the report", REPORT)


def _of(value: Any, whose: Whose, names: Sequence[str]) -> list[tuple[Whose, str, Any]]:
    return [(whose, name, getattr(value, name)) for name in names]


def _of_group(group: Group, fields: Sequence[str]) -> Iterator[tuple[Whose, str, Any]]:
    if not fields:
        return
    yield "group", "rollouts", {rollout: tuple(of) for rollout, of in group.rollouts.items()}
    yield "group", "samples", len(group.samples)
    for number, sample in enumerate(group.samples):
        yield from _of(sample, number, fields)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return value if isinstance(value, PLAIN) else type(value)


def _hash(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes())
    return hash(repr(value)) if value and not isinstance(value[0], (int, float)) else hash(tuple(value))
