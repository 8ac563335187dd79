"""What a collector draws from, and what it counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

from slime_core.config.task_section import EvalTask
from slime_core.types import SamplingParams

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.protocols import Drops, Recalled
    from slime_core.types import Group, Prompt


class Source(Protocol):
    """Where prompts come from, in the run's order."""

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts; fewer only where the source has ended for good."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it stands, JSON-ready; ``position`` is the next prompt's."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        ...


class Supply(AbstractAsyncContextManager["Supply"], Protocol):
    """Where a step's groups come from: a collector, or a dump in its place."""

    async def take(self, count: int, forced: Sequence[int] = ()) -> list[Group]:
        """The next step's groups; waits for them."""
        ...

    async def drain(self) -> bool:
        """Wait until nothing is in flight under the old weights."""
        ...

    def admit(self, version: int) -> None:
        """Say that the taken groups are trained and ``version`` is being served."""
        ...

    def pop_counts(self) -> Counts:
        """The counts since the last call."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        ...


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
