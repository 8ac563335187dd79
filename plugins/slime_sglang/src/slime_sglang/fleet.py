"""The servers of one engine: which of them take requests, what weights they have, what becomes of one that fails.

load -> every open server but a reserved one, at once -> those that fail: fenced, restarted by the `health.Watch`
bring_up: restarted -> weights of the others (the trainer publishes once more, or the folder) -> compared -> open
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime_core.errors import EngineError
from slime_core.protocols import Ability
from slime_core.weights.canary import compare, merged
from slime_sglang.bodies import NO_TOKENIZER
from slime_sglang.client import Client
from slime_sglang.gateway_client import GatewayClient
from slime_sglang.http import BROKEN
from slime_sglang.loading import has_base
from slime_sglang.reserved_server import ReservedServer, ReservedServers
from slime_sglang.router import Lane, Middleware, Router
from slime_sglang.vocabulary import check_vocabulary
from slime_sglang.weights import WeightRoutes, by_key

if TYPE_CHECKING:
    from slime_core.types import RankTensor, WeightCheck, WeightRoute, WeightUpdate
    from slime_sglang.address import ServerAddress
    from slime_sglang.health import Watch
    from slime_sglang.pictures import PictureCodec
    from slime_sglang.server import Server

ServerMode = Literal["abort", "retract", "in_place"]
ALIVE = 30.0  # seconds in which a server says that it lives, all tries together
PausedEngine = Callable[[], AbstractAsyncContextManager[bool]]
"""Nothing runs on servers inside; the value says whether their prefix cache can be dropped."""

Source = Callable[["WeightRoute"], Awaitable["WeightUpdate"]]
"""Sends the weights of the policy once more."""


@dataclass(slots=True, frozen=True, kw_only=True)
class FleetSettings:
    """What of a run the engine goes by."""

    vocab_size: int
    context_len: int
    features: frozenset[str]  # of the installation
    epoch: int = 0
    eos: tuple[int, ...] = ()  # ids that end a response
    pause_mode: ServerMode = "retract"  # of requests that run while weights change
    deterministic: bool = False
    memory_saver: bool = False
    concurrency: int = 512  # requests in flight a server
    timeout: float = 1800.0  # seconds of one request
    retries: int = 3
    scores: bool = True  # its servers take a prompt without a token to make
    experts: tuple[int, int] | None = None  # see `Client`
    pictures: PictureCodec | None = None  # see `Client`
    adapters: tuple[str, ...] = ()  # see `Client`

    @property
    def abilities(self) -> frozenset[Ability]:
        """See `protocols.Ability`."""
        abilities: set[Ability] = {"score"} if self.scores else set()
        if self.deterministic:
            abilities.add("per_sample_seed")
        if self.memory_saver:
            abilities.add("release")
        if self.experts is not None:
            abilities.add("routed_experts")
        if self.pictures is not None:
            abilities.add("multimodal")
        if self.adapters:
            abilities.add("adapters")
        live = {"version_spans", "pause_modes"} <= self.features and self.pause_mode != "abort"
        if live and not self.adapters:
            abilities.add("live_load")
        return frozenset(abilities)


@dataclass(slots=True, frozen=True)
class Fresh:
    """Weights that were published for one server."""

    update: WeightUpdate
    checks: tuple[RankTensor, ...]


class Fleet:
    """See the module. Implements `health.WatchedEngine` for the watch.

    ``source`` publishes the trainer's weights once more, for a server that was restarted; without it such a server
    reads the last folder of the disk transport.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        settings: FleetSettings,
        *,
        weights: WeightRoutes,
        tokenizer: Any,
        router: Router,
    ) -> None:
        self.settings, self.router = settings, router
        self.version = -1  # that all open servers have
        self.newest = -1  # that some server may have already
        self.watch: Watch | None = None
        self.source: Source | None = None
        self.over: EngineError | None = None  # why nothing can be asked any more
        self.updating = asyncio.Lock()  # servers take weights, or come back
        self.filling = asyncio.Event()  # the memory of weights is not given back
        self.filling.set()
        self.reserved = ReservedServers(router)
        self._coming = asyncio.Event()  # a load that will fill whoever has no weights
        self._servers = {server.address.number: server for server in servers}
        self._weights, self._tokenizer = weights, tokenizer
        self._lanes: dict[int, Lane] = {}  # the last generation of each, fenced or not
        self._doubts: dict[Lane, asyncio.Task[bool]] = {}  # servers that are asked whether they live
        self._update: WeightUpdate | None = None  # the last that was loaded
        self._closing: set[asyncio.Task[None]] = set()  # clients of fenced servers

    async def open(self, version: int) -> None:
        """Meet all servers, which are ready and have ``version``; -1 for weights that may not be served."""
        lanes = await asyncio.gather(*(self._meet(number) for number in self._servers))
        self.version = self.newest = version
        for lane in lanes:
            lane.version = version
        await asyncio.gather(*(self.router.join(lane) for lane in lanes))

    async def close(self) -> None:
        """Fail what waits with ENG84 and close all connections."""
        if self.over is None or self.over.code != "ENG84":
            self.over = EngineError("the engine was closed", code="ENG84")
        self.lost(self.over)
        closing = [lane.client.close() for lane in self._lanes.values()]
        await asyncio.gather(*closing, self.router.close(), *self._closing, *self._doubts.values())

    def resync(self, source: Source) -> None:
        """Ask ``source`` for the current weights when a server was restarted."""
        self.source = source

    def require_open(self) -> None:
        """Raise what :meth:`lost` was told, or ENG84 after :meth:`close`."""
        if self.over is not None:
            raise self.over

    # -- weights

    async def route(self, check: WeightCheck) -> WeightRoute:
        """See `protocols.Engine`; waits for a server where none is open."""
        self.require_open()
        if not self.router.lanes:
            await self._some_server()
        lanes = [*self.router.lanes, *self.reserved.promised()]
        return await self._weights.route(check, sorted(lanes, key=lambda lane: lane.number))

    async def load(self, update: WeightUpdate, paused: PausedEngine) -> None:
        """See `SglangEngine.load`."""
        failures = await self._load(update, paused)
        if self.version == update.version or self.watch is None:
            pass
        elif _in_folder(update):
            await self.watch.settled()  # servers that come back read the folder
        elif update.transport == "tensor" or not has_base(update):
            await self._some_server()
            failures = await self._load(await self._complete(update), paused)
        if self.version != update.version:
            error = self.over or next(iter(failures), None)
            raise error or EngineError(f"no server is left to take version {update.version}", code="ENG86")

    async def _complete(self, update: WeightUpdate) -> WeightUpdate:
        """An update of adapters alone once more with their base, where a server lacks it."""
        lanes = self.router.lanes
        if has_base(update) or all(lane.base for lane in lanes) or self.source is None:
            return update
        return await self.source(await self._weights.route("none", lanes))

    async def _load(self, update: WeightUpdate, paused: PausedEngine) -> list[EngineError]:
        """Take an update on the servers that are open; the engine has its version where one of them has."""
        async with self.updating:
            self.newest = update.version
            try:
                async with paused() as flush:
                    anyone = update.transport == "disk" or not has_base(update)
                    lanes = [*self.router.lanes, *self.reserved.due(anyone=anyone)]
                    failures = await self.call_all(lanes, lambda lane: self._take(lane, update, flush=flush))
                    self._update = update
                    if len(failures) < len(lanes):
                        self.version = update.version
                    await self.reserved.caught_up(update.version)
            finally:
                self._coming.clear()
        return failures

    async def _some_server(self) -> None:
        """Wait for servers that are restarted; they are open before they have weights, and requests wait.

        Raises:
            EngineError: none comes back.
        """
        self.router.hold()
        self._coming.set()
        if self.watch is not None:
            await self.watch.settled()
        self.require_open()
        if not self.router.lanes:
            raise EngineError("no SGLang server is left", code="ENG84", fix="see the servers' logs")

    async def _take(self, lane: Lane, update: WeightUpdate, *, flush: bool) -> None:
        if not lane.base and not has_base(update):
            raise EngineError(
                f"server {lane.number} lacks the base of the adapters",
                code="ENG83",
                where=lane.client.address.url,
                why="it started after the base was sent",
            )
        await self._weights.load(lane, update, flush=flush)
        lane.base = True
        lane.version = update.version

    @asynccontextmanager
    async def reserve(self, middleware: Sequence[Middleware]) -> AsyncIterator[ReservedServer]:
        """A server for a while, which keeps its weights; see `reserved_server`."""
        settings, lane = self.settings, self.reserved.choose()
        server = ReservedServer(
            lane,
            tokenizer=self._tokenizer,
            fault=self.fault,
            attempts=settings.retries + 1,
            abilities=settings.abilities,
            epoch=settings.epoch,
            middleware=middleware,
            adapters=settings.adapters,
        )
        self.reserved.add(server)
        try:
            yield server
        finally:
            async with self.updating:
                await self.reserved.release(server, self.newest)

    async def fingerprints(self) -> dict[str, str]:
        """Checksum of every tensor by `types.Held.key`; where servers differ, words that name the server."""
        self.require_open()
        fingerprints: dict[str, dict[str, str]] = {}

        async def ask(lane: Lane) -> None:
            fingerprints.update(by_key(lane, await lane.client.checksums()))

        failures = await self.call_all(self.router.lanes, ask)
        if failures and not fingerprints:
            raise failures[0]
        return merged(dict(sorted(fingerprints.items())))

    # -- servers that fail and come back

    def progress(self, number: int) -> Sequence[tuple[int, int]]:
        """See `health.WatchedEngine`."""
        lane = self._lanes.get(number)
        if lane is None:
            return [(0, 0)]
        if self.router.shared is not None:
            return [(self.router.shared, 0)]
        if lane.ranks > 1:
            return list(zip(lane.by_rank, lane.came, strict=True))
        progress = lane.client.progress
        return [(progress.in_flight, progress.tokens + progress.replies)]

    def fence(self, number: int, error: EngineError) -> None:
        """See `health.WatchedEngine`: its requests go to other servers with what they have."""
        lane = self.router.fence(number, error, dying=self._servers[number].owned)
        lane = self.reserved.fence(number, error) or lane
        if lane is not None:
            task = asyncio.get_running_loop().create_task(lane.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def bring_up(self, number: int) -> None:
        """See `health.WatchedEngine`.

        Raises:
            EngineError: ENG83 a tensor differs after the load (named); what the server or the trainer said.
        """
        lane = await self._meet(number)
        try:
            while not await self._filled(lane):
                await self.filling.wait()
        except BaseException:
            await lane.client.close()
            raise

    async def _filled(self, lane: Lane) -> bool:
        """Give a server that has just started the weights of the others; False where they changed meanwhile."""
        await self.filling.wait()
        fresh = await self._published(lane)
        async with self.updating:
            if not self.filling.is_set():
                return False
            update = fresh.update if fresh is not None else self._update
            if update is None or self._coming.is_set():  # the first load, or the one that is coming, brings them
                lane.version = self.version
            elif update.version != self.version if fresh is not None else not _in_folder(update):
                return False
            else:
                await self._fill(lane, update, fresh)
            self.require_open()
            await self.router.join(lane)
            return True

    async def _published(self, lane: Lane) -> Fresh | None:
        """What the trainer publishes once more for a server; None where a folder has it, or a load is coming."""
        if self._update is None or _in_folder(self._update):
            return None
        if self.source is None:
            raise EngineError("no trainer can send weights to the restarted server", code="ENG86")
        route = await self._weights.route("all", [lane])
        published = asyncio.ensure_future(self.source(route))
        coming = asyncio.ensure_future(self._coming.wait())
        try:
            await asyncio.wait({published, coming}, return_when=asyncio.FIRST_COMPLETED)
            return Fresh(published.result(), route.checks) if published.done() else None
        finally:
            published.cancel()
            coming.cancel()

    async def _fill(self, lane: Lane, update: WeightUpdate, fresh: Fresh | None) -> None:
        await self._take(lane, update, flush=True)
        checks = fresh.checks if fresh is not None else self._weights.all_checks()
        if checks:
            folder = Path(update.handle["folder"]) if fresh is None else None
            expected = await asyncio.to_thread(self._weights.expected, folder) if folder else update.fingerprints
            served = merged(by_key(lane, await lane.client.checksums()))
            compare(checks, expected, served, update.version)
        self.version = self.newest = max(self.version, update.version)

    def lost(self, error: EngineError) -> None:
        """See `health.WatchedEngine`."""
        self.over = self.over or error
        self.router.lost(error)
        self.reserved.lost(error)

    async def _meet(self, number: int) -> Lane:
        """A lane to a server that is ready; raises TOK40 where its token ids are not the model's."""
        server, settings = self._servers[number], self.settings
        facts = server.facts
        client = Client(server.address, concurrency=settings.concurrency, **self._words(facts))
        try:
            await check_vocabulary(client, facts, vocab_size=settings.vocab_size, tokenizer=self._tokenizer)
        except BaseException:
            await client.close()
            raise
        lane = self._lanes[number] = Lane(
            client=client,
            number=number,
            room=settings.concurrency,
            generation=server.address.generation,
            ranks=max(1, int(facts.get("dp_size") or 1)),
            facts=facts,
        )
        return lane

    def _words(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What clients of this engine have in common."""
        settings = self.settings
        return {
            "vocab_size": settings.vocab_size,
            "context_len": settings.context_len,
            "features": settings.features | ({NO_TOKENIZER} if facts.get(NO_TOKENIZER) else frozenset()),
            "timeout": settings.timeout,
            "retries": settings.retries,
            "epoch": settings.epoch,
            "eos": settings.eos,
            "experts": settings.experts,
            "pictures": settings.pictures,
            "adapters": settings.adapters,
            "tokenizer": (lambda: self._tokenizer) if self._tokenizer is not None else None,
        }

    def connect(self, address: ServerAddress, **more: Any) -> GatewayClient:
        """A client of SGLang's router before these servers; ``more`` as `GatewayClient` has it."""
        facts = next((server.facts for server in self._servers.values()), {})
        room = self.settings.concurrency * len(self._servers)
        return GatewayClient(address, concurrency=room, **self._words(facts), **more)

    async def call_all(self, lanes: Sequence[Lane], call: Callable[[Lane], Awaitable[Any]]) -> list[EngineError]:
        """Call all lanes at once. Those that fail are fenced, with the errors as the answer; others' errors rise."""
        results = await asyncio.gather(*(call(lane) for lane in lanes), return_exceptions=True)
        failures: list[EngineError] = []
        for lane, result in zip(lanes, results, strict=True):
            if isinstance(result, EngineError):
                failures.append(result)
                self.give_up(lane, result)
            elif isinstance(result, BaseException):
                raise result
        return failures

    async def fault(self, lane: Lane, error: EngineError) -> None:
        """A server failed a request: :meth:`give_up`, unless a connection broke and the server answers a question.

        One broken connection says little: a busy machine, or whatever stands between, breaks them too.
        """
        culprit_lane = self.router.culprit(lane, error)
        if culprit_lane is not None and (error.code not in BROKEN or not await self._answers(culprit_lane)):
            self.give_up(culprit_lane, error)

    async def _answers(self, lane: Lane) -> bool:
        """Whether a server lives, asked once by all whose connections broke."""
        if lane.fenced is not None or not self._servers[lane.number].running:
            return False
        if (doubt := self._doubts.get(lane)) is None:
            doubt = self._doubts[lane] = asyncio.get_running_loop().create_task(_alive(lane))
            doubt.add_done_callback(lambda _: self._doubts.pop(lane, None))
        return await asyncio.shield(doubt)

    def give_up(self, lane: Lane, error: EngineError) -> None:
        """Fence a server that failed, and have it restarted; once a generation."""
        if lane.fenced is None:
            self.fence(lane.number, error)
            if self.watch is not None:
                self.watch.report(lane.number, error)
            elif not self.router.lanes:
                self.lost(error)


def _in_folder(update: WeightUpdate) -> bool:
    """Whether a server that comes back finds all that it needs in a folder."""
    return update.transport == "disk" and has_base(update)


async def _alive(lane: Lane) -> bool:
    """A question that computes nothing, asked as often as the client asks anything."""
    try:
        await lane.client.get("/model_info", timeout=ALIVE)
    except EngineError:
        return False
    return True
