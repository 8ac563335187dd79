"""Prompts in, finished groups out: the only rollout loop, for on-policy and for asynchronous runs.

    source.next -> issue (ledger) -> generate -> check -> score -> finish (ledger) -> kept -> take
                                        |                   |                           `- surplus: next step, or drop
                                        `--- drop(reason) --'   a dropped group's place goes to the next prompt

One number bounds the waiting: a prompt starts only while issued-but-untrained groups are fewer than
``(max_staleness + 1) * rollout_batch_size``. At 0 nothing runs ahead of training. With over-sampling the number is
``over_sampling_batch_size`` at the start of a step; the surplus makes up for dropped groups, and new prompts start
where it is used up (`rollout.surplus` says which groups a step then takes).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, cast

from slime_core.errors import PluginError, SlimeError
from slime_core.rollout.check import check_group, issued_ids
from slime_core.rollout.gate import Gate
from slime_core.rollout.pending import pending_group
from slime_core.rollout.recall import Marks, Memory, later, stored_group
from slime_core.rollout.score import Scored, score_group
from slime_core.rollout.streak import Streak
from slime_core.rollout.supply import Counts, Source
from slime_core.rollout.surplus import OVER_SAMPLED, Flight, Race, mask_older, version_metrics
from slime_core.types import Drop, Group

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.protocols import Drops, Engine, Ledger, Recalled

P = ParamSpec("P")


class Collector:
    """Keeps groups in flight and hands them over in order.

    In ``lockstep`` groups are taken in prompt order, so a run is a function of its seed; in ``free`` as they finish,
    but never past one that would grow older than ``max_staleness``. ``note`` gets sentences for people. A run that
    goes on says ``resumed``: the ledger may know of groups; ``saved`` is its checkpoint's :meth:`state`, if any.
    """

    def __init__(
        self,
        *,
        source: Source,
        ledger: Ledger,
        plugins: Plugins,
        ctx: Context,
        vocab_size: int,
        steps: int,
        note: Callable[[str], None] = lambda text: None,
        resumed: bool = False,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._source, self._ledger, self._plugins, self._ctx = source, ledger, plugins, ctx
        self._vocab_size = vocab_size
        rollout = ctx.config.rollout
        self._batch = rollout.rollout_batch_size
        self._ahead = rollout.max_staleness + 1
        self._lockstep = rollout.async_schedule == "lockstep"
        self._steps_left = steps
        self._open = 0  # issued and not yet trained or dropped
        self._taken = 0  # of those, handed over for the step in training
        self._flying: dict[int, Flight] = {}  # by position
        self._kept: dict[int, Group] = {}  # by position, in the order in which they finished
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._filling = asyncio.Lock()
        self._ended = False  # the source has
        self._error: BaseException | None = None
        self._streak = Streak(rollout.max_dropped_groups, self._batch, note)
        self._race: Race | None = None
        over, supervised = rollout.over_sampling_batch_size > self._batch, ctx.config.train.loss_type == "sft_loss"
        if over and not supervised and ctx.engine is not None:
            gate = Gate(ctx.engine, ctx.tokenizer, self._changed.set)
            self._race, self._ctx = Race(ctx.config, gate), replace(ctx, engine=cast("Engine", gate))
        self.counts = Counts()
        self._memory = Memory(ledger, saved, known=resumed)
        self._marks = Marks()
        self._issued = self._memory.issued  # positions below it have begun
        if saved is not None:
            source.restore(saved["source"])
            self._streak.restore(saved["streak"])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-ready: the open groups, and where the data source stood before them."""
        open_ = sorted({*self._flying, *self._kept})
        source = self._marks.before(min(open_, default=self._issued)) or self._source.state()
        return {"source": source, "issued": self._issued, "open": open_, "streak": self._streak.state()}

    async def take(self, count: int, forced: Sequence[int] = ()) -> list[Group]:
        """The next ``count`` kept groups, in prompt order; waits for them.

        ``forced`` are positions that a journal names: the step is made again, and takes them and no others.

        Raises:
            SlimeError: whatever a group's generation or reward ran into; DAT28 the data ended, TRN100 too many groups
                were dropped in a row.
        """
        if self._race is not None:
            self._race.begin()
        await self._fill(new_step=True)
        while (ready := self._ready(count, forced)) is None:
            self._require_supply(count)
            await self._go_on()
        self._taken += len(ready)
        groups = [self._kept.pop(position) for position in sorted(ready)]
        self._streak.step()
        if self._race is not None:
            await self._cut(self._race, ready)
        if self._ctx.config.rollout.partial_rollout:
            self.counts.metrics |= version_metrics(groups, self._ctx.version)
        return groups

    async def drain(self) -> bool:
        """Wait until nothing is in flight, or all that is stands still (before new weights are loaded in lockstep)."""
        while self._flying and not (self._race is not None and self._race.quiet(self._flying.values())):
            await self._wait()
        return True

    def admit(self, version: int) -> None:
        """Say that the taken groups are trained and ``version`` is being served: new prompts may start."""
        self._open -= self._taken
        self._taken = 0
        self._steps_left -= 1
        self._ctx = replace(self._ctx, version=version)
        if self._ahead > 1:
            self._spawn(self._fill)

    def pop_counts(self) -> Counts:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    async def _go_on(self) -> None:
        """Wait, or begin the next round of a race in lockstep."""
        race = self._race
        if race is not None and race.lockstep and race.quiet(self._flying.values()) and self._error is None:
            race.more()
            await self._fill()
        else:
            await self._wait()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error

    def _ready(self, count: int, forced: Sequence[int] = ()) -> list[int] | None:
        if self._race is not None:
            ready = None if self._error else self._race.first(self._kept, self._flying.values(), count)
            if not forced or (ready is None and self._race.lockstep):
                return ready
        if forced:
            return list(forced) if all(position in self._kept for position in forced) else None
        positions = sorted(self._kept)[:count]
        if self._lockstep:
            oldest = min(self._flying, default=None)
        else:
            due = self._ctx.version - (self._ahead - 1)
            oldest = min((p for p, flight in self._flying.items() if flight.version <= due), default=None)
        if len(positions) < count or (oldest is not None and oldest < positions[-1]):
            return None
        return positions

    def _require_supply(self, count: int) -> None:
        """Raises SlimeError DAT28 where the data ended and what is in flight cannot fill the step."""
        if self._race is None:
            over = all(task.done() for task in self._tasks)
        else:
            short = len(self._kept) + len(self._flying) < count
            over = short and not self._filling.locked() and not self._may_fill()
        if self._error is None and over:
            raise SlimeError(
                f"the data ended with {len(self._kept)} of the {count} groups that a step needs", code="DAT28"
            )

    def _may_fill(self) -> bool:
        """Whether a lockstep race fills up at its next round."""
        race = self._race
        return race is not None and race.lockstep and not self._ended

    def _wanted(self, new_step: bool) -> int:
        """Prompts that may start now."""
        if self._race is None:
            return min(self._ahead, self._steps_left) * self._batch - self._open
        if not new_step and self._open >= self._batch:
            return 0  # the surplus makes up for what was dropped
        return self._race.size - self._open

    async def _fill(self, *, new_step: bool = False) -> None:
        async with self._filling:
            wanted = self._wanted(new_step)
            while wanted > 0 and not self._ended:
                self._marks.add(self._source.state())
                prompts = self._source.next(wanted)
                self._ended = len(prompts) < wanted
                groups = [pending_group(p, self._ctx.config) for p in prompts if not self._memory.closed(p.position)]
                known = await self._memory.of(groups) if groups else {}
                groups = [g for g in groups if g.prompt.position not in known or not known[g.prompt.position].version]
                self._open += len(groups)
                wanted -= len(groups)
                await self._ledger.issue([g for g in groups if g.prompt.position not in known])
                self.counts.issued += sum(g.prompt.position >= self._memory.issued for g in groups)
                await self._launch(groups, known)
                self._issued = max([self._issued, *(prompt.position + 1 for prompt in prompts)])

    async def _launch(self, groups: Sequence[Group], known: Mapping[int, Recalled]) -> None:
        config, by_plugin = self._ctx.config, self._plugins.generates_itself
        if self._race is not None and known:
            ids = [sample.id for group in groups for sample in group.samples if group.prompt.position in known]
            self._race.gate.remember(await self._ledger.suspended(ids, self._ctx.version))
        stored, whole = [], []
        for group in groups:
            position = group.prompt.position
            flight = Flight(position, list(group.samples), self._ctx.version, past=known.get(position))
            self._flying[position] = flight
            self._streak.issued(position)
            replaced = self._plugins.replaces_rollout(group.prompt.task, config)
            if flight.past is not None and self._stands(flight.past):
                stored.append(group)
            elif replaced:
                whole.append(group)
            if self._race is not None:
                self._race.enter(flight, by_plugin=replaced or by_plugin(group.prompt.task, config))
        if whole:
            task = self._spawn(self._run_whole, whole, self._ctx)
            for group in whole:
                self._flying[group.prompt.position].task = task
        for group in groups:
            if group not in whole:
                run = self._run_stored if group in stored else self._run_group
                self._flying[group.prompt.position].task = self._spawn(run, group, self._ctx)

    def _stands(self, past: Recalled) -> bool:
        """Whether a group is as it was at once; else it runs (again)."""
        ranked = self._race is not None and self._race.lockstep
        return past.state != "pending" and not (ranked and later(past, self._ctx.version))

    def _spawn(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work, *args, **kwargs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await work(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._changed.set()

    async def _run_whole(self, groups: list[Group], ctx: Context) -> None:
        issued = {group.prompt.position: issued_ids(group) for group in groups}
        done = await self._plugins.rollout(groups, ctx)
        for group in done:
            self._generated(group)
            check_group(group, issued[group.prompt.position], self._vocab_size)
        await asyncio.gather(*(self._keep(group) for group in done))  # together, so that they share a commit

    async def _run_group(self, group: Group, ctx: Context) -> None:
        ids = issued_ids(group)
        try:
            group_ctx = replace(ctx, sampling=self._plugins.sampling(group.prompt, ctx))
            done = await self._plugins.generate(group, group_ctx)
            self._generated(done)
            check_group(done, ids, self._vocab_size)
            if ctx.config.rollout.mask_offpolicy_in_partial_rollout:
                mask_older(done.samples)
            scored = await score_group(done, self._plugins, replace(group_ctx, version=self._ctx.version))
        except PluginError:
            if ctx.config.rollout.on_plugin_error == "fail":
                raise
            scored = Scored(group=None, drops=[(group.samples, Drop(reason="plugin_error"))])
        if scored.group is None:
            await self._discard(group, scored.drops)
        else:
            await self._keep(scored.group, scored.drops)

    async def _run_stored(self, group: Group, ctx: Context) -> None:
        """A group that an earlier process finished or dropped takes its place again."""
        flight = self._flying[group.prompt.position]
        assert flight.past is not None
        if self._race is not None:
            await self._race.repeat(flight, flight.past, ctx.version)
        surplus = self._race is not None and self._race.lockstep  # the cut drops it again, in its time
        if flight.past.samples and (flight.past.state != "dropped" or surplus):
            done = stored_group(group.prompt, flight.past)
            self._generated(done)
            await self._keep(done)
        else:
            await self._discard(group, [(group.samples, Drop(reason=flight.past.last_reason))])

    def _generated(self, group: Group) -> None:
        flight = self._flying[group.prompt.position]
        flight.generated = True
        if self._race is not None:
            self._race.leave(flight, group)

    async def _keep(self, group: Group, drops: Drops = ()) -> None:
        position = group.prompt.position
        past = self._flying[position].past
        if past is None or past.state == "pending":
            await self._ledger.finish(group, drops)
        elif past.samples:
            group = stored_group(group.prompt, past)  # what is stored stands
        self._count(drops, past)
        self.counts.tokens += sum(sample.response_length for sample in group.samples)
        self._kept[position] = group
        del self._flying[position]
        self._streak.kept(position)

    async def _discard(self, group: Group, drops: Drops) -> None:
        """Drop what is left of a group and free its place, which the next prompt takes."""
        position = group.prompt.position
        past = self._flying[position].past
        if past is None or past.state == "pending":
            await self._ledger.drop(drops)
        self._count(drops, past)
        flight = self._flying.pop(position)
        self._open -= 1
        if self._race is not None:
            self._race.leave(flight, None)
            self._race.drop(position)
        self._streak.dropped(position, drops[-1][1].reason, [sample for samples, _ in drops for sample in samples])
        if self._race is None or not self._race.lockstep:
            await self._fill()

    def _count(self, drops: Drops, past: Recalled | None = None) -> None:
        if past is not None and past.state != "pending":
            self.counts.drops.update(past.drops)
        else:
            for samples, drop in drops:
                self.counts.drops[drop.reason] += len(samples)

    async def _cut(self, race: Race, taken: Sequence[int]) -> None:
        """Stop what the step did not take; drop it, unless the next step goes on with it."""
        for position in taken:
            race.drop(position)
        await race.gate.close()
        if self._ctx.config.rollout.partial_rollout and self._steps_left > 1:
            names = [name for flight in self._flying.values() for name in flight.ids]
            await self._ledger.suspend(race.gate.turns(names))
            return
        while self._error is not None or any(flight.generated for flight in self._flying.values()):
            await self._wait()  # it is being judged; the reward is not asked in vain, nor a ledger's entry cut short
        flights = list(self._flying.values())
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._error = None  # a plugin may answer its end with an error; what came before was raised by `_wait`
        left = {position: group.samples for position, group in self._kept.items()}
        left |= {flight.position: flight.samples for flight in flights}
        for flight in flights:
            race.leave(flight, None)
        self._flying.clear()
        self._kept.clear()
        for position in sorted(left):
            race.drop(position)
            self._open -= 1
            self._streak.left_out(position)
        drops = [(samples, Drop(reason=OVER_SAMPLED)) for _, samples in sorted(left.items())]
        await self._ledger.drop(drops)
        self._count(drops)
