"""Client of a rollout buffer service: typed bodies, tried again where the service is away.

Every request carries ids, so repeating it changes nothing: all requests are safe to repeat. A refusal
(4xx) is not tried again, except 429, which says when. Proxy settings of the environment are ignored.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from slime_buffer.service import models
from slime_buffer.service.values import Wire
from slime_core.errors import EngineError

B = TypeVar("B", bound=Wire)
AGAIN = (429, 500, 502, 503, 504)
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between tries


class BufferClient:
    """One service. ``deadline``: seconds that a request may take with all its tries (a wait that it asks for comes on
    top), ``attempt``: seconds of one try, ``transport``: another way there than the network.

    Example:
        async with BufferClient("http://127.0.0.1:8010", token) as buffer:
            works = await buffer.claim_work(worker="gen-0", count=4)
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        deadline: float = 60.0,
        attempt: float = 20.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._deadline, self._attempt = deadline, attempt
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        self._http = httpx.AsyncClient(
            headers=headers, trust_env=False, limits=limits, follow_redirects=False, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # -- trainers

    async def start_rollout(self, ask: models.Ask) -> models.Asked:
        """See `POST /v1/rollouts`."""
        return await self._post("/v1/rollouts", ask, models.Asked)

    async def claim_batch(
        self,
        reader: str,
        run: str,
        *,
        count: int = 64,
        lease_seconds: float = 60.0,
        wait_seconds: float = 0.0,
        restart: bool = False,
    ) -> models.Claimed:
        """See `POST /v1/batches/claim`."""
        claim = models.ClaimBatch(
            reader=reader,
            request=_fresh(),
            run=run,
            count=count,
            lease_seconds=lease_seconds,
            wait_seconds=wait_seconds,
            restart=restart,
        )
        return await self._post("/v1/batches/claim", claim, models.Claimed, wait=wait_seconds)

    async def acknowledge(self, claim: str, groups: Sequence[models.Key] | None = None) -> int:
        """See `POST /v1/batches/{claim}/ack`: how many groups the claim still held."""
        settle = models.Settle(groups=None if groups is None else list(groups))
        return (await self._post(f"/v1/batches/{claim}/ack", settle, models.Settled)).groups

    async def give_back(self, claim: str, groups: Sequence[models.Key] | None = None) -> int:
        """See `POST /v1/batches/{claim}/release`."""
        settle = models.Settle(groups=None if groups is None else list(groups))
        return (await self._post(f"/v1/batches/{claim}/release", settle, models.Settled)).groups

    async def drop(self, run: str, groups: Sequence[models.Key], reason: str, *, tell: bool = True) -> models.Asked:
        """See `POST /v1/groups/drop`."""
        body = models.DropGroups(run=run, groups=list(groups), reason=reason, tell=tell)
        return await self._post("/v1/groups/drop", body, models.Asked)

    # -- generators

    async def claim_work(
        self,
        worker: str,
        *,
        run: str | None = None,
        task: str | None = None,
        count: int = 1,
        lease_seconds: float = 60.0,
        wait_seconds: float = 0.0,
    ) -> list[models.Work]:
        """See `POST /v1/work/claim`."""
        claim = models.ClaimWork(
            worker=worker,
            request=_fresh(),
            run=run,
            task=task,
            count=count,
            lease_seconds=lease_seconds,
            wait_seconds=wait_seconds,
        )
        return (await self._post("/v1/work/claim", claim, models.Works, wait=wait_seconds)).items

    async def extend(self, leases: Sequence[str], lease_seconds: float) -> models.Held:
        """See `POST /v1/work/extend`."""
        body = models.Lease(leases=list(leases), lease_seconds=lease_seconds)
        return await self._post("/v1/work/extend", body, models.Held)

    async def release(self, leases: Sequence[str]) -> models.Held:
        """See `POST /v1/work/release`."""
        return await self._post("/v1/work/release", models.Lease(leases=list(leases)), models.Held)

    async def write(self, run: str, trajectories: Sequence[models.Trajectory]) -> models.Written:
        """See `POST /v1/samples`; waits while the service's queue is full, as long as the deadline allows."""
        body = models.Write(run=run, trajectories=list(trajectories))
        return await self._post("/v1/samples", body, models.Written)

    async def push(self, push: models.Push) -> models.Asked:
        """See `POST /v1/groups/push`."""
        return await self._post("/v1/groups/push", push, models.Asked)

    # -- anybody

    async def peek(self, **query: Any) -> list[models.Row]:
        """See `GET /v1/groups`: ``state run after limit``."""
        return (await self._get("/v1/groups", models.Rows, query)).groups

    async def stats(self) -> models.Stats:
        """See `GET /v1/stats`."""
        return await self._get("/v1/stats", models.Stats, {})

    async def health(self) -> models.Health:
        """See `GET /health`."""
        return await self._get("/health", models.Health, {})

    async def _post(self, path: str, body: Wire, answer: type[B], *, wait: float = 0.0) -> B:
        return await self._ask("POST", path, answer, wait, content=body.model_dump_json())

    async def _get(self, path: str, answer: type[B], query: dict[str, Any]) -> B:
        return await self._ask("GET", path, answer, 0.0, params=query)

    async def _ask(self, method: str, path: str, answer: type[B], wait: float, **request: Any) -> B:
        """Raises EngineError: ENG69 no answer, ENG71 a stranger, ENG73 the token, ENG75 it keeps failing, ENG78 no."""
        end = time.monotonic() + self._deadline + wait
        pause = FIRST_PAUSE
        while True:
            remaining = end - time.monotonic()
            try:
                timeout = httpx.Timeout(min(self._attempt + wait, max(remaining, 0.1)))
                async with asyncio.timeout(max(remaining, 0.1)):
                    reply = await self._http.request(method, self.url + path, timeout=timeout, **request)
            except (httpx.TransportError, TimeoutError) as error:
                failure = self._away(error)
            else:
                if reply.status_code == 200:
                    return self._body(reply, answer)
                failure = self._refused(reply)
                if reply.status_code not in AGAIN:
                    raise failure
                pause = max(pause, _retry_after(reply))
            delay = pause * random.uniform(0.5, 1.5)
            if time.monotonic() + delay >= end:
                raise failure
            await asyncio.sleep(delay)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _away(self, error: Exception) -> EngineError:
        return EngineError(
            f"the rollout buffer does not answer: {type(error).__name__} {error}".strip(),
            code="ENG69",
            where=self.url,
            why=f"it was tried for {self._deadline:g} s",
            fix="slime buffer serve DIR, and give its address: --rollout-buffer-url URL",
        )

    def _refused(self, reply: httpx.Response) -> EngineError:
        where = f"{reply.request.method} {reply.request.url}"
        if reply.status_code == 401:
            return EngineError(
                "the rollout buffer refuses the token",
                code="ENG73",
                where=self.url,
                fix="export SLIME_BUFFER_TOKEN=$(cat DIR/token)   (the service names the file at its start)",
            )
        try:
            problem = models.Refusal.model_validate_json(reply.content).error
        except ValidationError:
            return self._stranger(reply)
        retryable = reply.status_code in AGAIN
        return EngineError(
            f"the rollout buffer answers {reply.status_code}: {problem.what}",
            code="ENG75" if retryable else "ENG78",
            where=f"{where} {problem.where}".strip(),
            why=f"{problem.code}: {problem.why}",
            fix=problem.fix,
        )

    def _body(self, reply: httpx.Response, answer: type[B]) -> B:
        try:
            return answer.model_validate_json(reply.content)
        except ValidationError:
            raise self._stranger(reply) from None

    def _stranger(self, reply: httpx.Response) -> EngineError:
        return EngineError(
            f"what answers there is no rollout buffer of this version (status {reply.status_code})",
            code="ENG71",
            where=self.url,
            why=f"it says {reply.content[:200]!r}",
            fix="give the address that slime buffer serve prints: --rollout-buffer-url URL",
        )


def _fresh() -> str:
    return secrets.token_hex(8)


def _retry_after(reply: httpx.Response) -> float:
    text = reply.headers.get("retry-after", "")
    return min(float(text), 30.0) if text.isdigit() else 0.0
