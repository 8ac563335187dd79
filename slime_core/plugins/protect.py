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

Place = tuple[str, str]  # whose field, and its name


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
        self._before = {place: self._look(value) for place, value in self._fields()}

    def compare(self, about: str) -> None:
        """Look again.

        Raises:
            PluginError: PLG61 with plugin, hook, field and id.
        """
        now = dict(self._fields())
        for place, (kept, size, mark) in self._before.items():
            if place not in now or not self._same(now[place], kept, size, mark):
                raise self._changed(*place, about)
        more = next((place for place in now if place not in self._before), None)
        if more is not None:
            raise self._changed(*more, about)

    def _changed(self, whose: str, field: str, about: str) -> PluginError:
        return wrong(
            self._answer,
            f"changed {field} of {whose}",
            about,
            code="PLG61",
            why="what was sampled and what others have found is not a hook's to change",
            fix="work on a copy; annotations belong in sample.metadata",
        )

    def _look(self, value: Any) -> tuple[Any, int, Any]:
        if isinstance(value, dict):
            return None, -1, dict(value)
        if isinstance(value, (list, np.ndarray)):
            return value, len(value), _hash(value) if self._content else None
        return None, -1, value if isinstance(value, (str, int, float, Enum, type(None))) else type(value)

    def _same(self, value: Any, kept: Any, size: int, mark: Any) -> bool:
        if kept is None:
            return bool(self._look(value)[2] == mark) or value != value  # a figure that is not a number
        if not isinstance(value, (list, np.ndarray)) or len(value) != size:
            return False
        if mark is not None:
            return bool(_hash(value) == mark)
        return value is kept or bool(np.array_equal(np.asarray(value), np.asarray(kept)))

    def _fields(self) -> Iterator[tuple[Place, Any]]:
        hook, given = self._answer.hook, self._arguments
        fields = OF_SAMPLES.get(hook, ())
        if self._answer.provider.name in OWN_SAMPLES:
            fields = ()
        for value in given.values():
            if isinstance(value, Prompt):
                yield from _of(value, f"prompt '{value.id}'", PROMPT)
            elif isinstance(value, Group) and (fields or hook == "slime_generate"):
                yield from _of(value.prompt, f"prompt '{value.id}'", PROMPT)
                yield from _of_group(value, fields)
            elif isinstance(value, Sample) and fields:
                yield from _of(value, "the sample", fields)
            elif isinstance(value, Batch):
                yield from _of(value, "the batch", BATCH if hook == "slime_batch" else SCORED)
                if hook != "slime_batch":
                    yield from (
                        (("the batch", f"columns[{name!r}]"), column) for name, column in value.columns.items()
                    )
            elif isinstance(value, StepReport):
                yield from _of(value, "the report", REPORT)


def _of(value: Any, whose: str, names: Sequence[str]) -> Iterator[tuple[Place, Any]]:
    return (((whose, name), getattr(value, name)) for name in names)


def _of_group(group: Group, fields: Sequence[str]) -> Iterator[tuple[Place, Any]]:
    if not fields:
        return
    yield (f"group '{group.id}'", "rollouts"), {rollout: tuple(of) for rollout, of in group.rollouts.items()}
    yield (f"group '{group.id}'", "samples"), len(group.samples)
    for number, sample in enumerate(group.samples):
        yield from _of(sample, f"sample {number} of group '{group.id}'", fields)


def _hash(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, zlib.crc32(np.ascontiguousarray(value).tobytes())
    return hash(repr(value)) if value and not isinstance(value[0], (int, float)) else hash(tuple(value))
