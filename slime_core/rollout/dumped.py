"""A dump in the place of a collector: nothing is generated, ledger and loop see a step like any other.

dump.groups(version + 1) -> issue, finish (ledger) -> take
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from slime_core.rollout.supply import Counts
from slime_core.types import Drop, Group

if TYPE_CHECKING:
    from slime_core.config.schema import Config
    from slime_core.context import Context
    from slime_core.plugins import Plugins
    from slime_core.protocols import Ledger
    from slime_core.rollout.dump import Dump

ROLLED_OUT = "debug_rollout_only"


async def let_go(ledger: Ledger, groups: Sequence[Group]) -> None:
    """End a step of a run that only rolls out: its samples become dropped(debug_rollout_only).

    Their payloads stay, so a run that goes on from a checkpoint before it takes the same groups again.
    """
    await ledger.drop([([sample for group in groups for sample in group.samples], Drop(reason=ROLLED_OUT))])


class DumpedGroups:
    """Hands a dump's groups over, a step a call, with what the loop asks of a `Collector`.

    Example:
        async with DumpedGroups(dump, ledger, plugins, ctx) as collector:
            groups = await collector.take(32)
    """

    def __init__(
        self,
        dump: Dump,
        ledger: Ledger,
        plugins: Plugins,
        ctx: Context,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._dump, self._ledger, self._plugins, self._note = dump, ledger, plugins, note
        self._config: Config = ctx.config
        self._stage, self._version = ctx.stage, ctx.version
        self._counts = Counts()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dump.close()

    async def take(self, count: int, forced: Sequence[int] = ()) -> list[Group]:
        """The groups of the next step, as many as the dump has; ``forced``, of a journal, names the same ones.

        Raises:
            DataError: DAT28, the dump has no such step.
            StorageError: STO112 a damaged file; the ledger knows these samples in another state.
        """
        groups = await asyncio.to_thread(self._dump.groups, self._version + 1, self._stage) or []
        if len(groups) != count:
            self._note(f"step {self._version + 1}: the dump has {len(groups)} groups, rollout_batch_size is {count}")
        for group in groups:
            self._plugins.seen(group, self._config)
        await self._ledger.issue(groups)
        await asyncio.gather(*(self._ledger.finish(group) for group in groups))
        self._counts.issued += len(groups)
        self._counts.tokens += sum(sample.response_length for group in groups for sample in group.samples)
        return groups

    async def drain(self) -> bool:
        """Nothing is ever in flight."""
        return True

    def admit(self, version: int) -> None:
        """Say that the taken groups are trained."""
        self._version = version

    def pop_counts(self) -> Counts:
        """The counts since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: nothing, the version says which file comes next."""
        return {}
