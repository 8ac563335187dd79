"""What a collector draws from, what it counts, and what an earlier process left of its groups."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

from slime_core.config.schema import EvalTask
from slime_core.rollout.surplus import OVER_SAMPLED
from slime_core.types import Group, Prompt, SamplingParams

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Drops, Ledger, Recalled


class Source(Protocol):
    """Where prompts come from, in the run's order."""

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer only where the source has ended for good."""

    def state(self) -> dict[str, Any]:
        """Where it stands, JSON-ready; ``position`` is the next prompt's."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""


class Supply(AbstractAsyncContextManager["Supply"], Protocol):
    """Where a step's groups come from: a collector, or a dump in its place."""

    async def take(self, count: int, forced: Sequence[int] = ()) -> list[Group]:
        """The next step's groups; waits for them."""

    async def drain(self) -> bool:
        """Wait until nothing is in flight under the old weights."""

    def admit(self, version: int) -> None:
        """Say that the taken groups are trained and ``version`` is being served."""

    def pop_counts(self) -> Counts:
        """The counts since the last call."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""


@dataclass(slots=True)
class Counts:
    """What happened since the last :meth:`Collector.take`."""

    issued: int = 0  # groups
    drops: Counter[str] = field(default_factory=Counter)  # samples by reason
    tokens: int = 0  # response tokens of kept and dropped groups
    metrics: dict[str, float] = field(default_factory=dict)  # of the groups that were taken

    def add(self, drops: Drops, past: Recalled | None = None) -> None:
        """Count drops, or those that an earlier process recorded."""
        if past is not None and past.state != "pending":
            self.drops.update(past.drops)
            return
        for samples, drop in drops:
            self.drops[drop.reason] += len(samples)


class Memory:
    """What ledger and checkpoint say of groups that were issued before this process began, for a collector.

        closed             nothing to do             pending    generated again, as the same attempt
        finished, dropped  as it was                 unknown    it is new

    ``state`` is the collector's part of a checkpoint, None at the start of a stage.

    Example:
        memory = Memory(ledger, saved, known=True)
        found = await memory.of(groups)          # position -> Recalled, for groups that were issued before
    """

    def __init__(self, ledger: Ledger, state: Mapping[str, Any] | None, *, known: bool) -> None:
        self._ledger = ledger
        self._known = known  # whether the ledger may know of groups that come
        self.issued = int(state["issued"]) if state else 0  # positions below it were issued before the checkpoint
        self._open = set(state["open"]) if state else set()  # and these of them were not trained or dropped then

    def closed(self, position: int) -> bool:
        """Whether the group was trained or dropped before the checkpoint."""
        return position < self.issued and position not in self._open

    async def of(self, groups: Sequence[Group]) -> dict[int, Recalled]:
        """What is known of these groups, by position; the attempt is noted on their samples."""
        if not self._known:
            return {}
        found = await self._ledger.recall([group.prompt.id for group in groups])
        self._known = bool(found) or groups[-1].prompt.position < self.issued
        known = {group.prompt.position: found[group.prompt.id] for group in groups if group.prompt.id in found}
        for group in groups:
            if group.prompt.position in known:
                for sample in group.samples:
                    sample.attempt = known[group.prompt.position].attempt
        return known


def stands(found: Recalled, version: int, *, ranked: bool) -> bool:
    """Whether a group is as it was at once, or runs (again).

    Where the order in which groups end matters (``ranked``: over-sampling in lockstep), a group that ended in a later
    step than that of ``version``, or at a moment that nobody noted, runs again under the weights of that time, and
    gives what it gave; what is stored stands.
    """
    unnoted = found.last_reason == OVER_SAMPLED and not found.samples
    return found.state != "pending" and not (ranked and (found.newest > version or unnoted))


def stored_group(prompt: Prompt, found: Recalled) -> Group:
    """The finished group as the ledger has it."""
    rollouts: dict[int, list[int]] = {}
    for place, sample in enumerate(found.samples):
        assert sample.rollout_id is not None, f"{sample.id} was stored without a rollout"
        rollouts.setdefault(sample.rollout_id, []).append(place)
    return Group(prompt=prompt, samples=found.samples, rollouts=rollouts)


class Marks:
    """Where the data source stood before each time it was asked, back to the oldest group that is still open."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, dict[str, Any]]] = deque()

    def add(self, state: dict[str, Any]) -> None:
        """The source's state before it is asked."""
        self._marks.append((int(state["position"]), state))

    def before(self, position: int) -> dict[str, Any] | None:
        """The last state at or before a position; earlier ones are forgotten."""
        while len(self._marks) > 1 and self._marks[1][0] <= position:
            self._marks.popleft()
        return self._marks[0][1] if self._marks else None


P = ParamSpec("P")


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


def training_params(config: Config) -> SamplingParams:
    """How training samples are drawn, before `slime_sampling` has its say."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )


def evaluation_params(config: Config, task: EvalTask | None = None) -> SamplingParams:
    """How evaluation samples are drawn, before `slime_sampling` has its say; a set's own keys come first."""
    section, rollout = config.eval, config.rollout
    own = task or EvalTask(name="default")
    return SamplingParams(
        max_new_tokens=own.max_response_len or section.eval_max_response_len or rollout.rollout_max_response_len,
        temperature=own.temperature if own.temperature >= 0 else section.eval_temperature,
        top_p=own.top_p or section.eval_top_p,
        top_k=own.top_k if own.top_k >= 0 else section.eval_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )
