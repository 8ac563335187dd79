"""The routes: a desk in, an aiohttp application out. Everything stands behind the token.

    POST /v1/judge   an `Ask` -> {"verdict": {...}}      GET /health   the queue and the devices

Refused: no token (401), a body that is too large (413), too slow (408) or not an `Ask` (422), a key with something
else to judge (409), a full queue (429), a service that ends (503): {"error": {code, what, where, why, fix}}.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from pydantic import ValidationError

from slime_kernelbench.codec import verdict_to_json
from slime_kernelbench.service.desk import Clash, Desk
from slime_kernelbench.service.models import SHOWN, Ask
from slime_kernelbench.service.pool import Full, Stopped
from slime_kernelbench.types import Verdict

MAX_BODY = 8 << 20  # bytes
BODY_SECONDS = 30.0
HEAD_SECONDS = 20.0  # also of a connection between two requests: longer than clients keep one
RETRY_AFTER = 1  # seconds, at 429 and 503
log = logging.getLogger("slime.kernelbench")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gate:
    """Whether new work is taken."""

    def __init__(self) -> None:
        self.draining = False


def make_app(desk: Desk, *, token: str, gate: Gate) -> web.Application:
    """The application; who runs it starts and ends the desk's pool."""
    expected = b"Bearer " + token.encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", errors="surrogateescape")
        if not hmac.compare_digest(given, expected):
            fix = "send Authorization: Bearer TOKEN; the service says at its start where the token lies"
            return refuse(401, "unauthorized", "the token is missing or wrong", where="header Authorization", fix=fix)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return refuse(error.status, "refused", error.reason, where=request.path[:200])
        except Exception:
            log.exception("%s %r", request.method, request.path)
            return refuse(500, "failed", "the service failed", fix="look at its log")

    async def judge(request: web.Request) -> web.StreamResponse:
        if gate.draining:
            return refuse(503, "draining", "the service ends; it takes no more work", fix="ask another, or later")
        ask = await _ask(request)
        return await _judged(desk, ask) if isinstance(ask, Ask) else ask

    async def health(request: web.Request) -> web.StreamResponse:
        alive = any(place.state in ("ready", "busy") for place in desk.pool.places)
        status = "draining" if gate.draining else "ok" if alive else "no_device"
        return web.json_response({"status": status, **desk.pool.state()})

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY)
    app.router.add_post("/v1/judge", judge)
    app.router.add_get("/health", health)
    return app


def make_runner(app: web.Application, *, closing: float, head_seconds: float = HEAD_SECONDS) -> web.AppRunner:
    """What serves the application: heads have a deadline, bodies are taken as they are, and no caller fills the log.

    ``closing`` is the time in seconds for answers under way at the end.
    """
    quiet = logging.getLogger("slime.kernelbench.http")
    quiet.setLevel(logging.CRITICAL)  # aiohttp writes a traceback for each request that is no HTTP
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=closing,
        keepalive_timeout=head_seconds,  # of a connection without a whole head, from its beginning on
        auto_decompress=False,
        logger=quiet,
    )


async def _ask(request: web.Request) -> Ask | web.Response:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        return refuse(415, "encoding", "the body is compressed", fix="send it as it is")
    if request.content_type != "application/json":
        return refuse(415, "type", "the body is not JSON by its header", fix="send content-type: application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
        return Ask.model_validate_json(body)
    except web.HTTPRequestEntityTooLarge:
        return refuse(413, "too_large", "the body is too large", why=f"at most {MAX_BODY} bytes are read")
    except TimeoutError:
        return refuse(408, "slow", "the body did not come", why=f"it had {BODY_SECONDS:g} s", fix="send it again")
    except ValidationError as error:
        found = [
            f"{'.'.join(map(str, item['loc']))[:100]}: {item['msg'][:200]}"
            for item in error.errors(include_url=False, include_input=False)[:SHOWN]
        ]
        more = error.error_count() - len(found)
        return refuse(
            422,
            "invalid",
            "the request is not what this route takes",
            where=found[0].split(":")[0],
            why="; ".join(found) + (f"; and {more} more" if more > 0 else ""),
            fix="send key, source and problem {id, name, source, level}; nothing else",
        )


async def _judged(desk: Desk, ask: Ask) -> web.Response:
    try:
        verdict: Verdict = await desk.judge(ask)
    except Full:
        why = f"{desk.pool.limits.waiting} candidates wait"
        return refuse(429, "full", "the queue is full", why=why, fix="send the same again after Retry-After seconds")
    except Stopped:
        return refuse(503, "draining", "the service ended before this was judged", fix="ask another, or later")
    except Clash:
        return refuse(409, "key", "this key asked for another judgement", where="key", fix="a new key for each")
    return web.json_response({"verdict": verdict_to_json(verdict)})


def refuse(status: int, code: str, what: str, *, where: str = "", why: str = "", fix: str = "") -> web.Response:
    """A refusal with its parts; 429 and 503 say when to come again."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    headers |= {"Retry-After": str(RETRY_AFTER)} if status in (429, 503) else {}
    headers |= {"Connection": "close"} if status in (401, 408, 413, 415) else {}
    error = {"code": code, "what": what, "where": where, "why": why, "fix": fix}
    return web.json_response({"error": error}, status=status, headers=headers)
