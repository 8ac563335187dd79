"""The client before the real server, through the proxy that spoils answers: what SGLang itself does is in it.

Answers that are broken on the way or impossible are the proxy's alone: `test_client_broken_answers.py` has them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import faults
import numpy as np
import pytest
from faults import FaultProxy
from raw_server import RawServer

from slime_core.errors import EngineError
from slime_core.types import Completion, GenerateRequest, SamplingParams
from slime_core.weights.folder import ModelFolder
from slime_sglang.address import ServerAddress
from slime_sglang.client import Client, ServerFault

pytestmark = pytest.mark.system

Work = Callable[[Client, FaultProxy], Coroutine[Any, Any, None]]
Run = Callable[..., None]


@pytest.fixture
def run(server: RawServer, served_model: Path) -> Iterator[Run]:
    """Do some work with a client that speaks through a proxy to the server, whose weights are called 3.7."""
    before = server.ask("/model_info")["weight_version"]
    _stamp(server, "3.7")
    folder = ModelFolder.open(served_model)
    url = urlsplit(server.server.address.url)

    def do(work: Work, **changes: Any) -> None:
        async def inside() -> None:
            async with FaultProxy(url.port) as proxy:
                token = changes.pop("token", server.server.address.token)
                words: dict[str, Any] = {
                    "vocab_size": folder.vocab_size,
                    "context_len": 1000,
                    "features": frozenset({"version_spans", "routed_dp_rank"}),
                    "concurrency": 16,
                    "timeout": 60.0,
                    "retries": 3,
                    "epoch": 3,
                    "tokenizer": folder.tokenizer,
                }
                client = Client(ServerAddress(url=proxy.url, token=token), **(words | changes))
                try:
                    await work(client, proxy)
                finally:
                    await client.close()

        server.loop.run(inside(), 120)

    yield do
    _stamp(server, before)


def _stamp(server: RawServer, version: str) -> None:
    server.ask("/update_weight_version", {"new_version": version, "abort_all_requests": False})


def request(name: str = "grpo/17-0", **params: Any) -> GenerateRequest:
    """Eight tokens after three."""
    words: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, **params}
    return GenerateRequest(id=name, tokens=[3, 4, 12], params=SamplingParams(**words), seed=2**64 - 1)


async def ask(client: Client, asked: GenerateRequest | None = None) -> Completion:
    """Generate with version 7 alone allowed."""
    return await client.generate(asked or request(), low=7, high=lambda: 7)


def assert_right(done: Completion, count: int = 8) -> None:
    """Whether a completion is whole."""
    assert (done.finish, len(done.tokens), len(done.log_probs)) == ("length", count, count)
    assert done.plain_log_probs == done.log_probs
    assert all(np.isfinite(done.log_probs))
    assert (done.versions, done.epoch) == ([7] * count, 3)


async def error_of(work: Coroutine[Any, Any, Any], kind: type[EngineError] = ServerFault) -> EngineError:
    """The error that a coroutine ends with."""
    with pytest.raises(kind) as caught:
        await work
    return caught.value


def test_tokens_log_probs_text_and_scores_agree_with_each_other(run: Run, served_model: Path) -> None:
    tokenizer = ModelFolder.open(served_model).tokenizer()

    async def work(client: Client, proxy: FaultProxy) -> None:
        done = await client.generate(request(max_new_tokens=40), dp_rank=0, low=7, high=lambda: 7)
        assert_right(done, 40)
        assert done.text == tokenizer.decode(done.tokens, skip_special_tokens=True)
        scores = await client.score([3, 4, 12, *done.tokens], 3)
        np.testing.assert_allclose(scores, done.log_probs, atol=2e-4)
        greedy = await ask(client, request(temperature=0))
        assert greedy.log_probs == [0.0] * 8
        assert max(greedy.plain_log_probs) < 0
        warm = await ask(client, request(temperature=0.7, top_p=0.9, top_k=5))
        assert (warm.plain_log_probs, len(warm.log_probs)) == ([], 8)

    run(work)


def test_stops_are_kept_by_the_server_or_by_the_client(run: Run, served_model: Path) -> None:
    tokenizer = ModelFolder.open(served_model).tokenizer()

    async def work(client: Client, proxy: FaultProxy) -> None:
        greedy = await ask(client, request(temperature=0, max_new_tokens=20))
        third = greedy.tokens[2]
        first = greedy.tokens.index(third) + 1
        for more in ({"ignore_eos": False}, {"ignore_eos": True}):
            done = await ask(client, request(temperature=0, max_new_tokens=20, stop_token_ids=(third,), **more))
            assert (done.finish, done.tokens) == ("stop", greedy.tokens[:first])
            assert done.text == tokenizer.decode(done.tokens, skip_special_tokens=True)
        word = tokenizer.decode([third])
        done = await ask(client, request(temperature=0, max_new_tokens=20, stop=(word,)))
        assert (done.finish, done.tokens) == ("stop", greedy.tokens[:first])
        assert word not in done.text
        kept = GenerateRequest(
            id="kept",
            tokens=[3, 4, 12, *greedy.tokens[:2]],
            params=SamplingParams(
                max_new_tokens=18, ignore_eos=True, temperature=0, stop=(tokenizer.decode(greedy.tokens[1:3]),)
            ),
            seed=1,
            kept=2,
        )
        done = await ask(client, kept)
        assert (done.finish, done.tokens) == ("stop", [third])

    run(work)


def test_a_stream_grows_to_the_whole_answer_and_ends_when_it_is_closed(run: Run, server: RawServer) -> None:
    async def work(client: Client, proxy: FaultProxy) -> None:
        seen = [piece async for piece in client.stream(request(max_new_tokens=30), low=7, high=lambda: 7)]
        assert_right(seen[-1], 30)
        lengths = [len(piece.tokens) for piece in seen]
        assert lengths == sorted(lengths)
        assert len(seen) > 2
        assert all(seen[-1].tokens[: len(piece.tokens)] == piece.tokens for piece in seen)
        assert client.progress.tokens == 30
        async with aclosing(client.stream(request(max_new_tokens=900), low=7, high=lambda: 7)) as pieces:
            async for _ in pieces:
                break
        await ask(client)  # and it is over there: `server` sees that nothing runs
        assert proxy.count("/abort_request") == 1

    run(work)
    server.until(lambda: _running(server) == 0, "the closed stream runs no more")


def _running(server: RawServer) -> int:
    states = server.ask("/server_info")["internal_states"]
    loads = server.ask("/v1/loads?include=core")["loads"]
    assert len(states) == len(loads)
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def test_an_abort_returns_the_partial_tokens_and_touches_no_other(run: Run) -> None:
    async def work(client: Client, proxy: FaultProxy) -> None:
        tasks = [asyncio.create_task(ask(client, request(name, max_new_tokens=900))) for name in ("a-1", "a-10")]
        async for _ in client.stream(request("b", max_new_tokens=30), low=7, high=lambda: 7):
            pass  # meanwhile they run
        await client.abort(["a-1"])
        done = await tasks[0]
        assert done.finish == "abort"
        assert 0 < len(done.tokens) == len(done.log_probs) == len(done.versions) < 900
        assert not tasks[1].done()
        await client.abort_all()
        assert (await tasks[1]).finish == "abort"

    run(work)


def test_a_server_that_comes_up_meanwhile_is_found(run: Run) -> None:
    """Connection refused at start."""

    async def work(client: Client, proxy: FaultProxy) -> None:
        await proxy.down()
        task = asyncio.create_task(ask(client))
        while not client.progress.retries:
            await asyncio.sleep(0)
        await proxy.up()
        assert_right(await task)

    run(work, retries=100)


def test_a_spoiled_answer_is_named_or_asked_for_again(run: Run) -> None:
    """HTML, 503, 500, null, a stated gigabyte."""

    async def work(client: Client, proxy: FaultProxy) -> None:
        proxy.add(faults.html)
        assert (await error_of(ask(client))).code == "ENG71"
        proxy.add(faults.status(503, headers=["Retry-After: 0"]), faults.status(500))
        assert_right(await ask(client))
        proxy.add(faults.says(b"null"))
        assert (await error_of(ask(client))).code == "ENG71"
        proxy.add(faults.huge)
        assert (await error_of(ask(client))).code == "ENG91"

    run(work)


def test_the_servers_own_word_for_a_long_prompt_is_understood(run: Run) -> None:
    """HTTP 400 (prompt too long), in the words of this version."""

    async def work(client: Client, proxy: FaultProxy) -> None:
        for length in (4091, 4102, 9000):  # near the context of 4,096 the scheduler refuses, above it the front
            asked = GenerateRequest(id="x", tokens=[5] * length, params=SamplingParams(max_new_tokens=1), seed=1)
            error = await error_of(ask(client, asked), EngineError)
            assert (error.code, isinstance(error, ServerFault)) == ("ENG72", False), error
        assert proxy.count("/generate") == 3

    run(work, context_len=12000)


def test_a_wrong_token_is_refused_once(run: Run) -> None:

    async def work(client: Client, proxy: FaultProxy) -> None:
        assert (await error_of(ask(client), EngineError)).code == "ENG73"
        assert proxy.paths == ["/generate"]

    run(work, token="another")


@pytest.mark.parametrize("spoiled", [faults.slow, faults.hang])
def test_the_deadline_is_of_the_whole_answer(run: Run, spoiled: Any) -> None:
    """Slow-loris."""

    async def work(client: Client, proxy: FaultProxy) -> None:
        proxy.add(spoiled)
        assert (await error_of(ask(client))).code == "ENG76"

    run(work, timeout=1.5)


def test_the_old_try_is_over_before_the_next_begins(run: Run, server: RawServer) -> None:
    """The connection breaks while the server computes: its request is aborted there, not left to run."""

    async def work(client: Client, proxy: FaultProxy) -> None:
        async def computing() -> None:
            await asyncio.to_thread(server.until, lambda: _running(server) > 0, "the first try runs")

        proxy.add(faults.begun(computing))
        assert_right(await ask(client, request(max_new_tokens=600)), 600)
        status, body = await proxy.ended.get()
        answer = json.loads(body)
        assert status == "200"
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < 600

    run(work, timeout=100.0, context_len=2000)


def test_an_end_that_is_unknown_or_came_unasked_is_asked_for_again(run: Run) -> None:
    """``finish_reason`` unknown, abort with 0 tokens."""

    async def work(client: Client, proxy: FaultProxy) -> None:
        proxy.add(faults.in_meta(finish_reason={"type": "tired"}), faults.emptied)
        assert_right(await ask(client))
        assert client.progress.retries == 2

    run(work)


def test_the_servers_own_stamp_is_compared(run: Run, server: RawServer) -> None:
    """Weights that somebody else loaded."""

    async def work(client: Client, proxy: FaultProxy) -> None:
        for stamp in ("default", "3.6", "3.8", "2.7"):
            await asyncio.to_thread(_stamp, server, stamp)
            assert (await error_of(ask(client))).code == "ENG83"

    run(work)


def test_answers_to_other_requests_are_ignored_and_counted(run: Run) -> None:
    """Of an earlier try, and of nobody."""

    async def work(client: Client, proxy: FaultProxy) -> None:
        proxy.add(faults.late, faults.kept, faults.in_meta(id="somebody-else"))
        assert_right(await ask(client))
        assert (client.progress.late, client.progress.strangers, client.progress.replies) == (1, 1, 1)

    run(work)


def test_pause_flush_and_checksums_reach_the_server(run: Run) -> None:
    async def work(client: Client, proxy: FaultProxy) -> None:
        await client.pause("retract")
        task = asyncio.create_task(ask(client))
        await client.flush()
        assert not task.done()
        await client.resume()
        assert_right(await task)
        (sums,) = await client.checksums()
        assert len(sums["model.norm.weight"]) == 16
        assert (await client.server_info())["version"]

    run(work)
