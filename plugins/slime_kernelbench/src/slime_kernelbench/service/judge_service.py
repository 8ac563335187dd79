"""Requests by their keys: the same key asks for one judgement, however often and over however many connections."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256

from slime_kernelbench.service.models import JudgeRequest
from slime_kernelbench.service.pool import Pool, PoolFull, Stopped
from slime_kernelbench.types import Verdict

KEPT = 4096  # judgements that have ended


class Clash(Exception):
    """A key that came before, with something else to judge."""


@dataclass(slots=True)
class _Entry:
    digest: bytes  # of what is to be judged
    task: asyncio.Task[Verdict]
    waiting: int = 0  # requests


class JudgeService:
    """Answers requests from a pool.

    Example:
        verdict = await service.judge(ask)
    """

    def __init__(self, pool: Pool, *, capacity: int = KEPT) -> None:
        self.pool = pool
        self._capacity = capacity
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    async def judge(self, ask: JudgeRequest) -> Verdict:
        """The verdict; where all who asked have gone before it began, it is not judged at all.

        Raises:
            Full: the queue is.
            Stopped: the service ends.
            Clash: the key asked for something else before.
        """
        entry = self._entry(ask)
        entry.waiting += 1
        try:
            verdict = await asyncio.shield(entry.task)
        except (PoolFull, Stopped):
            self._entries.pop(ask.key, None)
            raise
        finally:
            entry.waiting -= 1
            if not entry.waiting and not entry.task.done():
                entry.task.cancel()
                self._entries.pop(ask.key, None)
        if verdict.status == "infra":  # the next who asks may be luckier
            self._entries.pop(ask.key, None)
        return verdict

    def _entry(self, ask: JudgeRequest) -> _Entry:
        digest = sha256(ask.model_dump_json(exclude={"key"}).encode()).digest()
        entry = self._entries.get(ask.key)
        if entry is None:
            task = asyncio.create_task(self.pool.submit(ask.source, ask.problem.problem()))
            entry = self._entries[ask.key] = _Entry(digest, task)
            self._forget()
        elif entry.digest != digest:
            raise Clash
        self._entries.move_to_end(ask.key)
        return entry

    def _forget(self) -> None:
        ended = [key for key, entry in self._entries.items() if entry.task.done()]
        for key in ended[: max(0, len(ended) - self._capacity)]:
            del self._entries[key]
