"""Collector of finished groups: the only rollout loop, for on-policy and for asynchronous runs.

    source.next -> issue (ledger) -> generate -> check -> score -> finish (ledger) -> kept -> take
                                        |                   |                           `- surplus: next step, or drop
                                        `--- drop(reason) --'   a dropped group's place goes to the next prompt

One number bounds the waiting: a prompt starts only while issued-but-untrained groups are fewer than
``(max_staleness + 1) * rollout_batch_size``. At 0 nothing runs ahead of training. With over-sampling the number is
``over_sampling_batch_size`` at the start of a step; the rest makes up for dropped groups (`rollout.over_sampling`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from slime_core.errors import PluginError, SlimeError
from slime_core.rollout.groups import Counts, GroupSource, InFlight, Source, check_group, issued_ids, pending_group
from slime_core.rollout.over_sampling import OVER_SAMPLED, OverSampling, version_metrics
from slime_core.rollout.partial_rollout import SuspendableEngine
from slime_core.rollout.recovery import Recovery, stands, stored_group
from slime_core.rollout.score import PLUGIN, DropLimit, ScoredGroup, score_group
from slime_core.rollout.staleness import RESTARTED, STALE, Staleness, mask_older
from slime_core.types import Drop, Group

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.protocols import Drops, Engine, GroupRecord, Ledger

P = ParamSpec("P")


class Collector(GroupSource):
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
        self._in_flight: dict[int, InFlight] = {}  # by position
        self._kept: dict[int, Group] = {}  # by position, in the order in which they finished
        self._tasks = Tasks()
        self._staleness = Staleness(ctx.config)
        self._filling = asyncio.Lock()
        self._ended = False  # the source has
        self._drop_limit = DropLimit(rollout.max_dropped_groups, self._batch, note)
        self._selection: OverSampling | None = None
        over, supervised = rollout.over_sampling_batch_size > self._batch, ctx.config.train.loss_type == "sft_loss"
        if over and not supervised and ctx.engine is not None:
            engine = SuspendableEngine(ctx.engine, ctx.tokenizer, self._tasks.stir)
            self._selection = OverSampling(ctx.config, engine)
            self._ctx = replace(ctx, engine=cast("Engine", engine))
        self.counts = Counts()
        self._recovery = Recovery(ledger, saved) if resumed or saved is not None else None
        self._recorded = self._recovery.issued if self._recovery is not None else 0  # positions below it, by then
        self._issued = self._recorded  # positions below it have begun
        self._marks: deque[dict[str, Any]] = deque()  # states of the source before it was asked, to the oldest open
        if saved is not None:
            source.restore(saved["source"])
            self._drop_limit.restore(saved["streak"])

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.cancel()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-ready: the open groups, and where the data source stood before them."""
        open_ = sorted({*self._in_flight, *self._kept})
        oldest = min(open_, default=self._issued)
        while len(self._marks) > 1 and self._marks[1]["position"] <= oldest:
            self._marks.popleft()
        source = self._marks[0] if self._marks else self._source.state()
        return {"source": source, "issued": self._issued, "open": open_, "streak": self._drop_limit.state()}

    async def take(self, count: int, forced: Sequence[int] = ()) -> list[Group]:
        """The next ``count`` kept groups, in prompt order; waits for them.

        ``forced`` are positions that a journal names: the step is made again, and takes them and no others.

        Raises:
            SlimeError: what a group's generation or reward ran into, DAT28 the data ended, TRN100 too many dropped.
        """
        start, version = time.monotonic(), self._ctx.version
        if self._selection is not None:
            self._selection.begin()
        await self._fill(new_step=True)
        if not forced:
            self._retire(version)  # it was kept under other settings, before the run went on
        while (ready := self._ready(count, forced)) is None:
            self._require_supply(count)
            await self._go_on()
        if self._selection is not None:
            await self._cut(self._selection, ready)  # a stop may end it: until it is done, nothing was handed over
        self._taken += len(ready)
        groups = [self._kept.pop(position) for position in sorted(ready)]
        self._drop_limit.step()
        if self._ctx.config.rollout.partial_rollout:
            self.counts.metrics |= version_metrics(groups, version)
        self._staleness.took(groups, version, time.monotonic() - start)
        if not forced and self._steps_left > 1:
            self._retire(version + 1)
        return groups

    async def drain(self) -> bool:
        """Wait until nothing is in flight or being issued, or all stands still (before new weights in lockstep)."""
        in_flight = self._in_flight
        while self._filling.locked() or (
            in_flight and not (self._selection and self._selection.quiet(in_flight.values()))
        ):
            await self._tasks.wait()
        return True

    def admit(self, version: int) -> None:
        """Say that the taken groups are trained and ``version`` is being served: new prompts may start."""
        self._open -= self._taken
        self._taken = 0
        self._steps_left -= 1
        self._ctx = replace(self._ctx, version=version)
        if self._ahead > 1:
            self._tasks.spawn(self._fill)

    def pop_counts(self) -> Counts:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counts()
        counts.metrics |= self._staleness.pop_metrics(self._in_flight.values())
        return counts

    async def _go_on(self) -> None:
        """Wait, or begin the next round of over-sampling in lockstep."""
        selection = self._selection
        quiet = selection is not None and selection.lockstep and selection.quiet(self._in_flight.values())
        if selection is not None and quiet and self._tasks.error is None:
            selection.more()
            await self._fill()
        else:
            await self._tasks.wait()

    def _ready(self, count: int, forced: Sequence[int] = ()) -> list[int] | None:
        if self._selection is not None:
            ready = None if self._tasks.error else self._selection.first(self._kept, self._in_flight.values(), count)
            if not forced or (ready is None and self._selection.lockstep):
                return ready
        if forced:
            return list(forced) if all(position in self._kept for position in forced) else None
        if not self._lockstep:
            return self._staleness.ready(self._kept, self._in_flight, self._ctx.version)
        positions, oldest = sorted(self._kept)[:count], min(self._in_flight, default=None)
        if len(positions) < count or (oldest is not None and oldest < positions[-1]):
            return None
        return positions

    def _require_supply(self, count: int) -> None:
        """Raises SlimeError DAT28 where the data ended and what is in flight cannot fill the step."""
        if self._selection is None:
            over = self._tasks.over
        else:
            round_to_come = self._selection.lockstep and not self._ended
            fills = self._filling.locked() or round_to_come
            over = len(self._kept) + len(self._in_flight) < count and not fills
        if self._tasks.error is None and over:
            message = f"the data ended with {len(self._kept)} of the {count} groups that a step needs"
            raise SlimeError(message, code="DAT28")

    def _wanted(self, new_step: bool) -> int:
        """Prompts that may start now."""
        if self._selection is None:
            return min(self._ahead, self._steps_left) * self._batch - self._open
        if not new_step and self._open >= self._batch:
            return 0  # the surplus makes up for what was dropped
        return self._selection.size - self._open

    async def _fill(self, *, new_step: bool = False) -> None:
        async with self._filling:
            count = self._wanted(new_step)
            while count > 0 and not self._ended:
                self._marks.append(self._source.state())
                prompts = self._source.next(count)
                self._ended = len(prompts) < count
                recovery = self._recovery
                open_prompts = [p for p in prompts if recovery is None or not recovery.closed(p.position)]
                groups = [pending_group(prompt, self._ctx.config) for prompt in open_prompts]
                recalled = await recovery.of(groups) if recovery is not None and groups else {}
                groups = [
                    g for g in groups if g.prompt.position not in recalled or not recalled[g.prompt.position].version
                ]
                self._open += len(groups)
                count -= len(groups)
                await self._ledger.issue([g for g in groups if g.prompt.position not in recalled])
                self.counts.issued += sum(g.prompt.position >= self._recorded for g in groups)
                await self._launch(groups, recalled)
                self._issued = max([self._issued, *(prompt.position + 1 for prompt in prompts)])

    async def _launch(self, groups: Sequence[Group], recalled: Mapping[int, GroupRecord]) -> None:
        config, by_plugin = self._ctx.config, self._plugins.generates_itself
        if self._selection is not None and recalled:
            ids = [sample.id for group in groups for sample in group.samples if group.prompt.position in recalled]
            self._selection.engine.remember(await self._ledger.suspended(ids, self._ctx.version))
        stored, whole, ranked = [], [], self._selection is not None and self._selection.lockstep
        for group in groups:
            position = group.prompt.position
            flight = InFlight(group.prompt, list(group.samples), self._ctx.version, past=recalled.get(position))
            self._in_flight[position] = flight
            self._drop_limit.issued(position)
            replaced = self._plugins.replaces_rollout(group.prompt.task, config)
            if flight.past is not None and stands(flight.past, self._ctx.version, ranked=ranked):
                stored.append(group)
            elif replaced:
                whole.append(group)
            if self._selection is not None:
                self._selection.enter(flight, by_plugin=replaced or by_plugin(group.prompt.task, config))
        if whole:
            task = self._tasks.spawn(self._run_whole, whole, self._ctx)
            for group in whole:
                self._in_flight[group.prompt.position].task = task
        for group in groups:
            if group not in whole:
                run = self._run_stored if group in stored else self._run_group
                self._in_flight[group.prompt.position].task = self._tasks.spawn(run, group, self._ctx)
        self._staleness.watch(self._in_flight.values())

    async def _run_whole(self, groups: list[Group], ctx: Context) -> None:
        issued = {group.prompt.position: issued_ids(group) for group in groups}
        try:
            done = await self._plugins.rollout(groups, ctx)
        except PluginError as error:
            if self._plugins.ends_run(error, ctx.config):
                raise
            done = []
        for group in [] if done else groups:
            await self._discard(group, [(group.samples, Drop(reason=PLUGIN))])
        for group in done:
            self._generated(group)
            check_group(group, issued[group.prompt.position], self._vocab_size)
        await asyncio.gather(*(self._keep(group) for group in done))  # together, so that they share a commit

    async def _run_group(self, group: Group, ctx: Context) -> None:
        ids, flight = issued_ids(group), self._in_flight[group.prompt.position]
        try:
            group_ctx = replace(ctx, sampling=self._plugins.sampling(group.prompt, ctx))
            done = await self._plugins.generate(group, group_ctx)
            if flight.stale:
                return  # its requests were stopped
            self._generated(done)
            check_group(done, ids, self._vocab_size)
            if ctx.config.rollout.mask_offpolicy_in_partial_rollout:
                mask_older(done.samples)
            scored = await score_group(done, self._plugins, replace(group_ctx, version=self._ctx.version))
        except PluginError as error:
            if flight.stale:
                return
            if self._plugins.ends_run(error, ctx.config):
                raise
            scored = ScoredGroup(group=None, drops=[(group.samples, Drop(reason=PLUGIN))])
        if scored.group is None:
            await self._discard(group, scored.drops)
        else:
            await self._keep(scored.group, scored.drops)

    async def _run_stored(self, group: Group, ctx: Context) -> None:
        """A group that an earlier process finished or dropped takes its place again."""
        flight = self._in_flight[group.prompt.position]
        assert flight.past is not None
        if self._selection is not None:
            await self._selection.repeat(flight, flight.past, ctx.version)
        surplus = self._selection is not None and self._selection.lockstep  # the cut drops it again, in its time
        rolled_out = ctx.config.rollout.debug_rollout_only and flight.past.last_reason != OVER_SAMPLED
        if flight.past.samples and (flight.past.state != "dropped" or surplus or rolled_out):
            done = stored_group(group.prompt, flight.past)
            self._generated(done)
            await self._keep(done)
        else:
            await self._discard(group, [(group.samples, Drop(reason=flight.past.last_reason))])

    def _generated(self, group: Group) -> None:
        flight = self._in_flight[group.prompt.position]
        flight.generated = True
        self._staleness.watch(self._in_flight.values())
        if self._selection is not None:
            self._selection.leave(flight, group)

    async def _keep(self, group: Group, drops: Drops = ()) -> None:
        flight = self._in_flight[group.prompt.position]
        position, past = flight.position, flight.past
        if past is None or past.state == "pending":
            await self._ledger.finish(group, drops)
        elif past.samples:
            group = stored_group(group.prompt, past)  # what is stored stands
        self.counts.add(drops, past)
        self.counts.tokens += sum(sample.response_length for sample in group.samples)
        self._drop_limit.kept(position)
        if flight.stale:
            flight.samples = group.samples
            return
        self._kept[position] = group
        self._staleness.kept(position, group, flight.version)
        del self._in_flight[position]

    async def _discard(self, group: Group, drops: Drops) -> None:
        """Drop what is left of a group and free its place, which the next prompt takes."""
        position, past = group.prompt.position, self._in_flight[group.prompt.position].past
        if past is None or past.state == "pending":
            await self._ledger.drop(drops)
        self.counts.add(drops, past)
        flight = self._in_flight.pop(position)
        self._open -= 1
        if self._selection is not None:
            self._selection.leave(flight, None)
        self._drop_limit.dropped(position, drops[-1][1].reason, [sample for samples, _ in drops for sample in samples])
        if self._selection is None or not self._selection.lockstep:
            await self._fill()

    def _retire(self, version: int) -> None:
        """Begin to give up what is too old to train at ``version``: it goes first to what is in flight."""
        for position in self._staleness.overdue(self._kept, self._in_flight, version):
            if (group := self._kept.pop(position, None)) is not None:
                self._in_flight[position] = InFlight(group.prompt, group.samples, version, generated=True)
            self._in_flight[position].stale = True
            self._tasks.spawn(self._give_up, self._in_flight[position])

    async def _give_up(self, flight: InFlight) -> None:
        """Stop a group that is too old; begin it again as its next attempt, or drop it and let the next prompt in."""
        parts: Sequence[Any] = ()
        alone = all(other is flight or other.task is not flight.task for other in self._in_flight.values())
        if flight.task is not None:
            if alone and not flight.generated and self._ctx.engine is not None:
                parts = await self._ctx.engine.abort(flight.ids)
                flight.task.cancel()
            await asyncio.gather(flight.task, return_exceptions=True)  # what is being judged ends in its own time
        if self._in_flight.get(flight.position) is not flight:
            return  # a filter dropped it meanwhile
        self._staleness.give_up(flight, parts)
        if self._staleness.restarts:
            again, siblings = flight.again(self._ctx.config)
            await self._ledger.drop([(siblings, Drop(reason=RESTARTED))])
            await self._ledger.issue([again])
            self.counts.add([(flight.samples, Drop(reason=RESTARTED))])
            await self._launch([again], {})
            return
        drops = [(flight.samples, Drop(reason=STALE))]
        await self._ledger.drop(drops)
        self.counts.add(drops)
        del self._in_flight[flight.position]
        self._open -= 1
        self._drop_limit.left_out(flight.position)
        await self._fill()

    async def _cut(self, selection: OverSampling, positions: Sequence[int]) -> None:
        """Stop what the step did not take; drop it, unless the next step goes on with it."""
        for position in positions:
            selection.drop(position)
        await selection.engine.close()
        if self._ctx.config.rollout.partial_rollout and self._steps_left > 1:
            names = [name for flight in self._in_flight.values() for name in flight.ids]
            await self._ledger.suspend(selection.engine.turns(names))
            return
        while self._tasks.error is not None or any(flight.generated for flight in self._in_flight.values()):
            await self._tasks.wait()  # it is being judged; no reward is asked in vain, no ledger's entry cut short
        flights = list(self._in_flight.values())
        tasks = [flight.task for flight in flights if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.error = None  # a plugin may answer its end with an error; what came before was raised by `wait`
        dropped = {position: group.samples for position, group in self._kept.items() if position not in positions}
        dropped |= {flight.position: flight.samples for flight in flights}
        drops = [(samples, Drop(reason=OVER_SAMPLED)) for _, samples in sorted(dropped.items())]
        await self._ledger.drop(drops)
        self.counts.add(drops)
        for flight in flights:
            selection.leave(flight, None)
        self._in_flight.clear()
        for position in sorted(dropped):
            self._kept.pop(position, None)
            selection.drop(position)
            self._open -= 1
            self._drop_limit.left_out(position)


class Tasks:
    """Tasks whose ends and errors wake whoever is in :meth:`wait`.

    Example:
        tasks = Tasks()
        tasks.spawn(work, group)
        await tasks.wait()          # until one ended, or `stir` was called; raises what went wrong
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None  # the first
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing runs any more."""
        return all(task.done() for task in self._running)

    def stir(self) -> None:
        """Wake who waits."""
        self._changed.set()

    def spawn(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[None]:
        """Run ``work`` beside everything else."""
        task = asyncio.create_task(self._guarded(work, *args, **kwargs))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def wait(self) -> None:
        """Until something happened; raises the first error of any task."""
        if self.error is not None:
            raise self.error
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error

    async def cancel(self) -> None:
        """End everything."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _guarded(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await work(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._changed.set()
