"""Prompts in, finished groups out: the only rollout loop, for on-policy and for asynchronous runs.

    source.next -> issue (ledger) -> generate -> check -> score -> finish (ledger) -> kept -> take
                                        |                   |
                                        `--- drop(reason) --'   a dropped group's place goes to the next prompt

One number bounds the waiting: a prompt starts only while issued-but-untrained groups are fewer than
``(max_staleness + 1) * rollout_batch_size``. At 0 nothing runs ahead of training.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Protocol, Self

from slime_core.errors import PluginError, SlimeError
from slime_core.rollout.check import check_group, issued_ids
from slime_core.rollout.pending import pending_group
from slime_core.rollout.score import score_group
from slime_core.types import Drop, Group, Prompt, Sample

if TYPE_CHECKING:
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.protocols import Ledger

P = ParamSpec("P")


class Source(Protocol):
    """Where prompts come from, in the run's order."""

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer only where the source has ended for good."""
        ...


@dataclass(slots=True)
class Counts:
    """What happened since the last :meth:`Collector.take`."""

    issued: int = 0  # groups
    drops: Counter[str] = field(default_factory=Counter)  # samples by reason
    tokens: int = 0  # response tokens of kept and dropped groups


class Collector:
    """Keeps groups in flight and hands them over in order.

    In ``lockstep`` groups are taken in prompt order, so a run is a function of its seed; in ``free`` as they finish,
    but never past one that would grow older than ``max_staleness``.
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
        self._flying: dict[int, int] = {}  # position -> version it was issued under
        self._kept: dict[int, Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._filling = asyncio.Lock()
        self._error: BaseException | None = None
        self.counts = Counts()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self, count: int) -> list[Group]:
        """The next ``count`` kept groups, in prompt order; waits for them.

        Raises:
            SlimeError: whatever a group's generation or reward ran into.
        """
        await self._fill()
        while (ready := self._ready(count)) is None:
            if self._error is None and all(task.done() for task in self._tasks):
                raise SlimeError(
                    f"the data ended with {len(self._kept)} of the {count} groups that a step needs", code="DAT28"
                )
            await self._wait()
        self._taken += len(ready)
        return [self._kept.pop(position) for position in ready]

    async def drain(self) -> None:
        """Wait until nothing is in flight (lockstep does so before new weights are loaded)."""
        while self._flying:
            await self._wait()

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

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error

    def _ready(self, count: int) -> list[int] | None:
        positions = sorted(self._kept)[:count]
        if self._lockstep:
            oldest = min(self._flying, default=None)
        else:
            due = self._ctx.version - (self._ahead - 1)
            oldest = min((p for p, version in self._flying.items() if version <= due), default=None)
        if len(positions) < count or (oldest is not None and oldest < positions[-1]):
            return None
        return positions

    async def _fill(self) -> None:
        async with self._filling:
            limit = min(self._ahead, self._steps_left) * self._batch
            wanted = limit - self._open
            if wanted <= 0:
                return
            groups = [pending_group(prompt, self._ctx.config) for prompt in self._source.next(wanted)]
            self._open += len(groups)
            await self._ledger.issue(groups)
            self.counts.issued += len(groups)
            self._launch(groups)

    def _launch(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._flying[group.prompt.position] = self._ctx.version
        whole = [g for g in groups if self._plugins.replaces_rollout(g.prompt.task, self._ctx.config)]
        if whole:
            self._spawn(self._run_whole, whole, self._ctx)
        for group in groups:
            if group not in whole:
                self._spawn(self._run_group, group, self._ctx)

    def _spawn(self, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> None:
        task = asyncio.create_task(self._guarded(work, *args, **kwargs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
            check_group(group, issued[group.prompt.position], self._vocab_size)
        await asyncio.gather(*(self._keep(group) for group in done))  # together, so that they share a commit

    async def _run_group(self, group: Group, ctx: Context) -> None:
        try:
            ids = issued_ids(group)
            group_ctx = replace(ctx, sampling=self._plugins.sampling(group.prompt, ctx))
            done = await self._plugins.generate(group, group_ctx)
            check_group(done, ids, self._vocab_size)
            scored = await score_group(done, self._plugins, group_ctx)
        except PluginError:
            if ctx.config.rollout.on_plugin_error == "fail":
                raise
            await self._discard(group, group.samples, Drop(reason="plugin_error"))
            return
        for samples, drop in scored.drops:
            await self._ledger.drop(samples, drop)
            self.counts.drops[drop.reason] += len(samples)
        if scored.group is None:
            await self._discard(group, [], Drop(reason=""))
        else:
            await self._keep(scored.group)

    async def _keep(self, group: Group) -> None:
        await self._ledger.finish(group)
        self.counts.tokens += sum(sample.response_length for sample in group.samples)
        self._kept[group.prompt.position] = group
        del self._flying[group.prompt.position]

    async def _discard(self, group: Group, samples: list[Sample], drop: Drop) -> None:
        """Free the group's place, and let the next prompt take it."""
        if samples:
            await self._ledger.drop(samples, drop)
            self.counts.drops[drop.reason] += len(samples)
        del self._flying[group.prompt.position]
        self._open -= 1
        await self._fill()
