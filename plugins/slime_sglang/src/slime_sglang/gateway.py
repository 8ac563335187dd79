"""SGLang's own router as one more process of a run: started, told which servers there are, watched, started again.

    Launch -> launcher.py (a server's: session, log, held ports, token) -> ready -> `add` each server -> up
       up --its process dies, it answers nothing, a request found it broken--> down
       down --budget left--> requests of the old one ended on all servers -> a new process, told all servers -> up

The module speaks the router's wire: POST /workers, GET /workers, DELETE /workers/ID, GET /liveness. It decides nothing
about requests; `gateway_router` does, and is told when the router goes down and comes up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from slime_core.clusters.host import ProcessHost
from slime_core.errors import EngineError, SlimeError
from slime_sglang.address import ServerAddress
from slime_sglang.host import Launch
from slime_sglang.http import BROKEN, ServerFault, Transport, decoded, dumps, fault, message
from slime_sglang.server import Server

NUMBER = -1
"""The router's, where servers have numbers from 0 on."""
ASK = 10.0  # seconds for one call of its interface
JOINING = 60.0  # seconds until the router has met a server that it was told of
POLL = 0.05  # seconds between looks whether it has
DYING = 10.0  # seconds for a router whose connections break to be found dead
REFUSALS = 3  # looks in a row that found nobody, until a router whose process lives counts as failed
LONGEST_PAUSE = 60.0  # seconds before a restart; the first waits one interval, each further one twice as long
LOG = "gateway.log"
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # it writes them into files too
KINDS = {"null": "regular", "prefill": "prefill", "decode": "decode"}
"""A server's disaggregation_mode -> what the router calls such a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayWorker:
    """A server as the router is told of it.

    Example: GatewayWorker(url="http://127.0.0.1:30000", token=token)
    """

    url: str
    token: str = field(repr=False, default="")
    kind: str = "regular"  # or prefill, decode
    bootstrap_port: int = 0  # of a prefill server


class GatewayUser(Protocol):
    """Who sends requests through the router."""

    def down(self, error: ServerFault) -> None:
        """It is gone: send nothing, and let what waits for it fail with ``error`` (retryable)."""
        ...

    async def clear(self) -> None:
        """End on all servers what the old router had sent there."""
        ...

    def up(self, address: ServerAddress) -> None:
        """It serves at this address and knows all servers."""
        ...

    def ended(self, error: EngineError) -> None:
        """It will not come back: every request, waiting or new, fails with ``error``."""
        ...


class Process(Server):
    """The router's process; what a `Server` does, with another greeting."""

    @property
    def title(self) -> str:
        """See `Server.title`."""
        return "SGLang's router"

    def _redacted(self, text: str) -> str:
        return COLOURS.sub("", super()._redacted(text))

    async def _greet(self, where: str, timeout: float) -> str:
        """Empty where it answers, takes the token and refuses whoever has none; else what keeps it from that.

        Raises:
            EngineError: ENG71 another service answers, ENG73 it asks for no token or refuses ours.
        """
        end = time.monotonic() + timeout
        anonymous, authorized = Transport(self.address.url), Transport(self.address.url, token=self.address.token)
        try:
            reply = await anonymous.ask("GET", "/liveness", end=end)
            if reply.status != 200:
                return f"/liveness answered {reply.status}"
            reply = await authorized.ask("GET", "/workers", end=end)
            if reply.status in (401, 403):
                raise EngineError("SGLang's router refuses the token", code="ENG73", where=where)
            if reply.status != 200 or not isinstance(decoded(reply), dict):
                raise EngineError(
                    f"{reply.where} answered {reply.status}: no SGLang router", code="ENG71", where=where
                )
            if (await anonymous.ask("GET", "/workers", end=end)).status == 200:
                raise EngineError("SGLang's router answers without a token", code="ENG73", where=where)
        except ServerFault as error:
            return f"{error.what}: {error.why}" if error.why else error.what
        finally:
            await anonymous.close()
            await authorized.close()
        return ""


class Gateway:
    """The router of one model's servers, watched from entering to leaving.

    Example:
        async with Gateway(Launch(...), interval=5.0, timeout=120.0, start_timeout=900.0, max_restarts=3) as gateway:
            gateway.keeper = router
            await gateway.add(0, Worker(url=server.address.url, token=server.address.token))
    """

    def __init__(
        self,
        launch: Launch,
        *,
        interval: float = 5.0,
        timeout: float = 120.0,
        start_timeout: float = 900.0,
        max_restarts: int = 3,
        token: str = "",
        host: ProcessHost | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.process = Process.launch(launch, number=NUMBER, group="router", token=token, host=host)
        self.keeper: GatewayUser | None = None
        self.restarts = 0
        self._interval, self._timeout, self._start_timeout = interval, timeout, start_timeout
        self._max_restarts, self._note = max_restarts, note
        self._workers: dict[int, GatewayWorker] = {}
        self._ids: dict[int, str] = {}  # the present router's, of those that it knows
        self._serving = asyncio.Event()  # it can be told of servers; or it is lost
        self._changing = asyncio.Lock()  # servers are told, or taken away
        self._reported: ServerFault | None = None
        self._poke = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._error: EngineError | None = None
        self._http: Transport | None = None

    @property
    def address(self) -> ServerAddress:
        """Of its present generation."""
        return self.process.address

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.process.stop()
            raise
        self._task = asyncio.create_task(self._tend(), name="slime-sglang-router")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._close()
        await self.process.stop()

    # -- which servers it knows

    async def add(self, number: int, worker: GatewayWorker) -> None:
        """Tell it of a server, in place of an older one of that number; on return it has met the server.

        While the router is down this waits.

        Raises:
            EngineError: ENG69 it did not meet the server in time; what :meth:`GatewayUser.ended` was told.
        """
        await self.remove(number)
        self._workers[number] = worker
        while number not in self._ids:
            await self._serving.wait()
            if self._error is not None:
                raise self._error
            async with self._changing:
                try:
                    if self._serving.is_set() and number not in self._ids:
                        await self._register(number, worker)
                except ServerFault as error:
                    self.report(error)
                except BaseException:
                    self._workers.pop(number, None)
                    self._ids.pop(number, None)
                    raise

    async def remove(self, number: int) -> None:
        """Take a server away; on return no request goes there any more. What it has already is not touched.

        A router that does not answer is reported: the next one is not told of this server.
        """
        self._workers.pop(number, None)
        async with self._changing:
            name = self._ids.pop(number, "")
            try:
                if name and self._serving.is_set():
                    await self._ask("DELETE", f"/workers/{name}", missing=True)
                    while any(worker.get("id") == name for worker in await self._list_workers()):
                        await asyncio.sleep(POLL)
            except ServerFault as error:
                self.report(error)

    async def _list_workers(self) -> list[dict[str, Any]]:
        workers = (await self._ask("GET", "/workers")).get("workers")
        return workers if isinstance(workers, list) else []

    async def _register(self, number: int, worker: GatewayWorker) -> None:
        body: dict[str, Any] = {"url": worker.url, "worker_type": worker.kind}
        body |= {"api_key": worker.token} if worker.token else {}
        body |= {"bootstrap_port": worker.bootstrap_port} if worker.bootstrap_port else {}
        reply = await self._ask("POST", "/workers", body)
        self._ids[number] = name = str(reply.get("worker_id", ""))
        deadline = time.monotonic() + JOINING
        while self._workers.get(number) is worker:  # else it was taken away meanwhile
            if any(entry.get("url") == worker.url and entry.get("is_healthy") for entry in await self._list_workers()):
                return
            if time.monotonic() >= deadline:
                status = await self._ask("GET", f"/workers/{name}")
                raise EngineError(
                    f"SGLang's router did not take up server {number}",
                    code="ENG69",
                    where=str(self.process.log),
                    why=str(status.get("job_status") or status)[:300],
                    fix="see its log",
                )
            await asyncio.sleep(POLL)

    async def _ask(self, method: str, path: str, body: Any = None, *, missing: bool = False) -> dict[str, Any]:
        """One call of its interface; with ``missing`` a 404 is as good as an answer."""
        if self._http is None:
            raise fault("SGLang's router is being started", "ENG69", path)
        raw = None if body is None else dumps(body)
        reply = await self._http.ask(method, path, raw, end=time.monotonic() + ASK)
        if reply.status == 404 and missing:
            return {}
        if reply.status not in (200, 202, 204):
            text = message(reply.body)
            raise fault(f"SGLang's router answered {reply.status} to {method} {path}: {text}", "ENG75", reply.where)
        content = decoded(reply) if reply.body.strip() else {}
        return content if isinstance(content, dict) else {}

    # -- its life

    def report(self, error: ServerFault) -> None:
        """A request, or a call of its interface, found it broken: it is started again."""
        self._serving.clear()
        if self._reported is None:
            self._reported = error
            self._poke.set()

    async def alive(self) -> bool:
        """Whether it answers; asked once."""
        http = Transport(self.address.url)
        try:
            return (await http.ask("GET", "/liveness", end=time.monotonic() + ASK)).status == 200
        except EngineError:
            return False
        finally:
            await http.close()

    async def _start(self) -> None:
        await self._close()
        self._ids.clear()
        await self.process.start()
        await self.process.ready(self._start_timeout)
        self._http = Transport(self.address.url, token=self.address.token)
        self._serving.set()

    async def _close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _tend(self) -> None:
        try:
            while True:
                failed = await self._failed()
                self._serving.clear()
                failed.where = failed.where or str(self.process.log)
                failed.why = failed.why or self.process.tail()
                if self.keeper is not None:
                    self.keeper.down(failed)
                if not await self._again(failed):
                    return
        except Exception as error:  # a bug of ours must not leave requests waiting for ever
            self._lose(EngineError("the watch over SGLang's router broke", code="ENG84", why=repr(error)))
            raise

    async def _failed(self) -> ServerFault:
        """Look until it fails."""
        died = asyncio.create_task(self.process.died())
        poked = asyncio.create_task(self._poke.wait())
        silent, since = 0, time.monotonic()
        try:
            while True:
                await asyncio.wait((died, poked), timeout=self._interval, return_when=asyncio.FIRST_COMPLETED)
                if died.done():
                    return fault(f"SGLang's router {died.result()}", "ENG84", "")
                if poked.done() and self._reported is not None:
                    if self._reported.code in BROKEN and not await self.alive():  # dying, and its end can be named
                        await asyncio.wait({died}, timeout=DYING)
                    if not died.done():
                        return self._reported
                    return fault(f"SGLang's router {died.result()}", "ENG84", "")
                if await self.alive():
                    silent, since = 0, time.monotonic()
                    continue
                silent += 1
                if silent >= REFUSALS and time.monotonic() - since >= min(self._timeout, REFUSALS * ASK):
                    return fault("SGLang's router does not answer", "ENG85", "", running=True)
        finally:
            died.cancel()
            poked.cancel()
            await asyncio.gather(died, poked, return_exceptions=True)

    async def _again(self, failed: ServerFault) -> bool:
        """Start it once more, as often as that may be tried; False where it is given up."""
        while self.restarts < self._max_restarts:
            self.restarts += 1
            self._note(f"{failed.what}; restart {self.restarts} of {self._max_restarts}")
            try:
                await self._rise()
            except (SlimeError, OSError, TimeoutError) as error:
                message = error.what if isinstance(error, SlimeError) else repr(error)
                self._note(f"SGLang's router did not restart: {message}")
                continue
            self._note("SGLang's router has restarted")
            return True
        await self.process.stop(grace=0)
        self._lose(
            EngineError(
                f"SGLang's router is gone after {self.restarts} restarts: {failed.what}",
                code="ENG84",
                where=str(self.process.log),
                why=self.process.tail(),
                fix="--rollout-router builtin, or see its log; what was finished is in the ledger: "
                "slime run --resume RUN_DIR",
                lost=True,
            )
        )
        return False

    async def _rise(self) -> None:
        self._poke.clear()
        self._reported = None
        await self.process.stop(grace=0)
        await self._close()
        if self.keeper is not None:
            await self.keeper.clear()
        await asyncio.sleep(min(self._interval * 2.0 ** (self.restarts - 1), LONGEST_PAUSE))
        async with self._changing:
            await self._start()
            for number, worker in list(self._workers.items()):
                await self._register(number, worker)  # a server that died meanwhile is fenced, and taken out
        if self.keeper is not None:
            self.keeper.up(self.address)

    def _lose(self, error: EngineError) -> None:
        self._error = error
        self._serving.set()
        if self.keeper is not None:
            self.keeper.ended(error)
