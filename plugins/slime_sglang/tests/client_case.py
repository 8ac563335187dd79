"""A client with small limits before a server of SGLang's wire and a proxy that spoils answers; a request's wire form."""

from contextlib import asynccontextmanager

import pytest
from fake_sglang import TOKEN, VOCAB, FakeServer, rows
from faults import FaultProxy

from slime_core.errors import EngineError
from slime_core.types import GenerateRequest, SamplingParams
from slime_sglang import bodies, wire
from slime_sglang.address import ServerAddress
from slime_sglang.client import Client

CONTEXT = 64


def request(name="grpo/17-0", tokens=(3, 4, 12), *, seed=7, kept=0, **params):
    """A request of a few tokens."""
    sampling = SamplingParams(**{"max_new_tokens": 8, **params})
    return GenerateRequest(id=name, tokens=list(tokens), params=sampling, seed=seed, kept=kept)


def client_of(url, *, token=TOKEN, ca="", **changes):
    """A client with small limits."""
    limits = {"vocab_size": VOCAB, "context_len": CONTEXT, "concurrency": 8, "timeout": 30.0, "retries": 3, "epoch": 3}
    limits |= {"features": frozenset({"version_spans"})}
    return Client(ServerAddress(url=url, token=token, ca=ca), **(limits | changes))


@asynccontextmanager
async def both(server=None, **changes):
    """(client, proxy, server), started; the client speaks to the proxy."""
    async with server or FakeServer() as server, FaultProxy(server.port) as proxy:
        client = client_of(proxy.url, **changes)
        try:
            yield client, proxy, server
        finally:
            await client.close()


@asynccontextmanager
async def held(made=2, incremental=False, **changes):
    """As ``both``; a request waits at the server until it is aborted, with ``made`` tokens, or until ``go`` is set."""
    server = FakeServer(incremental=incremental)
    server.hold, server.made = True, made
    async with both(server, **changes) as parts:
        yield parts


async def ask(client, asked=None, **words):
    """Generate with version 7 alone allowed."""
    return await client.generate(asked or request(), **({"low": 7, "high": lambda: 7} | words))


def right(done):
    """Whether a completion is what the server means by the request."""
    return done.tokens == [row[1] for row in rows(7, 3, 8)] and done.finish == "length"


async def error_of(work, kind=EngineError):
    """The error that a coroutine ends with."""
    with pytest.raises(kind) as caught:
        await work
    return caught.value


def body(asked, **changes):
    """The body of a request."""
    words = {
        "rid": "r",
        "limit": asked.params.max_new_tokens,
        "stream": False,
        "features": frozenset(),
        "dp_rank": None,
    }
    return bodies.body(asked, **(words | changes))


def expected(asked, **changes):
    """What the answer to a request must fit."""
    words = {"request": asked, "limit": 8, "vocab_size": VOCAB, "epoch": 3, "low": 7, "high": 7, "spans": True}
    return wire.ExpectedAnswer(**(words | changes))


def answer(asked, made=8, finish="length", **changes):
    """A right answer, with changes of its meta_info."""
    message = FakeServer().answer(body(asked), made, finish)
    message["meta_info"].update(changes)
    return message


def code_of(call, kind=EngineError):
    """The code of the error that a call raises, and the whole error as text."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value.code, str(caught.value)
