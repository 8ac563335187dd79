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
from typing import TYPE_CHECKING

from slime_core.types import Group, Sample

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import GroupRecord
    from slime_core.rollout.groups import InFlight
    from slime_core.rollout.partial_rollout import SuspendableEngine

OVER_SAMPLED = "over_sampled"
ROUNDS = 16
"""Rounds of a longest response: more stop sooner after the last group that is needed, fewer stop less often."""


class OverSampling:
    """Ranks the groups of a step. ``engine`` is the one that all its samples use."""

    def __init__(self, config: Config, engine: SuspendableEngine) -> None:
        rollout = config.rollout
        self.engine = engine
        self.size = rollout.over_sampling_batch_size
        self.lockstep = rollout.async_schedule == "lockstep"
        self._quantum = -(-rollout.rollout_max_response_len // ROUNDS)
        self._ended: dict[int, int] = {}  # position -> tick of its last sample's end

    def begin(self) -> None:
        """A step: finished groups of the last one ended at tick 0, unfinished ones go on."""
        self._ended = dict.fromkeys(self._ended, 0)
        self.engine.begin(self._quantum if self.lockstep else None)

    def more(self) -> None:
        """Another round of a lockstep step."""
        self.engine.more(self._quantum)

    def enter(self, flight: InFlight, *, by_plugin: bool) -> None:
        """A group starts at the present tick."""
        flight.start = self.engine.start
        if not (self.lockstep and by_plugin):
            self.engine.watch(flight.ids)

    async def repeat(self, flight: InFlight, past: GroupRecord, version: int) -> None:
        """Take as many ticks as the group did in the step of ``version``."""
        flight.carried = past.newest < version
        ticks = {} if flight.carried else past.ticks
        if self.engine.watches(flight.ids):
            await asyncio.gather(*(self.engine.pass_time(name, ticks.get(name, 0)) for name in flight.ids))

    def leave(self, flight: InFlight, group: Group | None) -> None:
        """A group ended: with what was generated, or without."""
        watched = self.engine.watches(flight.ids)
        tick = self.engine.forget(flight.ids)
        if group is None:
            self._ended.pop(flight.position, None)
        else:
            longest = max((_sampled(sample) for sample in group.samples), default=0)
            ended = tick if watched else flight.start + longest
            self._ended[flight.position] = 0 if flight.carried else ended

    def drop(self, position: int) -> None:
        """A group is no candidate any more."""
        self._ended.pop(position, None)

    def quiet(self, in_flight: Iterable[InFlight]) -> bool:
        """Whether nothing in flight can go on before the next round."""
        if self.engine.busy:
            return False
        return all(any(name in self.engine.held for name in flight.ids) for flight in in_flight)

    def first(self, ready: Mapping[int, Group], in_flight: Iterable[InFlight], count: int) -> list[int] | None:
        """Positions of the ``count`` groups that the step takes, None while that is open."""
        if len(ready) < count or (self.lockstep and not self.quiet(in_flight)):
            return None
        if not self.lockstep:
            return list(ready)[:count]
        return sorted(ready, key=lambda position: (self._ended[position], position))[:count]


def _sampled(sample: Sample) -> int:
    return sum(version >= 0 for version in sample.weight_versions)


def version_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """``rollout/continued_samples``, made by several weights, and the share of sampled tokens older than ``version``.

    The share is ``rollout/offpolicy_tokens``; it counts tokens that do not train, too.
    """
    versions = [[v for v in sample.weight_versions if v >= 0] for group in groups for sample in group.samples]
    tokens = sum(map(len, versions))
    older = sum(v < version for sample_versions in versions for v in sample_versions)
    return {
        "rollout/continued_samples": float(sum(len(set(sample_versions)) > 1 for sample_versions in versions)),
        "rollout/offpolicy_tokens": older / tokens if tokens else 0.0,
    }
