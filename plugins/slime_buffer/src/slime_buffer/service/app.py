"""Routes of the buffer as an ASGI application, with its OpenAPI page. Every route requires the token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Path as InPath, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from slime_buffer.service import models
from slime_buffer.service.buffer_service import BufferService
from slime_buffer.service.tables import QueueFull
from slime_core.errors import SlimeError
from slime_service.guard import Guard, Refused, invalid, of_slime_error, refused

REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": models.Refusal, "description": "The token is missing or wrong."},
    413: {"model": models.Refusal, "description": "The body is too large."},
    422: {"model": models.Refusal, "description": "The body is not what this route takes."},
    429: {"model": models.Refusal, "description": "A queue is full: come again after Retry-After seconds."},
    503: {"model": models.Refusal, "description": "The disk fails; nothing was changed that was not answered."},
}
CODES = {404: "no_route", 405: "method"}
ClaimId = Annotated[str, InPath(pattern=r"^b[0-9]{1,18}$")]


class StrictRequest(Request):
    """JSON by one strict parser: no NaN, no unlimited depth."""

    async def json(self) -> Any:
        """The body.

        Raises:
            JSONDecodeError: it is none; FastAPI makes it a validation error.
        """
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = from_json(body, allow_inf_nan=False)
            except ValueError as error:
                raise json.JSONDecodeError(str(error)[:200], "", 0) from None
        return self._json


class StrictRoute(APIRoute):
    """A route that reads its body by :class:`StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """FastAPI's handler, given our request."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strict


def make_app(service: BufferService, *, token: str, max_body: int, max_tokens: int, max_requests: int = 256) -> Guard:
    """The guarded application; it starts and closes the service.

    ``max_body`` in bytes, ``max_tokens`` of one sequence or prompt.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="slime rollout buffer",
        version="1",
        description=models.__doc__ or "",
        lifespan=lifespan,
        redoc_url=None,
        responses=REFUSALS,
        separate_input_output_schemas=False,
    )
    app.router.route_class = StrictRoute
    _handle_errors(app)
    _trainer_routes(app, service, max_tokens)
    _generator_routes(app, service, max_tokens)
    _other_routes(app, service)
    larger = "send fewer rows a request, or serve with a larger --max-body-mib"
    return Guard(app, token=token, max_body=max_body, max_requests=max_requests, larger=larger)


def _trainer_routes(app: FastAPI, service: BufferService, max_tokens: int) -> None:
    @app.post("/v1/rollouts", response_model=models.Asked, tags=["trainer"])
    async def start_rollout(ask: models.Ask) -> Response:
        """Start a rollout: groups for generators. Known ids change nothing; what has ended is handed out again."""
        _limit((group.tokens for group in ask.groups), max_tokens)
        return _answer(await service.ask(ask))

    @app.post("/v1/batches/claim", response_model=models.Claimed, tags=["trainer"])
    async def claim_batch(claim: models.ClaimBatch) -> Response:
        """Read groups that have ended. They come again, to anybody, when the lease ends without an ack."""
        return _answer(await service.claim_batch(claim))

    @app.post("/v1/batches/{claim}/ack", response_model=models.Settled, tags=["trainer"])
    async def acknowledge(claim: ClaimId, settle: models.Settle) -> Response:
        """The reader has made these groups durable on its side."""
        return _answer(await service.settle(claim, settle, acknowledge=True))

    @app.post("/v1/batches/{claim}/release", response_model=models.Settled, tags=["trainer"])
    async def give_back(claim: ClaimId, settle: models.Settle) -> Response:
        """The reader does not want these groups now."""
        return _answer(await service.settle(claim, settle, acknowledge=False))

    @app.post("/v1/groups/drop", response_model=models.Asked, tags=["trainer"])
    async def drop(drop: models.DropGroups) -> Response:
        """Give up groups, with a reason."""
        return _answer(await service.drop(drop))


def _generator_routes(app: FastAPI, service: BufferService, max_tokens: int) -> None:
    @app.post("/v1/work/claim", response_model=models.Works, tags=["generator"])
    async def claim_work(claim: models.ClaimWork) -> Response:
        """Take open groups. They are open again when the lease ends."""
        return _answer(await service.claim_work(claim))

    @app.post("/v1/work/extend", response_model=models.Held, tags=["generator"])
    async def extend(lease: models.Lease) -> Response:
        """Heartbeat: the leases get this length from now."""
        return _answer(await service.extend(lease))

    @app.post("/v1/work/release", response_model=models.Held, tags=["generator"])
    async def release(lease: models.Lease) -> Response:
        """Release a lease; written samples stay."""
        return _answer(await service.release(lease))

    @app.post("/v1/samples", response_model=models.Written, tags=["generator"])
    async def write(write: models.Write) -> Response:
        """Write rollouts, each as one or several sequences. The first that is written under an id stays."""
        _limit((sequence.tokens for t in write.trajectories for sequence in t.sequences), max_tokens)
        return _answer(await service.write(write))

    @app.post("/v1/groups/push", response_model=models.Asked, tags=["generator"])
    async def push(push: models.Push) -> Response:
        """Push whole groups that no run requested."""
        rollouts = [rollout for group in push.groups for rollout in group.rollouts]
        _limit((sequence.tokens for rollout in rollouts for sequence in rollout.sequences), max_tokens)
        _limit((group.tokens for group in push.groups), max_tokens)
        return _answer(await service.push(push))


def _other_routes(app: FastAPI, service: BufferService) -> None:
    @app.get("/v1/groups", response_model=models.Rows, tags=["look"])
    async def peek(query: Annotated[models.PeekQuery, Query()]) -> Response:
        """List groups; nothing is taken."""
        return _answer(await service.peek(query))

    @app.get("/v1/stats", response_model=models.Stats, tags=["look"])
    async def stats() -> Response:
        """Counts, queues and rates."""
        return _answer(await service.stats())

    @app.get("/health", response_model=models.Health, tags=["look"])
    async def health() -> Response:
        """Health of the service."""
        return _answer(models.Health())


def _answer(body: BaseModel) -> Response:
    return Response(body.model_dump_json(), media_type="application/json")


def _limit(lists: Iterable[list[int]], most: int) -> None:
    longest = max(map(len, lists), default=0)
    if longest > most:
        raise refused(
            422,
            "too_long",
            f"a sequence has {longest} tokens",
            why=f"this service takes {most}",
            fix="serve with a larger --max-tokens",
        )


def _handle_errors(app: FastAPI) -> None:
    def answer_error(request: Request, error: Exception) -> Response:
        answer = _refusal(error)
        return Response(answer.body, answer.status, dict(answer.headers), "application/json")

    kinds: tuple[type[Exception], ...] = (RequestValidationError, HTTPException, SlimeError, QueueFull, Refused)
    for kind in (*kinds, Exception):
        app.add_exception_handler(kind, answer_error)


def _refusal(error: Exception) -> Refused:
    """The typed response to a request's exception."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, QueueFull):
        return refused(
            429,
            "full",
            f"there are {error.size} {error.what}",
            why="a queue of the service is full; nothing was changed",
            fix="send the same again after Retry-After seconds",
        )
    if isinstance(error, SlimeError):
        return of_slime_error(error)
    if isinstance(error, RequestValidationError):
        return invalid(error.errors(), fix="GET /openapi.json says what it takes")
    if isinstance(error, HTTPException):
        code = CODES.get(error.status_code, "refused")
        return refused(error.status_code, code, str(error.detail)[:200], fix="GET /openapi.json lists the routes")
    return refused(500, "SLM00", "the service failed", fix="look at its log")
