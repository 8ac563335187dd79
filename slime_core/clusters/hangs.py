"""The parts of a run in; one page and the end of the run out, when one of them makes no progress any more.

    trainer calls, engines with requests, phases of the driver -> older than hang_timeout?
        -> look at every process -> log/hang-N.txt, the terminal -> Hung, with the first cause

A deadline is of progress: an answer of any request of an engine, each call of the trainer, each phase of a step. It
does not run while this process itself stood still (SIGSTOP, a suspended machine).
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.clusters.channel import within
from slime_core.clusters.hang_page import Seen, cause, own_stack, render
from slime_core.clusters.looking import Look, state_of
from slime_core.errors import Hung

if TYPE_CHECKING:
    from pathlib import Path

    from slime_core.config.schema import Config
    from slime_core.protocols import Ledger
    from slime_core.report import Report

OFTEN = 5.0  # seconds between two looks, at most
ASKED = 12.0  # seconds in which a process, or its host, must say where it is
KILLED = 5.0  # seconds in which it must be gone
PHASES = frozenset({"score", "verify", "train", "sync"})
"""Phases of the driver with a deadline; rollouts and evaluations have those of their hooks."""


class Asked(Protocol):
    """What the watch asks of a process, wherever that is; `channel.Channel` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def node(self) -> str:
        """The machine it is on."""
        ...

    async def look(self) -> Look:
        """What it does."""
        ...

    async def kill(self) -> None:
        """End it now."""
        ...


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of the run; ``doing`` is empty where nobody waits for it."""

    name: str
    channel: Asked
    doing: str = ""
    since: float = 0.0  # monotonic seconds of the last sign of progress while it does that
    patience: float = 0.0  # seconds that it has at least


class Watched(Protocol):
    """A part of the run that knows its processes and what they are asked."""

    def members(self) -> Sequence[Member]:
        """All of them, now."""
        ...


class Server(Protocol):
    """An SGLang server of ours; its own watch judges it by its tokens."""

    @property
    def title(self) -> str:
        """What messages call it."""
        ...

    @property
    def pid(self) -> int:
        """Of the process that leads its session; it changes when the server is restarted."""
        ...


class Servers:
    """SGLang servers as lines of the page: nobody waits for them here, and the cluster's end ends them."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers

    def members(self) -> list[Member]:
        """See `Watched`."""
        return [Member(name=server.title, channel=ServerLook(server.pid)) for server in self._servers]


@dataclass(slots=True, frozen=True)
class ServerLook:
    """Implements `Asked` over the process of a server on this machine."""

    pid: int
    node: str = field(default_factory=socket.gethostname)

    async def look(self) -> Look:
        """Its state; what SIGUSR1 does there is its own affair."""
        state = state_of(self.pid) if self.pid else ""
        return Look(
            pid=self.pid, state=state, why="its watch judges it by its tokens" if state else "it is not running"
        )

    async def kill(self) -> None:
        """The cluster's end does that in order."""


class Watch:
    """See the module.

    Example:
        async with watching(config, report) as watch:
            watch.add(ranks)
    """

    def __init__(self, config: Config, report: Report) -> None:
        self.timeout = config.cluster.hang_timeout
        self.hung: Hung | None = None
        self.ledger: Ledger | None = None
        self._report, self._parts = report, list[Watched]()
        self._awake = time.monotonic()  # deadlines count from here, where they began earlier

    def add(self, part: Watched) -> None:
        """Watch a part, from before it starts."""
        self._parts.append(part)

    def late(self) -> str:
        """Who has made no progress for too long; empty where nobody."""
        now = time.monotonic()
        for member in self._members():
            if member.doing and self._age(member.since, now) > max(self.timeout, member.patience):
                return member.name
        phase, since = self._report.doing
        return "driver" if phase in PHASES and self._age(since, now) > self.timeout else ""

    def _age(self, since: float, now: float) -> float:
        return now - max(since, self._awake)

    def _members(self) -> list[Member]:
        return [member for part in self._parts for member in part.members()]

    async def run(self, task: asyncio.Task[Any]) -> None:
        """Look until somebody is late; then write the page, end what hangs and ``task``."""
        period = min(OFTEN, self.timeout / 10)
        while not (name := self.late()):
            before = time.monotonic()
            await asyncio.sleep(period)
            if time.monotonic() - before > 2 * period + 1:
                self._awake = time.monotonic()
        seen = await self._look()
        path, first = self._page(seen, name, await self._queues())
        self.hung = Hung(
            first,
            where=str(path),
            why=f"no progress for {self.timeout:g} s (cluster.hang_timeout)",
            fix="read the page; what was finished is in the ledger: slime run --resume RUN_DIR\n"
            "work that takes longer than that: --hang-timeout SECONDS",
        )
        self._report.hung(self.hung)
        task.cancel("hung")
        await asyncio.gather(*(within(KILLED, member.channel.kill()) for member in self._members()))

    async def _look(self) -> list[Seen]:
        members = self._members()
        looks = await asyncio.gather(*(within(ASKED, member.channel.look()) for member in members))
        phase, since = self._report.doing
        now, seen = time.monotonic(), [Seen.driver(phase, since)]
        for member, found in zip(members, looks, strict=True):
            missing = f"no answer from {member.channel.node} in {ASKED:g} s"
            known = found or Look(pid=member.channel.pid, state="", why=missing)
            node, age = member.channel.node, now - member.since if member.doing else None
            seen.append(Seen(name=member.name, node=node, doing=member.doing, seconds=age, look=known))
        return seen

    async def _queues(self) -> str:
        """What waits: requests at engines, samples in the ledger."""
        flying = [f"{m.name} {m.doing}" for m in self._members() if m.name.startswith("engine") and m.doing]
        counts = await within(ASKED, self.ledger.counts()) if self.ledger is not None else None
        texts = [f"{counts[name]} {name}" for name in ("issued", "pending", "trained")] if counts else ["unknown"]
        return f"in flight: {', '.join(flying) or 'no request'}; samples: {', '.join(texts)}"

    def _page(self, seen: Sequence[Seen], late: str, queues: str) -> tuple[Path, str]:
        """Write it; its path and first line."""
        first = cause(seen, late)
        phase, since = self._report.doing
        run_dir = self._report.run_dir
        facts = {
            "run": str(run_dir.path),
            "phase": f"{phase or 'between two phases'} for {time.monotonic() - since:.0f} s, "
            f"version {self._report.version}",
            "queues": queues,
        }
        text = render(first, facts, seen, own_stack())
        number = len(list(run_dir.log.glob("hang-*.txt")))
        path = run_dir.log / f"hang-{number}.txt"
        with suppress(OSError):  # a full disk must not keep the run from ending
            path.write_text(text)
        for line in text.splitlines():
            self._report.note(line)
        return path, first


@asynccontextmanager
async def watching(config: Config, report: Report) -> AsyncIterator[Watch]:
    """A watch over the block's parts.

    Raises:
        Hung: HNG125, one of them hung; it replaces whatever the block ended with then.
    """
    watch, task = Watch(config, report), asyncio.current_task()
    assert task is not None
    looking = asyncio.create_task(watch.run(task), name="slime-hangs") if watch.timeout else None
    try:
        yield watch
    except BaseException as error:
        if watch.hung is None:
            raise
        if isinstance(error, asyncio.CancelledError):
            task.uncancel()
        raise watch.hung from error
    finally:
        if looking is not None:
            if watch.hung is None:  # else it ends what hangs
                looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
