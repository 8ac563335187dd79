"""Whether servers make progress: one that died or hangs is fenced, restarted, filled and let in again, or retired.

    healthy --fails--> fenced --budget left--> starting --ready, weights, canary--> healthy
                         `--budget spent--> retired; fewer than `min_healthy` that are not: the run ends

Where a server's machine is lost, it cannot come back, and the run ends too: it goes on from its checkpoint elsewhere.

A connection that broke under one request is none of its business: `Fleet.fault` asks the server once more then. And a
server may answer /health while its requests stand still, so what counts is tokens: those that the engine has seen
come back, and those that the server itself holds (`num_used_tokens` of /v1/loads, in 0.5.12 and 0.5.23 alike), which
move with every few decode steps of requests that have not answered yet. Streaming would tell the same at the cost of
a message a token. `server_health` decides and does no I/O; `Watch` checks, and does what it decides.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

from slime_core.errors import EngineError, SlimeError
from slime_sglang.http import BROKEN, ServerFault, Transport, fault
from slime_sglang.server import Server
from slime_sglang.server_health import RestartPolicy, ServerHealth, ServerStatus, State, WatchLimits

DYING = 10.0
"""Seconds for a server of ours whose connections break to be found dead, so that its end can be named."""


class WatchedEngine(Protocol):
    """What the watch asks of the engine whose servers it watches, by the server's number."""

    def progress(self, number: int) -> Sequence[tuple[int, int]]:
        """Requests in flight there, and a number that rises with every token and reply that came from there: of each
        data-parallel rank, or of all together where they are not told apart."""
        ...

    def fence(self, number: int, error: ServerFault) -> None:
        """The server is given up: choose it no more, and let what waits for it fail with ``error`` (retryable)."""
        ...

    async def bring_up(self, number: int) -> None:
        """A new generation serves (``server.address``): give it weights, compare them, choose it again."""
        ...

    def lost(self, error: EngineError) -> None:
        """Too few servers are left: every call, waiting or new, fails with ``error``."""
        ...


class Watch:
    """Looks at every server, each in a task of its own; enter it once all are ready and have their weights.

    ``needed`` are sets of servers of each of which one at least must be left, whatever ``min_healthy`` says.

    Example:
        async with Watch(servers, engine, Limits(interval=5.0)) as watch:
            watch.report(1, error)  # the engine found a fault by itself
            with watch.pause():  # paused: no progress is expected
                ...
    """

    def __init__(
        self,
        servers: Sequence[Server],
        engine: WatchedEngine,
        limits: WatchLimits,
        *,
        note: Callable[[str], None] = lambda text: None,
        needed: Collection[Collection[int]] = (),
    ) -> None:
        self._needed = needed
        self._servers = {server.address.number: server for server in servers}
        self._policies = {number: RestartPolicy(limits.max_restarts) for number in self._servers}
        self._engine, self._limits, self._note = engine, limits, note
        self._reports: dict[int, ServerFault] = {}
        self._pokes = {number: asyncio.Event() for number in self._servers}
        self._tasks: list[asyncio.Task[None]] = []
        self._paused = 0
        self._error: EngineError | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._tend(number), name=f"slime-watch-{number}") for number in self._servers
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def states(self) -> dict[int, State]:
        """By the server's number."""
        return {number: policy.state for number, policy in self._policies.items()}

    @property
    def restarts(self) -> dict[int, int]:
        """How often each server was started again, by its number."""
        return {number: policy.restarts for number, policy in self._policies.items()}

    @property
    def error(self) -> EngineError | None:
        """Why the run cannot go on (ENG84, ENG89), once fewer servers than ``min_healthy`` are left."""
        return self._error

    def report(self, number: int, error: EngineError) -> None:
        """The engine found this server faulty (a failed update, wrong weights, errors without end).

        It is fenced before this returns, and then restarted. A server that is not healthy is so already.
        """
        if self._policies[number].state == "healthy":
            self._reports[number] = fault(error.what, error.code, error.where, why=error.why, fix=error.fix)
            self._fence(number, self._reports[number])
            self._pokes[number].set()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """No progress is expected inside this block: servers are paused, or have given back their memory."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    async def settled(self) -> None:
        """Wait until no server is starting or fenced: all are healthy or retired."""
        while any(state in ("starting", "fenced") for state in self.states.values()):
            await self._changed.wait()

    # -- one server's life

    async def _tend(self, number: int) -> None:
        try:
            while True:
                failed = await self._failed(number)
                while not await self._restarted(number, failed):
                    if not self._policies[number].usable:
                        return
        except Exception as error:  # a bug of ours must not leave the run without a watch
            self._lose(EngineError(f"the watch over server {number} broke", code="ENG84", why=repr(error)))
            raise

    async def _failed(self, number: int) -> ServerFault:
        """Look until the server fails; it is fenced on return."""
        server, health = self._servers[number], ServerHealth(self._limits)
        http = Transport(server.address.url, token=server.address.token, ca=server.address.ca)
        died = asyncio.create_task(server.died())
        reported = asyncio.create_task(self._pokes[number].wait())
        either: list[asyncio.Future[Any]] = [reported, died]
        try:
            while True:
                await asyncio.wait(either, timeout=self._limits.interval, return_when=asyncio.FIRST_COMPLETED)
                failed = None
                if not reported.done() and not died.done():
                    failed = health.judge(await self._look(number, http))
                if failed is not None and failed.code == "ENG69" and server.owned:  # most likely it is dying
                    await asyncio.wait(either, timeout=DYING, return_when=asyncio.FIRST_COMPLETED)
                if self._pokes[number].is_set():
                    self._pokes[number].clear()
                    fault = self._reports.pop(number)
                    if fault.code in BROKEN and server.owned:  # most likely it is dying too
                        await asyncio.wait({died}, timeout=DYING)
                    return self._dead(died.result()) if died.done() else fault
                if died.done():
                    failed = self._dead(died.result())
                if failed is not None:
                    self._fence(number, failed)
                    return failed
        finally:
            died.cancel()
            reported.cancel()
            await http.close()

    async def _look(self, number: int, http: Transport) -> ServerStatus:
        ranks = tuple(self._engine.progress(number))
        used: tuple[int, ...] = ()
        running: int | None = None
        refused = False
        try:
            reply = await http.ask("GET", "/v1/loads?include=core", end=time.monotonic() + self._limits.ask)
            used, running = _usage(reply.body) if reply.status == 200 else ((), None)
        except ServerFault as error:
            refused = error.code == "ENG69"
        if self._limits.counts_requests and running is not None:  # of all in flight, as many as it says it has
            ranks = ((min(ranks[0][0], running), ranks[0][1]),)
        return ServerStatus(
            at=time.monotonic(), ranks=ranks, cached_tokens=used, refused=refused, expected=not self._paused
        )

    async def _restarted(self, number: int, failed: ServerFault) -> bool:
        """Start a fenced server once more; False where that failed, or where it is retired."""
        server, policy = self._servers[number], self._policies[number]
        tail = server.tail()
        try:
            if server.lost:
                policy.retire()
            if not policy.next():
                await server.stop(grace=0)
                self._retire(number, failed, tail)
                return False
            self._change(
                f"SGLang server {number} {failed.what}; restart {policy.restarts} of {self._limits.max_restarts}"
            )
            await server.stop(grace=0)
            await asyncio.sleep(policy.pause(self._limits.interval))
            await server.start()
            await server.ready(self._limits.start_timeout)
            await self._bring_up(number)
        except (SlimeError, OSError, TimeoutError) as error:
            message = error.what if isinstance(error, SlimeError) else f"could not be restarted: {error!r}"
            policy.fence()
            self._change(f"SGLang server {number} did not come back: {message}")
            return False
        policy.up()
        self._change(f"SGLang server {number} serves again (generation {server.address.generation})")
        return True

    async def _bring_up(self, number: int) -> None:
        """The engine's part of a restart, with a deadline, and ended where the server dies meanwhile."""
        filling = asyncio.create_task(self._engine.bring_up(number))
        died = asyncio.create_task(self._servers[number].died())
        try:
            either: list[asyncio.Future[Any]] = [filling, died]
            await asyncio.wait(either, timeout=self._limits.start_timeout, return_when=asyncio.FIRST_COMPLETED)
            if filling.done():
                return filling.result()
            if died.done():
                raise self._dead(died.result())
            raise TimeoutError(f"no weights within {self._limits.start_timeout:g} s")
        finally:
            died.cancel()
            filling.cancel()
            await asyncio.gather(filling, died, return_exceptions=True)

    # -- what follows

    def _dead(self, how: str) -> ServerFault:
        return fault(how, "ENG84", "")

    def _fence(self, number: int, failed: ServerFault) -> None:
        server = self._servers[number]
        self._policies[number].fence()
        failed.where = failed.where or server.where
        failed.why = failed.why or server.tail()
        self._engine.fence(number, failed)
        self._change("")

    def _retire(self, number: int, failed: ServerFault, tail: str) -> None:
        server, policy = self._servers[number], self._policies[number]
        self._change(f"SGLang server {number} is retired after {policy.restarts} restarts: {failed.what}")
        usable = sum(policy.usable for policy in self._policies.values())
        bare = [kind for kind in self._needed if not any(self._policies[member].usable for member in kind)]
        if usable >= self._limits.min_healthy and not bare and not server.lost:
            return
        message = f"{usable} of {len(self._policies)} SGLang servers are left, "
        if server.lost:  # its machine, perhaps: what it gave the run has to be found anew
            message = f"{server.title} {server.lost}"
        elif bare:
            message += f"none of {sorted(bare[0])}, without which the others serve nothing"
        else:
            message += f"and rollout.min_healthy_engines is {self._limits.min_healthy}"
        self._lose(
            EngineError(
                message,
                code="ENG89" if policy.restarts and not server.lost else "ENG84",
                where=server.where,
                why=f"server {number} is retired after {policy.restarts} restarts: {failed.what}\n{tail}",
                fix="see the log's end; what was finished is in the ledger: slime run --resume RUN_DIR",
                lost=True,
            )
        )

    def _lose(self, error: EngineError) -> None:
        if self._error is None:
            self._error = error
            self._engine.lost(error)

    def _change(self, text: str) -> None:
        if text:
            self._note(text)
        self._changed.set()
        self._changed = asyncio.Event()


def _usage(body: bytes) -> tuple[tuple[int, ...], int | None]:
    """Tokens that the server holds, by data-parallel rank, and its requests; nothing where it does not say."""
    try:
        loads = json.loads(body)["loads"]
        used = tuple(int(load["num_used_tokens"]) for load in loads)
        counts = [load.get(name) for load in loads for name in ("num_running_reqs", "num_waiting_reqs")]
    except (ValueError, TypeError, KeyError, AttributeError):
        return (), None
    return used, None if None in counts else sum(map(int, counts))
