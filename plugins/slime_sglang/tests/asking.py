"""A client with small limits, before a server of SGLang's wire and a proxy that misbehaves on command."""

import socket
from contextlib import asynccontextmanager

import faulty
import pytest
from faulty import TOKEN, Canned, FaultProxy

from slime_core.errors import EngineError
from slime_core.types import GenerateRequest, SamplingParams
from slime_sglang.address import ServerAddress
from slime_sglang.client import Client

FEATURES = frozenset({"version_spans"})


def request(name="grpo/17-0", tokens=(3, 4, 12), *, seed=7, kept=0, **params):
    """A request of a few tokens."""
    words = {"max_new_tokens": 8, **params}
    return GenerateRequest(id=name, tokens=list(tokens), params=SamplingParams(**words), seed=seed, kept=kept)


def client_of(url, **changes):
    """A client with small limits."""
    words = {
        "vocab_size": faulty.VOCAB,
        "context_len": 64,
        "features": FEATURES,
        "concurrency": 8,
        "timeout": 30.0,
        "retries": 3,
        "epoch": 3,
    }
    token = changes.pop("token", TOKEN)
    return Client(ServerAddress(url=url, token=token, ca=changes.pop("ca", "")), **(words | changes))


@asynccontextmanager
async def both(server=None, **changes):
    """(client, proxy, server), started; the client speaks to the proxy."""
    async with server or Canned() as server, FaultProxy(server.port) as proxy:
        client = client_of(proxy.url, **changes)
        try:
            yield client, proxy, server
        finally:
            await client.close()


@asynccontextmanager
async def held(made=2, incremental=False, **changes):
    """As ``both``; a request waits at the server until it is aborted, with ``made`` tokens, or until ``go`` is set."""
    server = Canned(incremental=incremental)
    server.hold, server.made = True, made
    async with both(server, **changes) as (client, proxy, _):
        yield client, proxy, server


async def ask(client, asked=None, **words):
    """Generate with version 7 alone allowed."""
    return await client.generate(asked or request(), **({"low": 7, "high": lambda: 7} | words))


def right(done):
    """Whether a completion is what the server means by the request."""
    return done.tokens == [row[1] for row in faulty.rows(7, 3, 8)] and done.finish == "length"


async def error_of(work, kind=EngineError):
    """The error that a coroutine ends with."""
    with pytest.raises(kind) as caught:
        await work
    return caught.value


def closed_port():
    """A port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
