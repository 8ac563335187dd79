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
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from itertools import repeat
from operator import attrgetter
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
Field = tuple[Whose, str, Any]
"""Whose, its name, its value."""
SCALARS = frozenset((str, int, float, type(None)))
PLAIN = (str, int, type(None), float, Enum)


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
        self._fields_before = list(self._fields())
        self._before = [  # most fields are no arrays: no call for each
            (-1, value)
            if type(value) in SCALARS
            else (len(value), None)
            if type(value) is list and not content
            else self._look(value)
            for _, _, value in self._fields_before
        ]

    def compare(self, about: str) -> None:
        """Look again.

        Raises:
            PluginError: PLG61 with plugin, hook, field and id.
        """
        found = list(self._fields())
        if all(map(_untouched, found, self._fields_before, self._before)) and len(found) == len(self._before):
            return
        now = {(whose, name): value for whose, name, value in found}
        for (whose, name, kept), (size, mark) in zip(self._fields_before, self._before):
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

    def _look(self, value: Any) -> tuple[int, Any]:
        """The length of a list or array and the hash of its content, where that is wanted; else -1 and the value."""
        if isinstance(value, (list, np.ndarray)):
            return len(value), _hash(value) if self._content else None
        return -1, _plain(value)

    def _same(self, value: Any, kept: Any, size: int, mark: Any) -> bool:
        if size < 0:
            return bool(_plain(value) == mark) or value != value  # a figure that is not a number
        if value is kept and mark is None:
            return len(value) == size
        if not isinstance(value, (list, np.ndarray)) or len(value) != size:
            return False
        if mark is not None:
            return bool(_hash(value) == mark)
        return bool(np.array_equal(np.asarray(value), np.asarray(kept)))

    def _fields(self) -> Iterator[Field]:
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


@cache
def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*names)


def _of(value: Any, whose: Whose, names: tuple[str, ...]) -> Iterator[Field]:
    return zip(repeat(whose), names, _getter(names)(value))


def _untouched(now: Field, before: Field, look: tuple[int, Any]) -> bool:
    """Whether a field is plainly as it was: the same object, and as long."""
    value, (size, mark) = now[2], look
    if value is not before[2] or now[0] != before[0]:
        return bool(size < 0 and mark == value and now[:2] == before[:2])
    return (size < 0 and value is mark) or (mark is None and len(value) == size)


def _of_group(group: Group, fields: tuple[str, ...]) -> Iterator[Field]:
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
