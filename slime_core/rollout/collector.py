"""The only rollout loop: a collector keeps groups in flight and hands finished ones to training, a step at a time.

    source -> issue -> generate -> check -> score -> finish -> take -> train -> admit
                 `------------ in flight -------------'   |         the next version's prompts start
                                |                         `- not taken: the next step's, or dropped (over-sampling)
                                |- dropped with a reason: the next prompt starts in its place
                                `- stale: begun again, or dropped

`issue`, `finish` and every drop are recorded in the ledger. A prompt starts only while the groups that are issued and
not yet trained are fewer than ``(max_staleness + 1) * rollout_batch_size``; at 0 nothing runs ahead of training.
Which groups a step takes is a `StepSelection`: `InOrder`, `AsFinished`, `OverSampling` or `PartialRollout`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec

from slime_core.errors import PluginError, SlimeError
from slime_core.rollout.filters import PLUGIN, DropLimit
from slime_core.rollout.groups import (
    Counts,
    GroupSource,
    OpenGroup,
    OpenGroups,
    Source,
    check_group,
    issued_adapters,
    issued_ids,
)
from slime_core.rollout.over_sampling import OVER_SAMPLED, OverSampling
from slime_core.rollout.partial_rollout import PartialRollout, mask_older, version_metrics
from slime_core.rollout.recovery import ResumableSource, can_reuse, stored_group
from slime_core.rollout.score import score_group
from slime_core.rollout.staleness import RESTARTED, STALE, Staleness, version_span
from slime_core.rollout.step_selection import AsFinished, InOrder, StepSelection
from slime_core.rollout.suspendable_engine import SuspendableEngine
from slime_core.types import Drop, Group

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.protocols import Drops, Ledger
    from slime_core.types import Completion

P = ParamSpec("P")


class Collector(GroupSource):
    """Keeps groups in flight and hands over finished ones.

    ``note`` gets sentences for people. ``resumed``: an earlier process may have issued groups; ``saved`` is the
    checkpoint's :meth:`state`, if any.
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
        rollout = ctx.config.rollout
        self._ledger, self._plugins, self._vocab_size, self._steps_left = ledger, plugins, vocab_size, steps
        self._groups = OpenGroups()
        self._in_flight, self._finished = self._groups.in_flight, self._groups.finished
        self._tasks, self._filling = Tasks(), asyncio.Lock()
        self._staleness = Staleness(ctx.config, self._groups)
        self._selection = self._step_selection(ctx)
        self._ctx = replace(ctx, engine=self._selection.engine)
        self._source = ResumableSource(source, ledger, saved, resumed=resumed)
        self._drop_limit = DropLimit(rollout.max_dropped_groups, rollout.rollout_batch_size, note)
        if saved is not None:
            self._drop_limit.restore(saved["streak"])
        self.counts = Counts()

    async def __aexit__(self, *error: object) -> None:
        await self._tasks.cancel()

    def _step_selection(self, ctx: Context) -> StepSelection:
        config, rollout, groups = ctx.config, ctx.config.rollout, self._groups
        over_samples = rollout.over_sampling_batch_size > rollout.rollout_batch_size
        if over_samples and not config.train.offline and ctx.engine is not None:
            engine = SuspendableEngine(ctx.engine, ctx.tokenizer, self._tasks.wake)
            if rollout.partial_rollout:
                return PartialRollout(config, groups, engine, self._ledger)
            return OverSampling(config, groups, engine)
        if rollout.async_schedule == "lockstep":
            return InOrder(config, groups, ctx.engine)
        return AsFinished(config, groups, ctx.engine, self._staleness)

    async def take(self, count: int, recorded: Sequence[int] = ()) -> list[Group]:
        """The next ``count`` finished groups, in prompt order; waits for them.

        ``recorded`` are the positions that a journal names: the step is made again, and takes them and no others.

        Raises:
            SlimeError: the first error of any group, DAT28 the data ended, TRN100 too many groups were dropped.
        """
        start, version = time.monotonic(), self._ctx.version
        self._selection.begin_step()
        await self._fill(new_step=True)
        if not recorded:
            self._retire(version)  # finished before a resume that lowered the bound
        while (positions := self._ready(count, recorded)) is None:
            await self._advance(count)
        if not await self._selection.end_step(last=self._steps_left == 1):
            await self._drop_rest(positions)  # a stop may cancel it: until it is done, no group has left
        groups = [self._finished.pop(position).data for position in sorted(positions)]
        self._groups.in_training = len(groups)
        self._drop_limit.step()
        if self._ctx.config.rollout.partial_rollout:
            self.counts.metrics |= version_metrics(groups, version)
        self._staleness.step(groups, version, time.monotonic() - start)
        if not recorded and self._steps_left > 1:
            self._retire(version + 1)
        return groups

    async def drain(self) -> None:
        """Wait until nothing is being issued or generated (in lockstep, before new weights)."""
        while self._filling.locked() or not self._selection.is_quiet():
            await self._tasks.wait()

    def admit(self, version: int) -> None:
        """Let new prompts start: the last step's groups are trained and ``version`` is being served."""
        self._groups.in_training = 0
        self._steps_left -= 1
        self._ctx = replace(self._ctx, version=version)
        if self._ctx.config.rollout.max_staleness:
            self._tasks.spawn(self._fill)

    def pop_counts(self) -> Counts:
        """The counts since the last call."""
        counts, self.counts = self.counts, Counts()
        counts.metrics |= self._staleness.pop_metrics()
        return counts

    def progress(self) -> str:
        """Prompts whose samples are all there, of those that a step takes."""
        needed, tokens = self._ctx.config.rollout.rollout_batch_size, self.counts.tokens
        return f"{min(len(self._finished), needed)} of {needed} prompts finished, {tokens:,} response tokens"

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, JSON-ready: the open groups, and the source's state before the oldest of them."""
        return {**self._source.state([*self._in_flight, *self._finished]), "streak": self._drop_limit.state()}

    def _ready(self, count: int, recorded: Sequence[int]) -> list[int] | None:
        """The positions of the step's groups, None where it must wait."""
        if self._tasks.error is not None:
            return None
        positions = self._selection.first(count, self._ctx.version)
        if not recorded or (positions is None and self._selection.ranks_ends):
            return positions
        return list(recorded) if all(position in self._finished for position in recorded) else None

    async def _advance(self, count: int) -> None:
        """Begin the next round of over-sampling in lockstep where all groups wait for it, else wait for a change."""
        if self._tasks.error is None:
            if self._selection.next_round(data_ended=self._source.ended):
                return await self._fill()
            if self._tasks.idle:
                message = f"the data ended with {len(self._finished)} of the {count} groups that a step needs"
                raise SlimeError(message, code="DAT28")
        await self._tasks.wait()

    async def _fill(self, *, new_step: bool = False) -> None:
        """Start prompts until no place is free or the data ends."""
        async with self._filling:
            count = self._selection.free_places(self._steps_left, new_step=new_step)
            while count > 0 and not self._source.ended:
                groups = await self._source.next(count, self._ctx.config)
                count -= len(groups)
                await self._ledger.issue([group.data for group in groups if group.record.state == "new"])
                self.counts.issued += sum(group.position >= self._source.first_new for group in groups)
                await self._start(groups)
                self._source.started()

    async def _start(self, groups: Sequence[OpenGroup]) -> None:
        config, plugins, selection = self._ctx.config, self._plugins, self._selection
        for group in groups:
            task = group.data.prompt.task
            group.by_plugin = plugins.replaces_rollout(task, config) or plugins.generates_itself(task, config)
        await selection.start(groups, self._ctx.version)
        ctx, together = self._ctx, []
        for group in groups:
            group.version, self._in_flight[group.position] = ctx.version, group
            self._drop_limit.issued(group.position)
            if can_reuse(group.record, ctx.version, ranks_ends=selection.ranks_ends):
                group.task = self._tasks.spawn(self._run_stored, group, ctx)
            elif plugins.replaces_rollout(group.data.prompt.task, config):
                together.append(group)
            else:
                group.task = self._tasks.spawn(self._run, group, ctx)
        shared = self._tasks.spawn(self._run_replaced, together, ctx) if together else None
        for group in together:
            group.task = shared
        self._staleness.watch()

    async def _run(self, group: OpenGroup, ctx: Context) -> None:
        """Generate, check and score a group."""
        ids, adapters = issued_ids(group.data), issued_adapters(group.data, ctx.config)
        try:
            await ctx.prepare_media(group.data.samples)
            group_ctx = replace(ctx, sampling=self._plugins.sampling(group.data.prompt, ctx))
            generated = await self._plugins.generate(group.data, group_ctx)
            if group.stale:
                return  # its requests were stopped
            self._generated(group, generated)
            check_group(generated, ids, self._vocab_size, ctx.media, adapters)
            if ctx.config.rollout.mask_offpolicy_in_partial_rollout:
                mask_older(generated.samples)
            group_ctx = replace(group_ctx, version=self._ctx.version)
            scored, drops = await score_group(generated, self._plugins, group_ctx)
        except PluginError as error:
            if group.stale:
                return
            if self._plugins.ends_run(error, ctx.config):
                raise
            scored, drops = None, [(group.data.samples, Drop(reason=PLUGIN))]
        if scored is None:
            await self._drop(group, drops)
        else:
            await self._finish(group, scored, drops)

    async def _run_replaced(self, groups: list[OpenGroup], ctx: Context) -> None:
        """Let a plugin make these groups, rewards and all (`slime_rollout`)."""
        ids = {group.position: issued_ids(group.data) for group in groups}
        adapters = {group.position: issued_adapters(group.data, ctx.config) for group in groups}
        try:
            for group in groups:
                await ctx.prepare_media(group.data.samples)
            generated = await self._plugins.rollout([group.data for group in groups], ctx)
        except PluginError as error:
            if self._plugins.ends_run(error, ctx.config):
                raise
            for group in groups:
                await self._drop(group, [(group.data.samples, Drop(reason=PLUGIN))])
            return
        for group, result in zip(groups, generated, strict=True):
            self._generated(group, result)
            position = group.position
            check_group(result, ids[position], self._vocab_size, ctx.media, adapters[position])
        finishes = [self._finish(group, result) for group, result in zip(groups, generated, strict=True)]
        await asyncio.gather(*finishes)  # together, so that they share a commit

    async def _run_stored(self, group: OpenGroup, ctx: Context) -> None:
        """Let a group that an earlier process finished or dropped end as it did then."""
        record = group.record
        await self._selection.replay(group)
        again = self._selection.ranks_ends  # it was over-sampled, and is dropped again when its step ends
        rolled_out = ctx.config.rollout.debug_rollout_only and record.last_reason != OVER_SAMPLED
        if record.samples and (record.state != "dropped" or again or rolled_out):
            stored = stored_group(group.data.prompt, record)
            self._plugins.note_judged(stored, ctx.config)
            self._generated(group, stored)
            await self._finish(group, stored)
        else:
            await self._drop(group, [(group.data.samples, Drop(reason=record.last_reason))])

    def _generated(self, group: OpenGroup, generated: Group) -> None:
        group.generated = True
        self._staleness.watch()
        self._selection.ended(group, generated)

    async def _finish(self, group: OpenGroup, scored: Group, drops: Drops = ()) -> None:
        """Store a scored group, which the next steps may take."""
        position, record = group.position, group.record
        if not record.ended:
            await self._ledger.finish(scored, drops)
        elif record.samples:
            scored = stored_group(group.data.prompt, record)  # generated again: what is stored is not replaced
            self._plugins.note_group(scored, self._ctx.config)
        self.counts.add(drops, record)
        self.counts.tokens += sum(sample.response_length for sample in scored.samples)
        self._drop_limit.ended(position, dropped=False)
        group.data, group.samples = scored, scored.samples
        if not group.stale:
            group.version, group.newest = version_span(scored, group.version)
            self._finished[position], group.task = self._in_flight.pop(position), None

    async def _drop(self, group: OpenGroup, drops: Drops) -> None:
        """Drop what is left of a group; the next prompt takes its place."""
        if not group.record.ended:
            await self._ledger.drop(drops)
        self.counts.add(drops, group.record)
        del self._in_flight[group.position]
        self._selection.ended(group, None)
        samples = [sample for dropped, _ in drops for sample in dropped]
        self._drop_limit.dropped(group.position, drops[-1][1].reason, samples)
        if not self._selection.ranks_ends:  # there the next round fills
            await self._fill()

    def _retire(self, version: int) -> None:
        """Begin to stop and replace the groups that are too stale to train at ``version``."""
        for position in self._staleness.overdue(version):
            if position in self._finished:
                self._in_flight[position] = self._finished.pop(position)
            self._in_flight[position].stale = True
            self._tasks.spawn(self._replace_stale, self._in_flight[position])

    async def _replace_stale(self, group: OpenGroup) -> None:
        """Stop a stale group; begin it again as its next attempt, or drop it and start the next prompt."""
        partial: Sequence[Completion] = ()
        alone = all(other is group or other.task is not group.task for other in self._in_flight.values())
        if group.task is not None:
            if alone and not group.generated and self._ctx.engine is not None:
                partial = await self._ctx.engine.abort(group.ids)
                group.task.cancel()
            await asyncio.gather(group.task, return_exceptions=True)  # one that is being scored is not cut short
        if self._in_flight.get(group.position) is not group:
            return  # a filter dropped it meanwhile
        self._staleness.give_up(group, partial)
        if self._staleness.restarts:
            attempt, without_successor = group.next_attempt(self._ctx.config)
            await self._ledger.drop([(without_successor, Drop(reason=RESTARTED))])
            await self._ledger.issue([attempt.data])
            self.counts.add([(group.samples, Drop(reason=RESTARTED))])
            return await self._start([attempt])
        drops = [(group.samples, Drop(reason=STALE))]
        await self._ledger.drop(drops)
        self.counts.add(drops)
        del self._in_flight[group.position]
        self._drop_limit.ended(group.position, dropped=None)
        await self._fill()

    async def _drop_rest(self, positions: Sequence[int]) -> None:
        """Drop what a step with over-sampling did not take: it has stopped."""
        while self._tasks.error is not None or any(group.generated for group in self._in_flight.values()):
            await self._tasks.wait()  # it is being scored; no reward is asked in vain, no ledger's entry cut short
        in_flight = list(self._in_flight.values())
        await self._tasks.cancel([group.task for group in in_flight if group.task is not None])
        finished = [group for position, group in self._finished.items() if position not in positions]
        rest = sorted(in_flight + finished, key=lambda group: group.position)
        drops = [(group.samples, Drop(reason=OVER_SAMPLED)) for group in rest]
        await self._ledger.drop(drops)
        self.counts.add(drops)
        for group in rest:
            self._selection.ended(group, None)
            self._in_flight.pop(group.position, None)
            self._finished.pop(group.position, None)
            self._drop_limit.ended(group.position, dropped=None)


class Tasks:
    """Tasks whose ends and errors wake whoever is in :meth:`wait`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None  # the first
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether nothing runs."""
        return all(task.done() for task in self._running)

    def wake(self) -> None:
        """End :meth:`wait`."""
        self._changed.set()

    def spawn(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> asyncio.Task[None]:
        """Run ``work`` concurrently."""
        task = asyncio.create_task(self._guarded(work, *args, **kwargs))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def wait(self) -> None:
        """Wait until a task ends or :meth:`wake` is called; raises the first error of any task."""
        if self.error is None:
            await self._changed.wait()
            self._changed.clear()
        if self.error is not None:
            raise self.error

    async def cancel(self, tasks: Iterable[asyncio.Task[None]] | None = None) -> None:
        """Cancel these tasks, or all, and wait for their end; errors that they end with are dropped."""
        cancelled = list(self._running if tasks is None else tasks)
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        self.error = None

    async def _guarded(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            await work(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.error = self.error or error
        finally:
            self._changed.set()
