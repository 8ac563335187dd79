"""Routes of the judge as a guarded ASGI application. Everything stands behind the token.

    POST /v1/judge   an `JudgeRequest` -> {"verdict": {...}}      GET /health   the queue and the devices

Refused: no token (401), a body that is too large (413) or slow (408) or no `JudgeRequest` (422), a key with something
else to judge (409), a full queue (429), a service that ends (503): {"error": {code, what, where, why, fix}}.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from slime_kernelbench.codec import verdict_to_json
from slime_kernelbench.service.judge_service import Clash, JudgeService
from slime_kernelbench.service.models import JudgeRequest
from slime_kernelbench.service.pool import PoolFull, Stopped
from slime_kernelbench.types import Verdict
from slime_service.guard import Guard, Refused, invalid, refused

MAX_BODY = 8 << 20  # bytes


class ServiceState:
    """Whether new work is taken."""

    def __init__(self) -> None:
        self.draining = False


def make_app(service: JudgeService, *, token: str, state: ServiceState) -> Guard:
    """The application; who runs it starts and ends the service's pool."""

    async def judge(request: Request) -> Response:
        if state.draining:
            raise refused(503, "draining", "the service ends; it takes no more work", fix="ask another, or later")
        try:
            ask = JudgeRequest.model_validate_json(await request.body())
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            raise invalid(errors, fix="send key, source and problem {id, name, source, level}; nothing else") from None
        verdict = await _while_connected(request, _judged(service, ask))
        return JSONResponse({"verdict": verdict_to_json(verdict)})

    async def health(request: Request) -> Response:
        alive = any(place.state in ("ready", "busy") for place in service.pool.places)
        status = "draining" if state.draining else "ok" if alive else "no_device"
        return JSONResponse({"status": status, **service.pool.state()})

    routes = [Route("/v1/judge", judge, methods=["POST"]), Route("/health", health)]
    handlers = dict.fromkeys((Refused, HTTPException, Exception), _refusal)
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token=token, max_body=MAX_BODY)


def _refusal(request: Request, error: Exception) -> Response:
    """The answer to an exception that a request meets."""
    if isinstance(error, HTTPException):
        refusal = refused(error.status_code, "refused", error.detail, where=request.url.path[:200])
    elif isinstance(error, Refused):
        refusal = error
    else:
        refusal = refused(500, "failed", "the service failed", fix="look at its log")
    return Response(refusal.body, refusal.status, refusal.headers, "application/json")


async def _judged(service: JudgeService, ask: JudgeRequest) -> Verdict:
    try:
        return await service.judge(ask)
    except PoolFull:
        reason = f"{service.pool.limits.waiting} candidates wait"
        fix = "send the same again after Retry-After seconds"
        raise refused(429, "full", "the queue is full", why=reason, fix=fix) from None
    except Stopped:
        message = "the service ended before this was judged"
        raise refused(503, "draining", message, fix="ask another, or later") from None
    except Clash:
        message = "this key was used for another judgement"
        raise refused(409, "key", message, where="key", fix="a new key for each") from None


async def _while_connected(request: Request, work: Awaitable[Verdict]) -> Verdict:
    """The value of ``work``, which is cancelled where its caller hangs up; nobody reads the answer then."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    value, hangup = asyncio.ensure_future(work), asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait([value, hangup], return_when=asyncio.FIRST_COMPLETED)
        if not value.done():
            raise refused(499, "gone", "the caller hung up")
        return value.result()
    finally:
        value.cancel()
        hangup.cancel()
