"""The live page of a run, on 127.0.0.1: the page of `slime_report`, whose data comes from here.

    GET /?token=T                                         the page, as the run is now
    GET /updates?after=CURSOR   Authorization: Bearer T   what came since; waits up to 20 s for it
    GET /findings                                         what `slime diagnose` says
    GET /samples                                          the table of all samples
    GET /groups?first=N&count=M                           texts and tokens of groups, deflated

Refused, in this order: a Host that is not this machine (403, a name that was rebound to it), another method (405), no
or a wrong token (401), another path (404). The run is read only while somebody waits for it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from slime_core.errors import SlimeError
from slime_core.report.rundir import RunDir
from slime_report import page
from slime_report.data import findings_of, overview
from slime_report.samples import SampleBook
from slime_service.address import Address, bind
from slime_service.serving import HttpServer
from slime_watch.follower import RunFollower

HOSTS = frozenset({b"127.0.0.1", b"localhost", b"[::1]"})
"""Names of this machine; a port that ssh forwards is another than the server's."""
WAIT = 20.0  # seconds that a request for what is new waits
INTERVAL = 2.0  # seconds between looks at the run
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}

GONE = "STO111"  # the run directory was removed
PAGE = "application/octet-stream"  # of samples, as `slime_report.samples` has it

Reply = tuple[int, str, bytes]  # status, content type, body


class LivePage:
    """The page's ASGI application. ``failure`` is what ended it."""

    def __init__(self, run_dir: RunDir, token: str, ended: Callable[[], object]) -> None:
        self._follower, self._token, self._ended = RunFollower(run_dir), token.encode(), ended
        self._looked, self._looking = -INTERVAL, asyncio.Lock()
        self._book: SampleBook | None = None
        self._reading = asyncio.Lock()
        self._source = page.asset(page.EMBEDDED) + (files("slime_watch") / "assets" / "live.js").read_text()
        scripts = [page.application(self._source), page.plotly()]
        self._policy = page.policy(scripts, connect="'self'") + "; frame-ancestors 'none'"
        self.failure: SlimeError | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        try:
            status, kind, body = await self._reply(scope)
        except SlimeError as error:
            status, kind, body = problem(410 if error.code == GONE else 500, error.what)
            if error.code == GONE:
                self.failure = error
                self._ended()
        headers = {
            **HEADERS,
            **({"content-encoding": "deflate"} if kind == PAGE else {}),
            "content-security-policy": self._policy,
            "content-type": kind,
            "content-length": str(len(body)),
            **({"allow": "GET"} if status == 405 else {}),
            **({"www-authenticate": "Bearer"} if status == 401 else {}),
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    async def _reply(self, scope: Mapping[str, Any]) -> Reply:
        headers = {name.lower(): value for name, value in scope["headers"]}
        query = parse_qs(scope["query_string"].decode("latin-1"))
        bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        token = bearer or query.get("token", [""])[0].encode("utf-8", "replace")
        host, colon, port = headers.get(b"host", b"").rpartition(b":")
        if (host if colon and port.isdigit() else headers.get(b"host")) not in HOSTS:
            return problem(403, "only programs of this machine are served; open the URL that slime watch printed")
        if scope["method"] != "GET":
            return problem(405, "only GET is served")
        if not hmac.compare_digest(token, self._token):
            return problem(401, "the token is missing or wrong; open the URL that slime watch printed")
        if scope["path"] == "/":
            return await self._page()
        if scope["path"] == "/updates":
            return await self._updates(query.get("after", [""])[0])
        if scope["path"] == "/findings":
            findings, _ = await asyncio.to_thread(findings_of, self._follower.run_dir)
            return answer(findings)
        if scope["path"] == "/samples":
            return answer(await self._read_book(table_of))
        if scope["path"] == "/groups":
            first, count = (whole(query.get(name, [""])[0]) for name in ("first", "count"))
            return 200, PAGE, await self._read_book(lambda book: book.page(range(len(book.groups))[first:][:count]))
        return problem(404, "nothing is served here")

    async def _page(self) -> Reply:
        await self._look()
        follower = self._follower
        facts = await asyncio.to_thread(overview, [follower.run_dir])
        facts["cursor"] = ""  # the first update has everything once more: rows may have come between the two reads
        html = "".join(page.render(facts, source=self._source))
        return 200, "text/html; charset=utf-8", html.encode("utf-8", "replace")

    async def _updates(self, after: str) -> Reply:
        end = time.monotonic() + WAIT
        await self._look()
        while self._follower.cursor == after and time.monotonic() < end:
            await asyncio.sleep(INTERVAL)
            await self._look()
        async with self._looking:  # a look in between would put rows behind the cursor that the update lacks
            update = await asyncio.to_thread(self._follower.update, after)
        return answer(update)

    async def _read_book(self, read: Callable[[SampleBook], Any]) -> Any:
        """A part of the samples; one at a time, since a book is read through files that it keeps open."""

        def work() -> Any:
            self._book = self._book or SampleBook(self._follower.run_dir)
            return read(self._book)

        async with self._reading:
            return await asyncio.to_thread(work)

    async def _look(self) -> None:
        """Read what is new, every two seconds for all who wait."""
        async with self._looking:
            if time.monotonic() - self._looked >= INTERVAL:
                await asyncio.to_thread(self._follower.look)
                self._looked = time.monotonic()


def whole(text: str) -> int:
    """A number of at most nine digits; 0 for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def table_of(book: SampleBook) -> dict[str, Any]:
    """The table of all samples as they are now."""
    book.refresh()
    return {**book.table(), "policy": "", "notices": book.notices()}


def answer(value: Any) -> Reply:
    """JSON."""
    return 200, "application/json", json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def problem(status: int, text: str) -> Reply:
    """A refusal in a plain sentence."""
    return status, "text/plain; charset=utf-8", f"{text}\n".encode()


def serve(run_dir: RunDir, port: int, started: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; ``started`` gets the URL with its token when requests are answered.

    Raises:
        ConfigError: CFG04 the port cannot be had.
        StorageError: STO111 the run directory was removed.
    """
    with bind(Address(folder=run_dir.path, token_env="", port=port)) as listening:
        asyncio.run(_serve(run_dir, listening, started))


async def _serve(run_dir: RunDir, listening: Any, started: Callable[[str], None]) -> None:
    token = secrets.token_urlsafe(32)

    def stop() -> None:
        server.should_exit = True

    app = LivePage(run_dir, token, stop)
    server = HttpServer(
        app,
        listening,
        started=lambda url: started(f"{url}/?token={token}"),
        closing=1,
        lifespan="off",
        log_level="critical",
        timeout_keep_alive=30,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await server.serve(sockets=[listening])
    if app.failure is not None:
        raise app.failure
