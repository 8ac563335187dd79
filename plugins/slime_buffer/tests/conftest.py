"""A rollout buffer service inside the test's process: its guarded routes, and clients that reach both."""

from contextlib import asynccontextmanager

import httpx
import pytest

from slime_buffer.client import BufferClient
from slime_buffer.service import models
from slime_buffer.service.app import make_app
from slime_buffer.service.buffer_service import BufferService
from slime_buffer.service.tables import BufferLimits

TOKEN = "a-token-of-the-tests"


class Unwell(Exception):
    """An answer that says come again, or that something broke."""


class Strict(httpx.AsyncBaseTransport):
    """The first answer counts: what a client would try again is raised."""

    def __init__(self, inner):
        self.inner = inner

    async def handle_async_request(self, request):
        reply = await self.inner.handle_async_request(request)
        if reply.status_code in (429, 500, 503):
            raise Unwell(reply.status_code, (await reply.aread()).decode())
        return reply


class World:
    """What a test's body gets: ``client`` and ``http`` reach the routes, ``clock["now"]`` is the leases' time."""

    def __init__(self, service, app, clock):
        self.service, self.app, self.clock, self.token = service, app, clock, TOKEN
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.client = BufferClient("http://buffer.example", TOKEN, transport=Strict(transport))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://buffer.example")
        self.http.headers["authorization"] = f"Bearer {TOKEN}"

    async def ask(self, *names, run="run", samples=2, attempt=0):
        groups = [wanted(name, samples, attempt) for name in names]
        return await self.client.start_rollout(models.Ask(run=run, groups=groups))

    async def write(self, name, *, run="run", samples=(0, 1), attempt=0, failed="", reward=1.0):
        rows = [trajectory(name, j, attempt=attempt, failed=failed, reward=reward) for j in samples]
        return await self.client.write(run, rows)

    async def states(self, **query):
        return {(row.group, row.attempt): row.state for row in await self.client.peek(**query)}


def wanted(name, samples=2, attempt=0):
    return models.AskedGroup(
        id=name, attempt=attempt, tokens=[1, 2, 3], prompt="1+1=", label="2",
        samples=[models.Wanted(id=f"{name}-{j}", seed=j) for j in range(samples)],
        sampling=models.Sampling(max_new_tokens=4),
    )  # fmt: skip


def trajectory(name, j, *, sample="", attempt=0, failed="", reward=1.0, parts=1):
    sequence = models.Sequence(
        tokens=[1, 2, 3, 10 + j, 5], response_length=2, log_probs=[-0.25, -1.5], weight_versions=[3, 4], response="ab",
        reward=reward,
    )  # fmt: skip
    return models.Trajectory(
        group=name, attempt=attempt, sample=sample or f"{name}-{j}", sequences=[] if failed else [sequence] * parts,
        failed=failed,
    )  # fmt: skip


@pytest.fixture
def unwell():
    """What `World.client` raises on 429, 500 and 503."""
    return Unwell


@pytest.fixture
def row():
    """A trajectory of a group's j-th sample, `row("grpo/17", 0)`."""
    return trajectory


@pytest.fixture
def serving(tmp_path):
    """`async with serving()`: a World; the books balance when it ends, and it may be opened again."""

    @asynccontextmanager
    async def serving(*, limits=None, max_body=1 << 20, max_tokens=4096, check=True):
        clock = {"now": 0.0}
        service = BufferService(tmp_path, limits or BufferLimits(), lambda: clock["now"])
        world = World(service, make_app(service, token=TOKEN, max_body=max_body, max_tokens=max_tokens), clock)
        try:
            await service.start()
            yield world
            if check:
                stats = await service.stats()
                assert stats.conserved, stats
        finally:
            await world.client.aclose()
            await world.http.aclose()
            await service.close()

    return serving
