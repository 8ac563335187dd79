"""Exchange of a run with one rollout buffer: groups are requested, claimed and acknowledged.

    ask -> POST /v1/rollouts (concurrent requests share one)
    claim, while a caller waits -> handed over, or kept until requested
    acknowledge, when the run's ledger has it: after a crash in between the same group comes again, harmlessly

The run's name at the buffer lies in the run directory, so that a resumed run finds the groups finished meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from slime_buffer.client import BufferClient
from slime_buffer.service import models
from slime_core.durable import replace_file, storage_error
from slime_core.errors import DataError, StorageError
from slime_core.plugins.boundary import wait_for_future

if TYPE_CHECKING:
    from slime_core.context import ReadGroups

Key = tuple[str, int]  # group id and attempt
FILE = "rollout_buffer.json"  # in the run directory
LEASE = 600.0  # seconds; a resumed run does not wait for it
WAIT = 10.0  # seconds of one claim
BATCH_GROUPS, BATCH_TOKENS = 256, 1 << 20  # of one request
FIRST_LOOK, LAST_LOOK = 0.02, 1.0  # seconds between looks into the ledger
PARTING = 2.0  # seconds for the last acknowledgements of a run that ends
TIMED_OUT = "timeout"


class Exchange:
    """Lives on one event loop. ``patience``: seconds that the service may be away."""

    def __init__(self, url: str, token: str, run: str, recorded_groups: ReadGroups | None, *, patience: float) -> None:
        self.run = run
        self._recorded_groups = recorded_groups
        self._client = BufferClient(url, token, deadline=patience)
        self._engine: models.EngineEndpoint | None = None
        self._queue: list[models.AskedGroup] = []
        self._waiting: dict[Key, asyncio.Future[models.Ended]] = {}
        self._parked: dict[Key, models.Ended] = {}  # made for an earlier process of this run
        self._claims: dict[Key, str] = {}  # handed over or parked, not acknowledged
        self._abandoned: set[Key] = set()  # requested, and no caller waits any more
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_started = False

    async def make(
        self, group: models.AskedGroup, engine: models.EngineEndpoint | None, seconds: float
    ) -> models.Ended:
        """Ask for a group and wait; where the time is over it is dropped at the buffer, with reason ``timeout``.

        Raises:
            EngineError: the service is away, refuses the token or the request.
        """
        key = (group.id, group.attempt)
        if parked := self._parked.pop(key, None):
            return parked
        self._engine = engine
        future = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._queue.append(group)
        self._start("ask", self._ask)
        try:
            await wait_for_future(future, seconds)
        except asyncio.CancelledError:
            self._abandoned.add(key)
            self._start("settle", self._settle)
            raise
        finally:
            self._waiting.pop(key, None)
        if future.done():
            ended: models.Ended = future.result()
            return ended
        await self._client.drop(self.run, [models.Key(group=group.id, attempt=group.attempt)], TIMED_OUT, tell=False)
        about = group.model_dump(include={"id", "attempt", "task", "prompt", "tokens", "label", "metadata"})
        return models.Ended(**about, state="dropped", reason=TIMED_OUT, rollouts=[])

    async def close(self) -> None:
        """Acknowledge the groups that the ledger has, and close the connections."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        with suppress(Exception):  # groups not acknowledged come again at a resume
            async with asyncio.timeout(PARTING):
                await self._settle_now()
        await self._client.aclose()

    def _start(self, name: str, work: object) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(self._guarded(work), name=f"rollout-buffer-{name}")

    async def _guarded(self, work: object) -> None:
        """Whoever waits gets the error."""
        try:
            await work()  # type: ignore[operator]
        except Exception as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)

    async def _ask(self) -> None:
        await asyncio.sleep(0)  # collect concurrent requests
        while self._queue:
            groups: list[models.AskedGroup] = []
            tokens = 0
            while self._queue and len(groups) < BATCH_GROUPS and tokens < BATCH_TOKENS:
                groups.append(self._queue.pop(0))
                tokens += len(groups[-1].tokens)
            await self._client.start_rollout(models.Ask(run=self.run, engine=self._engine, groups=groups))
        self._start("read", self._read)

    async def _read(self) -> None:
        while self._waiting:
            claimed = await self._client.claim_batch(
                *(self.run, self.run), count=64, lease_seconds=LEASE, wait_seconds=WAIT, restart=not self._is_started
            )
            self._is_started = True
            for ended in claimed.groups:
                assert claimed.claim is not None
                self._hand_over(ended, claimed.claim)
            self._start("settle", self._settle)
            await asyncio.sleep(0)  # waiting callers continue, and may request more

    def _hand_over(self, ended: models.Ended, claim: str) -> None:
        key = (ended.id, ended.attempt)
        self._claims[key] = claim
        future = self._waiting.get(key)
        if future is not None and not future.done():
            self._parked.pop(key, None)
            future.set_result(ended)
        elif key not in self._abandoned:
            self._parked[key] = ended

    async def _settle(self) -> None:
        """Poll the ledger until every group is settled: acknowledge those it has, drop those it dropped."""
        pause = FIRST_LOOK
        while self._claims or self._abandoned:
            pause = FIRST_LOOK if await self._settle_now() else min(2 * pause, LAST_LOOK)
            await asyncio.sleep(pause)

    async def _settle_now(self) -> bool:
        keys = [*self._claims, *(self._abandoned - set(self._claims))]
        if self._recorded_groups is None or not keys:
            return False
        groups = await self._recorded_groups([name for name, _ in keys])
        ended = {key for key in keys if key[0] in groups and groups[key[0]].state != "pending"}
        ended |= {key for key in keys if key[0] in groups and groups[key[0]].attempt > key[1]}
        ended -= set(self._waiting)
        if not ended:
            return False
        for claim in dict.fromkeys(self._claims[key] for key in ended if key in self._claims):
            matching = [key for key in ended if self._claims.get(key) == claim]
            await self._client.acknowledge(claim, _keys(matching))
            for key in matching:
                del self._claims[key]
                self._parked.pop(key, None)
        open_ones = ended & self._abandoned
        for reason in {groups[name].last_reason or "left" for name, _ in open_ones}:
            matching = [key for key in open_ones if (groups[key[0]].last_reason or "left") == reason]
            await self._client.drop(self.run, _keys(matching), reason, tell=False)
        self._abandoned -= ended
        return True


def _keys(keys: Sequence[Key]) -> list[models.Key]:
    return [models.Key(group=name, attempt=attempt) for name, attempt in keys]


def run_name(run_dir: Path | None) -> str:
    """The run's name at every buffer: created once, kept in the run directory.

    Raises:
        StorageError: it cannot be written or read.
        DataError: DAT30 the file is damaged.
    """
    if run_dir is None:
        return f"run-{secrets.token_hex(8)}"
    path = run_dir / FILE
    try:
        if not path.exists():
            stem = re.sub(r"[^A-Za-z0-9._-]", "-", run_dir.name)[:40] or "run"
            replace_file(path, json.dumps({"run": f"{stem}-{secrets.token_hex(8)}"}).encode() + b"\n")
        name = json.loads(path.read_bytes())["run"]
        return models.Ask(run=name, groups=[]).run
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, path, "the run's name at the rollout buffer cannot be kept") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path.name} does not hold the run's name at the rollout buffer",
            code="DAT30",
            where=str(path),
            fix="remove it; rollouts made for the run since then are made again",
        ) from error
