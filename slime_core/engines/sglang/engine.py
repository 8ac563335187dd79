"""SGLang servers as one Engine: requests spread over them, weights to all of them or to none, memory given and taken.

    generate, score, abort   -> middleware -> `requests` -> `router` -> a server's `Client`
    load, fingerprints, ...  -> every server at once; one that fails is fenced, and restarted by the `health.Watch`

A server serves once it has weights: what it started with is never sampled. A fenced server comes back through
`bring_up`, with the weights of the others, every tensor compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime_core.engines.sglang.client import Client
from slime_core.engines.sglang.requests import Requests
from slime_core.engines.sglang.router import Lane, Middleware, Router, chained
from slime_core.engines.sglang.weights import Weights, told
from slime_core.errors import EngineError
from slime_core.protocols import Ability, PauseMode
from slime_core.types import GenerateRequest, SamplingParams
from slime_core.weights.canary import compare, merged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.engines.sglang.health import Watch
    from slime_core.engines.sglang.server import Server
    from slime_core.transfer import Check as WeightCheck, WeightRoute
    from slime_core.types import Completion, WeightUpdate

MEMORY = frozenset({"kv", "weights"})
TAGS = {"kv": ("kv_cache", "cuda_graph"), "weights": ("weights",)}
CONTROL = 120.0  # seconds for a call that moves memory

ServerMode = Literal["abort", "retract", "in_place"]


@dataclass(slots=True, frozen=True, kw_only=True)
class Settings:
    """What of a run the engine goes by."""

    vocab_size: int
    context_len: int
    features: frozenset[str]  # of the installation
    epoch: int = 0
    pause_mode: ServerMode = "retract"  # of requests that run while weights change
    deterministic: bool = False
    memory_saver: bool = False
    concurrency: int = 512  # requests in flight a server
    timeout: float = 1800.0  # seconds of one request
    retries: int = 3

    @property
    def abilities(self) -> frozenset[Ability]:
        """See `protocols.Ability`."""
        found: set[Ability] = {"score"}
        if self.deterministic:
            found.add("per_sample_seed")
        if self.memory_saver:
            found.add("release")
        if "version_spans" in self.features and "pause_modes" in self.features and self.pause_mode != "abort":
            found.add("live_load")
        return frozenset(found)


class SglangEngine:
    """Implements `protocols.Engine`, and `health.Engine` for the watch over its servers.

    ``source`` publishes the trainer's weights once more, for a server that was restarted; without it such a server
    reads the last folder of the disk transport.

    Example:
        engine = SglangEngine(servers, Settings(...), weights=Weights(...), tokenizer=tokenizer)
        await engine.open()  # the servers are ready
        async with Watch(servers, engine, limits) as engine.watch:
            await engine.load(await trainer.publish(0, await engine.route("all")))
            done = await engine.generate(request)
        await engine.close()
    """

    version: int
    epoch: int

    def __init__(
        self,
        servers: Sequence[Server],
        settings: Settings,
        *,
        weights: Weights,
        tokenizer: Any = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self.version, self.epoch = -1, settings.epoch
        self.abilities = settings.abilities
        self.watch: Watch | None = None
        self.source: Callable[[WeightRoute], Awaitable[WeightUpdate]] | None = None
        self.router = Router()
        self.requests = Requests(
            self.router,
            tokenizer=tokenizer,
            fault=self._fault,
            high=lambda: max(self.version, self._newest),
            attempts=settings.retries + 1,
        )
        self._servers = {server.address.number: server for server in servers}
        self._settings, self._weights, self._tokenizer = settings, weights, tokenizer
        self._chain = chained(middleware, self.requests.generate)
        self._clients: dict[int, Client] = {}
        self._newest = -1  # version that some server may have already
        self._update: WeightUpdate | None = None  # the last that was loaded
        self._updating = asyncio.Lock()  # servers take weights, or come back
        self._depth = 0  # of pauses
        self._halted: dict[Lane, ServerMode] = {}  # servers that hold requests themselves
        self._hold: ExitStack | None = None  # the watch expects no progress
        self._released: set[str] = set()
        self._filling = asyncio.Event()  # the memory of weights is not given back
        self._filling.set()
        self._scores = 0
        self._closing: set[asyncio.Task[None]] = set()  # clients of fenced servers
        self._over: EngineError | None = None  # why nothing can be asked any more

    async def open(self, *, version: int = -1) -> None:
        """Meet all servers, which are ready. ``version`` is of the weights that they started with and may serve.

        Raises:
            EngineError: a server that does not fit the run.
        """
        lanes = await asyncio.gather(*(self._meet(number) for number in self._servers))
        self.version = self._newest = version
        for lane in lanes:
            lane.version = version
            self.router.admit(lane)

    async def close(self) -> None:
        """Fail what waits with ENG84 and close all connections; servers are stopped by whoever started them."""
        if self._over is None or self._over.code != "ENG84":
            self._over = EngineError("the engine was closed", code="ENG84")
        self.router.lost(self._over)
        self._release_watch()
        await asyncio.gather(*(client.close() for client in self._clients.values()), *self._closing)

    # -- requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue a request's tokens, on whichever server.

        Raises:
            EngineError: ENG01-ENG03, ENG72, ENG78 the request is at fault; ENG83 no weights were loaded; ENG75, ENG76
                servers failed it too often, or too long; ENG84, ENG89 the engine was closed, or too few servers are
                left.
        """
        self._require_weights(f"request {request.id}")
        return await self._chain(request)

    async def score(self, tokens: Sequence[int], start: int) -> NDArray[Any]:
        """See `protocols.Engine`; raises as `generate`."""
        self._require_weights("score")
        self._scores += 1
        stands_for = GenerateRequest(
            id=f"score-{self._scores}", tokens=list(tokens), params=SamplingParams(max_new_tokens=1), seed=0
        )
        return await self.requests.score(tokens, start, stands_for)

    async def abort(self, ids: Sequence[str]) -> list[Completion]:
        """See `protocols.Engine`."""
        if self._halted:  # a server that stands still ends nothing: what it holds waits here from now on
            self.router.hold()
            await self._go_on()
            ended = await self.requests.stop(set(ids))
            await self.requests.recall()
            return ended
        return await self.requests.stop(set(ids))

    async def pause(self, mode: PauseMode) -> None:
        """Stop computing. Pauses nest; requests that come meanwhile wait here, not on a server.

        ``abort`` ends requests with what they have. ``retract`` and ``keep`` hold them: on their server where it can
        (``keep`` with its cache, where ``rollout.pause_generation_mode`` says in_place), else here, to be continued.
        """
        self._still()
        if mode == "abort":
            await self._go_on()
            await self.requests.stop()
        elif self.requests.served and not self._halted:
            wanted: ServerMode = "retract" if mode == "retract" else self._settings.pause_mode
            await self._halt(wanted)

    async def resume(self) -> None:
        """Go on after :meth:`pause`, once every pause has been ended; nothing happens where none was begun.

        Raises:
            EngineError: ENG06, memory was released and not taken back.
        """
        if self._depth == 1 and self._released:
            raise EngineError(f"resumed while {sorted(self._released)} were released", code="ENG06")
        if self._depth > 1:
            self._depth -= 1
            return
        self._depth = 0
        await self._go_on()
        self._release_watch()
        self.router.go()

    def _still(self) -> None:
        """Send nothing to servers from now on."""
        self._depth += 1
        self.router.hold()
        if self._hold is None and self.watch is not None:
            self._hold = ExitStack()
            self._hold.enter_context(self.watch.held())

    def _release_watch(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()

    async def _halt(self, mode: ServerMode) -> None:
        """Hold what servers have: there, or here with what it has where the server cannot or ``mode`` is abort."""
        if mode == "abort" or "pause_modes" not in self._settings.features:
            await self.requests.recall()
            return
        lanes = self.router.lanes
        self._halted = dict.fromkeys(lanes, mode)
        await self._each(lanes, lambda lane: lane.client.pause(mode))

    async def _go_on(self) -> None:
        """Let servers compute what they hold."""
        lanes, self._halted = list(self._halted), {}
        await self._each([lane for lane in lanes if lane.fenced is None], lambda lane: lane.client.resume())

    # -- weights

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """How the next weights come, and which tensors are compared."""
        self._require_open()
        return await self._weights.route(check, self.router.lanes)

    async def load(self, update: WeightUpdate) -> None:
        """Take an update on all servers, and serve it; requests that run are held meanwhile, or continued after it.

        A server where it fails is fenced and restarted. Where it fails on all, they are waited for.

        Raises:
            EngineError: ENG06 weights' memory was given back; what a server said where none of them came back.
        """
        self._require_open()
        if "weights" in self._released:
            raise EngineError("weights were loaded while their memory was released", code="ENG06")
        async with self._updating:
            self._newest = update.version
            async with self._quiet() as flush:
                lanes = self.router.lanes
                failures = await self._each(lanes, lambda lane: self._take(lane, update, flush=flush))
                self._update = update
                if len(failures) < len(lanes):
                    self.version = update.version
        if self.version != update.version:
            await self._revived(update.version, failures)

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[bool]:
        """Nothing runs inside; requests are on hold. The value says whether the prefix cache can be dropped."""
        self._still()
        try:
            if self.requests.served and not self._halted:
                await self._halt(self._settings.pause_mode if "live_load" in self.abilities else "abort")
            yield "in_place" not in self._halted.values() and "kv" not in self._released
        finally:
            await self._wake()

    async def _wake(self) -> None:
        """End one pause of our own: memory that was given back before it stays so."""
        if self._depth == 1 and self._released:
            self._depth = 0
            return
        await self.resume()

    async def _take(self, lane: Lane, update: WeightUpdate, *, flush: bool) -> None:
        await self._weights.load(lane, update, flush=flush)
        lane.version = update.version

    async def _revived(self, version: int, failures: Sequence[EngineError]) -> None:
        """Wait for servers that come back with ``version``; the first failure where none does."""
        if self.watch is not None:
            await self.watch.settled()
        if self.version == version:
            return
        gone = self._over or next(iter(failures), None)
        raise gone or EngineError(f"no server is left to take version {version}", code="ENG86")

    async def fingerprints(self) -> dict[str, str]:
        """Checksum of every tensor by `transfer.Held.key`; where servers differ, words that name the server."""
        self._require_open()
        found: dict[str, dict[str, str]] = {}

        async def ask(lane: Lane) -> None:
            found.update(told(lane, await lane.client.checksums()))

        failures = await self._each(self.router.lanes, ask)
        if failures and not found:
            raise failures[0]
        return merged(dict(sorted(found.items())))

    # -- memory

    async def release(self, what: set[str]) -> None:
        """Give back memory of all servers; requests that they hold wait here from now on.

        Raises:
            EngineError: ENG06 the servers run without SGLang's memory saver.
        """
        if not self._settings.memory_saver:
            raise EngineError(
                "the servers cannot give memory back",
                code="ENG06",
                why="they run without SGLang's memory saver",
                fix="enable_memory_saver = true under [sglang]",
            )
        if self._halted:
            await self._go_on()
        self.router.hold()
        if self.requests.served:
            await self.requests.recall()
        async with self._updating:  # no server is just coming back
            self._released |= what & MEMORY
            if "weights" in what:
                self._filling.clear()
            await self._each(self.router.lanes, lambda lane: self._give(lane, what))

    async def reacquire(self, what: set[str]) -> None:
        """Take memory back; weights come with the next :meth:`load`."""
        await self._each(self.router.lanes, lambda lane: self._get(lane, what))
        self._released -= what
        if "weights" in what:
            self._filling.set()
        if not self._released and not self._depth:
            await self.resume()

    async def _give(self, lane: Lane, what: set[str]) -> None:
        names = [name for name in ("kv", "weights") if name in what - lane.released]
        if names:
            await self._memory(lane, "/release_memory_occupation", names)
            lane.released.update(names)

    async def _get(self, lane: Lane, what: set[str]) -> None:
        names = [name for name in ("weights", "kv") if name in what & lane.released]
        if names:
            await self._memory(lane, "/resume_memory_occupation", names)
            lane.released.difference_update(names)

    async def _memory(self, lane: Lane, path: str, names: Sequence[str]) -> None:
        tags = [tag for name in names for tag in TAGS[name]]
        await lane.client.post(path, {"tags": tags}, timeout=CONTROL)

    # -- servers that fail and come back

    def progress(self, number: int) -> tuple[int, int]:
        """See `health.Engine`."""
        client = self._clients.get(number)
        if client is None:
            return 0, 0
        return client.progress.in_flight, client.progress.tokens + client.progress.replies

    def fence(self, number: int, error: EngineError) -> None:
        """See `health.Engine`: its requests go to other servers with what they have."""
        lane = self.router.fence(number, error)
        if lane is not None:
            self._halted.pop(lane, None)
            task = asyncio.get_running_loop().create_task(lane.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def bring_up(self, number: int) -> None:
        """See `health.Engine`.

        Raises:
            EngineError: ENG83 a tensor differs after the load (named); what the server or the trainer said.
        """
        while True:
            await self._filling.wait()
            async with self._updating:
                if self._filling.is_set():
                    return await self._bring_up(number)

    async def _bring_up(self, number: int) -> None:
        lane = await self._meet(number)
        try:
            await self._fill(lane)
            self._require_open()
        except BaseException:
            await lane.client.close()
            raise
        self.router.admit(lane)

    async def _fill(self, lane: Lane) -> None:
        """Give a server that has just started the weights of the others, and compare every tensor."""
        last = self._update
        if last is None:
            lane.version = self.version
            return
        checks = self._weights.all_checks()
        if last.transport == "disk" or self.source is None:
            update = last
            expected = await asyncio.to_thread(self._weights.expected, Path(last.handle["folder"])) if checks else {}
        else:
            route = await self._weights.route("all", [lane])
            update = await self.source(route)
            checks, expected = route.checks, update.fingerprints
        await self._take(lane, update, flush=True)
        if checks:
            served = merged(told(lane, await lane.client.checksums()))
            compare(checks, expected, served, update.version)
        self.version = self._newest = max(self.version, update.version)

    def lost(self, error: EngineError) -> None:
        """See `health.Engine`."""
        self._over = self._over or error
        self.router.lost(error)

    async def _meet(self, number: int) -> Lane:
        """A lane to a server that is ready."""
        server, settings = self._servers[number], self._settings
        client = Client(
            server.address,
            vocab_size=settings.vocab_size,
            context_len=settings.context_len,
            features=settings.features,
            concurrency=settings.concurrency,
            timeout=settings.timeout,
            retries=settings.retries,
            epoch=self.epoch,
            tokenizer=(lambda: self._tokenizer) if self._tokenizer is not None else None,
        )
        try:
            facts = await client.server_info()
        except BaseException:
            await client.close()
            raise
        self._clients[number] = client
        return Lane(
            client=client,
            number=number,
            room=settings.concurrency,
            generation=server.address.generation,
            ranks=max(1, int(facts.get("dp_size") or 1)),
            facts=facts,
        )

    async def _each(self, lanes: Sequence[Lane], call: Callable[[Lane], Awaitable[Any]]) -> list[EngineError]:
        """Call all lanes at once. Those that fail are fenced, with the errors as the answer; others' errors rise."""
        results = await asyncio.gather(*(call(lane) for lane in lanes), return_exceptions=True)
        failures: list[EngineError] = []
        for lane, result in zip(lanes, results, strict=True):
            if isinstance(result, EngineError):
                failures.append(result)
                self._fault(lane, result)
            elif isinstance(result, BaseException):
                raise result
        return failures

    def _fault(self, lane: Lane, error: EngineError) -> None:
        """Fence a server that failed, and have it restarted; once a generation."""
        if lane.fenced is None:
            self.fence(lane.number, error)
            if self.watch is not None:
                self.watch.report(lane.number, error)
            elif not self.router.lanes:
                self.lost(error)

    def _require_open(self) -> None:
        if self._over is not None:
            raise self._over

    def _require_weights(self, where: str) -> None:
        self._require_open()
        if self.version < 0:
            raise EngineError("no weights are loaded yet", code="ENG83", where=where, fix="call load first")
