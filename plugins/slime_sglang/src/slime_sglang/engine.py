"""SGLang servers as one Engine: requests spread over them, weights to all of them or to none, memory given and taken.

    generate, score, abort   -> middleware -> `requests` -> `router` -> a server's `Client`
    load, fingerprints, ...  -> every server at once; one that fails is fenced, and restarted by the `health.Watch`

A server serves once it has weights: what it started with is never sampled. A fenced server comes back through
`Fleet.bring_up`, with the weights of the others, every tensor compared.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from slime_core.engines.admission import check_adapter
from slime_core.errors import EngineError
from slime_core.protocols import PauseMode
from slime_core.types import GenerateRequest, SamplingParams
from slime_sglang.fleet import Fleet, FleetSettings, ServerMode
from slime_sglang.gateway_router import GatewayRouter
from slime_sglang.requests import Requests
from slime_sglang.reserved_server import ReservedServer
from slime_sglang.router import Lane, Middleware, Router, chained
from slime_sglang.weights import WeightRoutes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from slime_core.types import Completion, Media, WeightCheck, WeightRoute, WeightUpdate
    from slime_sglang.gateway import Gateway
    from slime_sglang.server import Server

__all__ = ["FleetSettings", "SglangEngine"]

MEMORY = frozenset({"kv", "weights"})
TAGS = {"kv": ("kv_cache", "cuda_graph"), "weights": ("weights",)}
CONTROL = 120.0  # seconds for a call that moves memory
IDLE = 60.0  # seconds until a server has nothing left of requests that were recalled


class SglangEngine:
    """Implements `protocols.Engine`; ``fleet`` is what whoever watches its servers, or publishes again, talks to.

    With ``gateway``, which runs, SGLang's router chooses the server of a request, else slime's.

    Example:
        engine = SglangEngine(servers, Settings(...), weights=Weights(...), tokenizer=tokenizer)
        await engine.open()  # the servers are ready
        async with Watch(servers, engine.fleet, limits) as engine.fleet.watch:
            await engine.load(await trainer.publish(0, await engine.route("all")))
            done = await engine.generate(request)
        await engine.close()
    """

    def __init__(
        self,
        servers: Sequence[Server],
        settings: FleetSettings,
        *,
        weights: WeightRoutes,
        tokenizer: Any = None,
        middleware: Sequence[Middleware] = (),
        gateway: Gateway | None = None,
    ) -> None:
        self.epoch, self.abilities = settings.epoch, settings.abilities
        self.router = Router() if gateway is None else self._behind(gateway, settings)
        self.fleet = Fleet(servers, settings, weights=weights, tokenizer=tokenizer, router=self.router)
        self.requests = Requests(
            self.router,
            tokenizer=tokenizer,
            fault=self.fleet.fault,
            high=lambda: max(self.fleet.version, self.fleet.newest),
            attempts=settings.retries + 1,
        )
        self._settings, self._middleware = settings, tuple(middleware)
        self._chain = chained(middleware, self.requests.generate)
        self._depth = 0  # of pauses
        self._halted: dict[Lane, ServerMode] = {}  # servers that hold requests themselves
        self._hold: ExitStack | None = None  # the watch expects no progress
        self._released: set[str] = set()
        self._scores = 0

    def _behind(self, gateway: Gateway, settings: FleetSettings) -> GatewayRouter:
        return GatewayRouter(
            gateway,
            connect=lambda address, **more: self.fleet.connect(address, **more),
            room=settings.concurrency,
            on_loss=lambda error: self.fleet.lost(error),
        )

    @property
    def version(self) -> int:
        """Of the weights that all servers have; -1 before the first load."""
        return self.fleet.version

    @version.setter
    def version(self, value: int) -> None:
        self.fleet.version = value

    async def open(self, *, version: int = -1) -> None:
        """Meet all servers, which are ready. ``version`` is of the weights that they started with and may serve.

        Raises:
            EngineError: a server that does not fit the run.
        """
        await self.fleet.open(version)

    async def close(self) -> None:
        """Fail what waits with ENG84 and close all connections; servers are stopped by whoever started them."""
        self._release_watch()
        await self.fleet.close()

    # -- requests

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue a request's tokens, on whichever server.

        Raises:
            EngineError: ENG01-ENG03, ENG72, ENG78 the request is at fault; ENG83 no weights were loaded; ENG75, ENG76
                servers failed it too often, or too long; ENG84, ENG89 the engine was closed, or too few servers are
                left.
        """
        self._require_weights(f"request {request.id}")
        check_adapter(request.adapter, self._settings.adapters, f"request {request.id}")
        return await self._chain(request)

    async def score(
        self, tokens: Sequence[int], start: int, media: Media | None = None, adapter: str = ""
    ) -> NDArray[Any]:
        """See `protocols.Engine`; raises as `generate`."""
        self._require_weights("score")
        check_adapter(adapter, self._settings.adapters, "score")
        self._scores += 1
        stands_for = GenerateRequest(
            id=f"score-{self._scores}",
            tokens=list(tokens),
            params=SamplingParams(max_new_tokens=1),
            seed=0,
            media=media,
            adapter=adapter,
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
            mode_used: ServerMode = "retract" if mode == "retract" else self._settings.pause_mode
            await self._halt(mode_used)

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
        if self._hold is None and self.fleet.watch is not None:
            self._hold = ExitStack()
            self._hold.enter_context(self.fleet.watch.pause())

    def _release_watch(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()

    async def _halt(self, mode: ServerMode) -> None:
        """Hold what servers have: there, or here with what it has where the server cannot or ``mode`` is abort.

        An adapter is not unloaded while a server has a request for it, so those wait here.
        """
        if mode == "abort" or "pause_modes" not in self._settings.features or self._settings.adapters:
            await self.requests.recall()
            return
        lanes = self.router.lanes
        self._halted = dict.fromkeys(lanes, mode)
        await self.fleet.call_all(lanes, lambda lane: lane.client.pause(mode))

    async def _go_on(self) -> None:
        """Let servers compute what they hold."""
        lanes, self._halted = list(self._halted), {}
        await self.fleet.call_all([lane for lane in lanes if lane.fenced is None], lambda lane: lane.client.resume())

    @property
    def can_reserve(self) -> bool:
        """Whether :meth:`reserve` would find a server."""
        return self.fleet.reserved.can_reserve

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[ReservedServer]:
        """The least loaded server, for a while: it gets no other requests, and takes no update.

        What it runs ends on it. Afterwards it serves with the others, at once or from the next update on.

        Raises:
            EngineError: no other would serve, or SGLang's router spreads the requests.
        """
        self._require_weights("reserve")
        async with self.fleet.reserve(self._middleware) as server:
            yield server

    # -- weights

    async def route(self, check: WeightCheck) -> WeightRoute | None:
        """How the next weights come, and which tensors are compared."""
        return await self.fleet.route(check)

    async def load(self, update: WeightUpdate) -> None:
        """Take an update on all servers, and serve it; requests that run are held meanwhile, or continued after it.

        A server where it fails is fenced and restarted. Where it fails on all, they are waited for.

        Raises:
            EngineError: ENG06 weights' memory was given back; what a server said where none of them came back.
        """
        self.fleet.require_open()
        if "weights" in self._released:
            raise EngineError("weights were loaded while their memory was released", code="ENG06")
        await self.fleet.load(update, self._quiet)

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

    async def fingerprints(self, adapters: Sequence[str] = ()) -> dict[str, str]:
        """Checksum of every tensor by `types.Held.key`; where servers differ, each server's, with its name.

        Of ``adapters`` alone there are none, as SGLang tells none.
        """
        return {} if adapters else await self.fleet.fingerprints()

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
        async with self.fleet.updating:  # no server is just coming back
            self._released |= what & MEMORY
            if "weights" in what:
                self.fleet.filling.clear()
            await self.fleet.call_all(self.router.lanes, lambda lane: self._give(lane, what))

    async def reacquire(self, what: set[str]) -> None:
        """Take memory back; weights come with the next :meth:`load`."""
        await self.fleet.call_all(self.router.lanes, lambda lane: self._get(lane, what))
        self._released -= what
        if "weights" in what:
            self.fleet.filling.set()
        if not self._released and not self._depth:
            await self.resume()

    async def _give(self, lane: Lane, what: set[str]) -> None:
        names = [name for name in ("kv", "weights") if name in what - lane.released]
        if names:  # while anything is left of a request, a release ends the server, and a flush only waits
            await lane.client.post(f"/flush_cache?timeout={IDLE:g}", {}, timeout=CONTROL)
            await self._memory(lane, "/release_memory_occupation", names)
            lane.released.update(names)
            lane.base = lane.base and ("weights" not in names or bool(lane.fact("enable_weights_cpu_backup")))

    async def _get(self, lane: Lane, what: set[str]) -> None:
        names = [name for name in ("weights", "kv") if name in what & lane.released]
        if names:
            await self._memory(lane, "/resume_memory_occupation", names)
            lane.released.difference_update(names)

    async def _memory(self, lane: Lane, path: str, names: Sequence[str]) -> None:
        tags = [tag for name in names for tag in TAGS[name]]
        await lane.client.post(path, {"tags": tags}, timeout=CONTROL)

    def _require_weights(self, where: str) -> None:
        self.fleet.require_open()
        if self.version < 0:
            raise EngineError("no weights are loaded yet", code="ENG83", where=where, fix="call load first")
