"""Over-sampling: more prompts in flight than a step needs; it takes the first groups that finish.

``rollout.over_sampling_batch_size`` prompts start; the step takes ``rollout_batch_size`` of their groups. The others
are dropped ("over_sampled"), or go on in the next step (`rollout.partial_rollout`).

**lockstep**: time is counted in ticks, a token of every sample in flight, so the outcome is a function of the seed and
not of the machine, the slots or the reward's speed. Samples run in rounds of ``rollout_max_response_len / 16`` ticks;
the step ends with the first round after which enough groups are finished, and takes them in the order of the tick at
which their last sample ended, then of prompts. Everything unfinished is at the same tick then. The core cannot tell
a plugin's tool at work from a sample that has ended, so groups that a plugin or a function generates
(`slime_generate`) run to their end and are ranked by the tokens of their longest sample.

**free**: the first to finish by the clock are taken, and what still runs is stopped wherever it is: a plugin then
waits inside its next ``ctx.generate``, and its deadline with it. A function that asks the loopback server itself is
not stopped here; the engine's own pause holds its request while new weights come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from slime_core.rollout.groups import OpenGroup, OpenGroups
from slime_core.rollout.step_selection import StepSelection
from slime_core.types import Group

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Engine
    from slime_core.rollout.suspendable_engine import SuspendableEngine

OVER_SAMPLED = "over_sampled"
ROUNDS = 16  # of a longest response: more stop sooner after the last group that is needed, fewer stop less often


class OverSampling(StepSelection):
    """The first groups by tick (lockstep) or by the clock (free). All their samples use ``engine``."""

    def __init__(self, config: Config, groups: OpenGroups, engine: SuspendableEngine) -> None:
        super().__init__(config, groups, cast("Engine", engine))
        rollout = config.rollout
        self.ranks_ends = rollout.async_schedule == "lockstep"
        self._suspendable, self._size = engine, rollout.over_sampling_batch_size
        self._ticks_a_round = -(-rollout.rollout_max_response_len // ROUNDS)

    def first(self, count: int, version: int) -> list[int] | None:
        """See `StepSelection`; in lockstep, once a round is over."""
        finished = self._groups.finished
        if len(finished) < count or (self.ranks_ends and not self.is_quiet()):
            return None
        ranked = sorted(finished, key=lambda position: (finished[position].end_tick, position))
        return (ranked if self.ranks_ends else list(finished))[:count]

    def free_places(self, steps_left: int, *, new_step: bool) -> int:
        """See `StepSelection`; within a step, groups that were over-sampled make up for dropped ones first."""
        enough = not new_step and len(self._groups) >= self._batch
        return 0 if enough else self._size - len(self._groups)

    def is_quiet(self) -> bool:
        """Whether nothing in flight goes on before the next round."""
        in_flight, engine = self._groups.in_flight.values(), self._suspendable
        return not engine.busy and all(any(name in engine.suspended for name in group.ids) for group in in_flight)

    def begin_step(self) -> None:
        """Begin at tick 0: there finished groups of the last step ended, and unfinished ones go on."""
        for group in self._groups.finished.values():
            group.end_tick = 0
        self._suspendable.begin(self._ticks_a_round if self.ranks_ends else None)

    def next_round(self, *, data_ended: bool) -> bool:
        """See `StepSelection`."""
        if not self.ranks_ends or not self.is_quiet() or (data_ended and not self._groups.in_flight):
            return False
        self._suspendable.more(self._ticks_a_round)
        return True

    async def end_step(self, *, last: bool) -> bool:
        """Stop what the step did not take."""
        await self._suspendable.close()
        return False

    async def start(self, groups: Sequence[OpenGroup], version: int) -> None:
        """Start groups at the present tick."""
        for group in groups:
            group.start_tick = self._suspendable.start
            if not (self.ranks_ends and group.by_plugin):
                self._suspendable.watch(group.ids)

    async def replay(self, group: OpenGroup) -> None:
        """See `StepSelection`."""
        group.of_earlier_step = group.record.newest < group.version
        ticks = {} if group.of_earlier_step else group.record.ticks
        await asyncio.gather(*(self._suspendable.pass_time(name, ticks.get(name, 0)) for name in group.ids))

    def ended(self, group: OpenGroup, generated: Group | None) -> None:
        """See `StepSelection`; a group that was not watched ended after the tokens of its longest sample."""
        tick = self._suspendable.forget(group.ids)
        if tick is None and generated is not None:
            sampled = (sum(version >= 0 for version in sample.weight_versions) for sample in generated.samples)
            tick = group.start_tick + max(sampled, default=0)
        group.end_tick = 0 if group.of_earlier_step else tick or 0
