"""More prompts in flight than a step needs: which groups it takes, and when the others stop.

``rollout.over_sampling_batch_size`` prompts start; the step takes the first ``rollout_batch_size`` groups that finish.

**lockstep**: time is counted in ticks, a token of every sample in flight, so the outcome is a function of the seed and
not of the machine, the slots or the reward's speed. Samples run in rounds of ``rollout_max_response_len / 16`` ticks;
the step ends with the first round in which enough groups are kept, and takes them in the order of the tick at which
their last sample ended, then of prompts. Everything unfinished stands at the same tick then. The core cannot tell
a plugin's tool at work from a sample that is over, so groups that a plugin or a function generates
(`slime_generate`) run to their end and are ranked by the tokens of their longest sample.

**free**: the first to finish by the clock are taken, and what still runs is stopped wherever it is: a plugin then
waits inside its next ``ctx.generate``, and its deadline with it. A function that asks the loopback server itself is
not stopped here; the engine's own pause holds its request while new weights come.

What is left over is dropped ("over_sampled"), or with ``rollout.partial_rollout`` kept for the next step: unfinished
samples go on where they stopped, under the new weights; finished groups stand first. Nothing is generated or rewarded
twice. In flight a group gains ground in every step, so it ends after ``rollout_max_response_len`` ticks in all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.rollout.pending import pending_group
from slime_core.types import Group, Prompt, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Recalled
    from slime_core.rollout.gate import Gate

OVER_SAMPLED = "over_sampled"
ROUNDS = 16
"""Rounds of a longest response: more stop sooner after the last group that is needed, fewer stop less often."""


@dataclass(slots=True)
class Flight:
    """A group on its way."""

    position: int
    samples: list[Sample]  # as they were issued
    version: int  # in training at the start
    start: int = 0  # tick
    task: asyncio.Task[None] | None = None
    generated: bool = False  # and not yet kept or dropped
    past: Recalled | None = None  # what an earlier process made of it
    carried: bool = False  # it was finished when the step began
    prompt: Prompt | None = None
    stale: bool = False  # it is too old to train and being given up

    @property
    def ids(self) -> list[str]:
        """Ids of the samples that were issued."""
        return [sample.id for sample in self.samples]

    def again(self, config: Config) -> tuple[Group, list[Sample]]:
        """The same prompt's pending samples, as the next attempt; and those of this one that have no successor."""
        assert self.prompt is not None
        group = pending_group(self.prompt, config)
        for sample in group.samples:
            sample.attempt = self.samples[0].attempt + 1
        names = {sample.id for sample in group.samples}
        return group, [sample for sample in self.samples if sample.id not in names]


class Race:
    """Ranks the groups of a step. ``gate`` is the engine that all its samples use."""

    def __init__(self, config: Config, gate: Gate) -> None:
        rollout = config.rollout
        self.gate = gate
        self.size = rollout.over_sampling_batch_size
        self.lockstep = rollout.async_schedule == "lockstep"
        self._quantum = -(-rollout.rollout_max_response_len // ROUNDS)
        self._ended: dict[int, int] = {}  # position -> tick of its last sample's end

    def begin(self) -> None:
        """A step: finished groups of the last one ended at tick 0, unfinished ones go on."""
        self._ended = dict.fromkeys(self._ended, 0)
        self.gate.begin(self._quantum if self.lockstep else None)

    def more(self) -> None:
        """Another round of a lockstep step."""
        self.gate.more(self._quantum)

    def enter(self, flight: Flight, *, by_plugin: bool) -> None:
        """A group starts at the present tick."""
        flight.start = self.gate.start
        if not (self.lockstep and by_plugin):
            self.gate.watch(flight.ids)

    async def repeat(self, flight: Flight, past: Recalled, version: int) -> None:
        """Take as many ticks as the group did in the step of ``version``."""
        flight.carried = past.newest < version
        ticks = {} if flight.carried else past.ticks
        if self.gate.watches(flight.ids):
            await asyncio.gather(*(self.gate.pass_time(name, ticks.get(name, 0)) for name in flight.ids))

    def leave(self, flight: Flight, group: Group | None) -> None:
        """A group ended: with what was generated, or without."""
        watched = self.gate.watches(flight.ids)
        tick = self.gate.forget(flight.ids)
        if group is not None:
            longest = max((_sampled(sample) for sample in group.samples), default=0)
            ended = tick if watched else flight.start + longest
            self._ended[flight.position] = 0 if flight.carried else ended

    def drop(self, position: int) -> None:
        """A group is out of the race."""
        self._ended.pop(position, None)

    def quiet(self, flying: Iterable[Flight]) -> bool:
        """Whether nothing in flight can go on before the next round."""
        if self.gate.busy:
            return False
        return all(any(name in self.gate.held for name in flight.ids) for flight in flying)

    def first(self, kept: Mapping[int, Group], flying: Iterable[Flight], count: int) -> list[int] | None:
        """Positions of the ``count`` groups that the step takes, None while that is open."""
        if len(kept) < count or (self.lockstep and not self.quiet(flying)):
            return None
        if not self.lockstep:
            return list(kept)[:count]
        return sorted(kept, key=lambda position: (self._ended[position], position))[:count]


def _sampled(sample: Sample) -> int:
    return sum(version >= 0 for version in sample.weight_versions)


def version_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """``rollout/continued_samples``, made by several weights, and the share of sampled tokens older than ``version``.

    The share is ``rollout/offpolicy_tokens``; it counts tokens that do not train, too.
    """
    versions = [[v for v in sample.weight_versions if v >= 0] for group in groups for sample in group.samples]
    tokens = sum(map(len, versions))
    older = sum(v < version for made in versions for v in made)
    return {
        "rollout/continued_samples": float(sum(len(set(made)) > 1 for made in versions)),
        "rollout/offpolicy_tokens": older / tokens if tokens else 0.0,
    }
