"""The server in front of the engine: SGLang's shape over plain HTTP, loopback only, started on first use."""

import asyncio
import json
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from slime_compat import sglang
from slime_compat.http import HttpStatusError, get, post, wait_before_retry
from slime_compat.loopback import LoopbackServer, require_token
from slime_compat.served.rewards import remote_rm
from slime_core.compat.sample import Sample
from slime_core.compat.session import CompatSession
from slime_core.config.schema import Config
from slime_core.config.sections.train import TrainSection
from slime_core.context import Context
from slime_core.types import Completion

pytestmark = pytest.mark.unit


@pytest.fixture
def ask(connect):
    """POST payloads to a server in front of an engine; script and config as in ``connect``."""
    _, ctx = connect(Config(), {"1+1=": "2", "x": "<eos>y"})

    def ask(*payloads, method=post):
        session = CompatSession()

        async def run():
            args = session.args(ask.ctx.config, ask.ctx)
            url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
            try:
                return [await method(url + "/generate", payload, max_retries=0) for payload in payloads]
            finally:
                session.close()

        return asyncio.run(run())

    ask.ctx = ctx
    return ask


def test_ids_or_text_give_the_same_answer_in_sglangs_shape(ask, tokenizer):
    ids = tokenizer.encode("1+1=", add_special_tokens=False)
    params = {"max_new_tokens": 8, "sampling_seed": 3}
    by_ids, by_text = ask(
        {"input_ids": ids, "sampling_params": params, "return_logprob": True},
        {"text": "1+1=", "sampling_params": params, "return_logprob": True},
    )
    two = tokenizer.encode("2", add_special_tokens=False)[0]
    meta = by_ids["meta_info"]
    assert by_ids["text"] == "2"
    assert by_ids["output_ids"] == [two, 1]
    assert meta["output_token_logprobs"] == [[-0.5, two, None], [-0.5, 1, None]]
    assert meta["finish_reason"] == {"type": "stop"}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (4, 2, "2")
    for answer in (by_ids, by_text):
        assert answer["meta_info"].pop("e2e_latency") >= 0
        del answer["meta_info"]["id"]
    assert by_ids == by_text


def test_without_return_logprob_there_are_none_and_length_is_told(ask):
    neutral = {"image_data": None, "top_logprobs_num": 0, "stream": False, "logprob_start_len": -1, "rid": "a"}
    (answer,) = ask({"text": "1+1=", "sampling_params": {"max_new_tokens": 1}, **neutral})
    assert "output_token_logprobs" not in answer["meta_info"]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


def test_the_stop_text_stays_where_it_is_asked_for(ask):
    plain, whole, skipped = ask(
        {"text": "1+1=", "sampling_params": {}},
        {"text": "1+1=", "sampling_params": {"no_stop_trim": True, "skip_special_tokens": False}},
        {"text": "1+1=", "sampling_params": {"no_stop_trim": True}},
    )
    assert (plain["text"], whole["text"], skipped["text"]) == ("2", "2<eos>", "2")


def test_a_list_of_prompts_gets_a_list_of_answers(ask):
    (answers,) = ask({"text": ["1+1=", "1+1="], "sampling_params": {"max_new_tokens": 4}})
    assert [answer["text"] for answer in answers] == ["2", "2"]


def test_sampling_parameters_reach_the_engine_in_its_own_words(ask):
    ask(
        {
            "text": "1+1=",
            "sampling_params": {"temperature": 0.5, "top_k": -1, "stop": "y", "stop_token_ids": [4], "n": 1},
        }
    )
    params = ask.ctx.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.stop, params.stop_token_ids) == (0.5, 0, ("y",), (4,))
    assert params.max_new_tokens == 128


def test_no_new_tokens_means_the_log_probs_of_the_prompt(ask, tokenizer):
    ids = tokenizer.encode("1+1=", add_special_tokens=False)
    (answer,) = ask(
        {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    )
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scored] == ids
    assert scored[0][0] is None
    assert all(entry[0] < 0 for entry in scored[1:])


def test_log_probs_of_the_prompt_are_those_of_the_adapter_that_is_named(ask):
    train = TrainSection(lora_rank=4, lora_sync="adapter", lora_adapters=("solver", "critic"))
    ask.ctx = replace(ask.ctx, config=Config(train=train))
    scored = []

    async def score(tokens, start, media=None, adapter=""):
        scored.append(adapter)
        return np.zeros(len(tokens) - start)

    ask.ctx.engine.score, ask.ctx.engine.adapters = score, ("solver", "critic")
    plain = {"text": "1+1=", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    ask(plain | {"lora_path": "critic"}, plain)
    assert scored == ["critic", "solver"]


@pytest.mark.parametrize(("start", "count"), [(0, 4), (2, 2), (3, 1), (4, 0), (-1, 0), (None, 0)])
def test_log_probs_of_the_prompt_come_beside_new_tokens_from_where_they_are_asked_for(ask, tokenizer, start, count):
    """The first of them is None, as SGLang has it."""
    ids = tokenizer.encode("1+1=", add_special_tokens=False)
    (answer,) = ask({"input_ids": ids, "sampling_params": {}, "return_logprob": True, "logprob_start_len": start})
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scored] == ids[len(ids) - count :]
    assert [entry[0] is None for entry in scored] == [number == 0 for number in range(count)]
    assert answer["text"] == "2"


def test_a_stream_is_one_event_with_the_whole_answer(ask):
    (text,) = ask({"text": "1+1=", "sampling_params": {}, "stream": True})
    event, end = text.strip().split("\n\n")
    assert json.loads(event.removeprefix("data: "))["text"] == "2"
    assert end == "data: [DONE]"


@pytest.mark.parametrize(
    ("payload", "status", "told"),
    [
        ({}, 400, "one of text and input_ids"),
        ({"text": "a", "input_ids": [1]}, 400, "one of text and input_ids"),
        ({"input_ids": "abc"}, 400, "list of token ids"),
        ({"input_ids": []}, 400, "list of token ids"),
        ({"text": "1+1=", "sampling_params": {"repetition_penalty": 1.2}}, 400, "repetition_penalty=1.2"),
        ({"text": "1+1=", "sampling_params": {"json_schema": "{}"}}, 400, "json_schema"),
        ({"text": "1+1=", "sampling_params": {"max_new_tokens": "many"}}, 400, "sampling_params"),
        ({"text": "1+1=", "image_data": ["a.png"], "top_logprobs_num": 2}, 400, "top_logprobs_num: not supported"),
        ({"text": "1+1=", "image_data": ["aaaa"]}, 400, "image_data: the model takes text alone"),
        ([1], 400, "not a JSON object"),
        *(
            ({"text": "1+1=", "return_logprob": True, "logprob_start_len": start}, 400, "send -1, or 0 to 4")
            for start in (-2, 5, "1", 1.5, True)
        ),
    ],
)
def test_a_payload_that_cannot_be_served_is_refused_and_not_tried_again(ask, payload, status, told):
    with pytest.raises(HttpStatusError) as caught:
        ask(payload)
    assert caught.value.status == status
    assert told in str(caught.value)


def raw(port, request):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        answer = connection.makefile("rb")
        status = int(answer.readline().split()[1])
        headers = dict(line.split(b": ", 1) for line in iter(answer.readline, b"\r\n"))
        return status, json.loads(answer.read(int(headers[b"content-length"])))


BODY = b'{"text": "1+1="}'


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n", 200),
        (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 404),
        (b"POST /generate HTTP/1.1\r\nhost: evil.example\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY), 403),
        (
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\norigin: http://evil.example\r\ncontent-length: %d\r\n\r\n%s"
            % (len(BODY), BODY),
            403,
        ),
        (b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999999\r\n\r\n", 413),
        (b"POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n", 411),
        (b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\nconnection: close\r\n\r\n{,}", 400),
        (b"GET /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", 405),
    ],
    ids=["health", "unknown path", "other host", "web page", "too large", "no length", "no JSON", "GET"],
)
def test_the_server_speaks_http_and_keeps_strangers_out(connect, request_, status):
    _, ctx = connect(Config(), {"1+1=": "2"})
    session = CompatSession()

    async def run():
        port = session.server().port(ctx)
        try:
            return await asyncio.to_thread(raw, port, request_)
        finally:
            session.close()

    found, body = asyncio.run(run())
    assert found == status
    assert status == 200 or body["error"]["message"]


def test_one_connection_may_ask_again_and_again(connect):
    _, ctx = connect(Config(), {"1+1=": "2"})
    session = CompatSession()
    request = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)

    async def run():
        port = session.server().port(ctx)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answers = []
        for _ in range(3):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length"))
            answers.append(json.loads(await reader.readexactly(length))["text"])
        writer.close()
        await writer.wait_closed()
        session.close()
        return answers

    assert asyncio.run(run()) == ["2", "2", "2"]


def test_the_server_starts_when_its_address_is_read_and_closes_with_the_run(connect):
    _, ctx = connect(Config())
    session = CompatSession()

    async def run():
        args = session.args(ctx.config, ctx)
        assert session.args(ctx.config).sglang_router_port is None  # no engine, no server
        port = args.sglang_router_port
        assert args.sglang_router_port == port
        assert await get(f"http://127.0.0.1:{port}/health_generate") == {"status": "ok"}
        session.close()
        with pytest.raises(ConnectionError):
            await get(f"http://127.0.0.1:{port}/health", max_retries=0)

    asyncio.run(run())


def test_the_server_is_bound_to_the_loopback_alone(connect):
    _, ctx = connect(Config())
    session = CompatSession()

    async def run():
        session.server().port(ctx)
        bound = session.server()._server[0]._socket.getsockname()[0]
        session.close()
        return bound

    assert asyncio.run(run()) == "127.0.0.1"


def test_a_context_without_an_engine_has_no_server():
    assert CompatSession().server().port(Context(config=Config())) is None


@pytest.mark.parametrize("url", ["ftp://x/y", "generate", "http:///x"])
def test_the_client_refuses_what_is_no_http_address(url):
    with pytest.raises(ValueError, match="not an http address"):
        asyncio.run(post(url, {}))


def test_the_client_reads_chunked_answers(connect):
    async def run():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\n{"a"\r\n4;x=y\r\n: 1}\r\n0\r\n\r\n'
            )
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await get(f"http://127.0.0.1:{port}/x?y=1")

    assert asyncio.run(run()) == {"a": 1}


@pytest.mark.parametrize(("status", "asked"), [(503, 2), (429, 2), (404, 1), (422, 1)])
def test_only_what_may_pass_is_tried_again(monkeypatch, status, asked):
    monkeypatch.setattr("slime_compat.http.RETRY_SECONDS", 0.0)
    seen = []

    async def run():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            seen.append(status if not seen else 200)
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\n{}" % seen[-1])
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await get(f"http://127.0.0.1:{port}/", max_retries=3)

    if asked == 1:
        with pytest.raises(HttpStatusError):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == {}
    assert len(seen) == asked


@pytest.mark.parametrize(
    ("longest", "seconds"), [(0.0, [1, 1, 1, 1]), (5.0, [1, 2, 4, 5])], ids=["always the same", "growing"]
)
def test_waits_between_tries_grow_up_to_the_longest(longest, seconds):
    waits = [wait_before_retry(attempt, longest) for attempt in range(4)]
    assert [least <= wait <= least * (1.5 if longest else 1) for wait, least in zip(waits, seconds, strict=True)] == [
        True
    ] * 4


def test_a_client_with_a_timeout_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("slime_compat.served.rewards.REMOTE_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        args = SimpleNamespace(rm_url=f"http://127.0.0.1:{silent.getsockname()[1]}/")
        with pytest.raises(ConnectionError, match="ReadTimeout"):
            asyncio.run(remote_rm(args, Sample(), max_retries=0))


def test_a_server_that_closes_tells_its_callers_that_the_run_has_ended():
    async def run():
        begun = asyncio.Event()

        async def handle(request):
            begun.set()
            await asyncio.Event().wait()

        server = LoopbackServer({"POST /generate": handle}, asyncio.get_running_loop(), require_token(""))
        caller = asyncio.create_task(post(f"http://127.0.0.1:{server.port}/generate", {}))
        await begun.wait()
        await asyncio.to_thread(server.close)
        await caller

    with pytest.raises(HttpStatusError, match="the run has ended") as caught:
        asyncio.run(run())
    assert (caught.value.status, caught.value.final) == (503, True)


def test_a_server_that_closes_hangs_up_on_everyone(connect):
    _, ctx = connect(Config())
    for _ in range(20):

        async def run():
            session = CompatSession()
            port = session.args(ctx.config, ctx).sglang_router_port
            callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
            session.close()
            return callers

        for caller in asyncio.run(run()):
            with caller:
                caller.settimeout(5)
                with suppress(ConnectionResetError):
                    assert caller.recv(1) == b""


def test_a_server_that_closes_in_the_moment_of_an_answer_takes_leave_of_its_caller():
    """It must not end between the answer's last byte and the end of the connection."""
    request = b"POST /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"

    async def run():
        asked, answer = asyncio.Event(), asyncio.Event()

        async def handle(request):
            asked.set()
            await answer.wait()
            return request.payload

        server, held = (
            LoopbackServer({"POST /generate": handle}, asyncio.get_running_loop(), require_token("")),
            threading.Barrier(2, timeout=30),
        )
        caller = socket.create_connection(("127.0.0.1", server.port))
        caller.sendall(request)
        await asyncio.wait_for(asked.wait(), 30)
        server._loop.call_soon_threadsafe(lambda: (held.wait(), held.wait()))
        await asyncio.to_thread(held.wait)  # what comes until the second wait the server meets in one pass
        answer.set()
        while asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)  # what waits for the answer has been told
        server._loop.call_soon_threadsafe(server._stop.set)
        await asyncio.to_thread(held.wait)
        server.close()
        return server, caller

    server, caller = asyncio.run(run())
    with caller:
        assert server._loop.is_closed()
        assert b" 200 OK" in caller.makefile("rb").read()


def test_a_server_that_closes_cuts_off_a_caller_who_does_not_read(monkeypatch):
    monkeypatch.setattr("slime_compat.loopback.CLOSE_SECONDS", 0.05)
    request = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"

    async def run():
        async def handle(request):
            return "x" * (32 << 20)  # more than the system keeps for a caller

        server = LoopbackServer({"POST /generate": handle}, asyncio.get_running_loop(), require_token(""))
        caller = socket.create_connection(("127.0.0.1", server.port))
        caller.sendall(request)
        await asyncio.to_thread(caller.recv, 1, socket.MSG_PEEK)
        server.close()
        return server, caller

    server, caller = asyncio.run(run())
    with caller:
        assert not server._thread.is_alive()
        assert server._loop.is_closed()


def test_the_experts_of_an_answer_are_there_where_they_are_requested():
    done = Completion(
        id="a", tokens=[7], log_probs=[-0.5], plain_log_probs=[], finish="length", versions=[3],
        routed_experts=np.array([[[1, 2]], [[3, 4]]], dtype=np.uint8),
    )  # fmt: skip
    words = {"log_probs": True, "version": 3, "seconds": 0.1}
    meta = sglang.answer(done, 2, "", experts=True, **words)["meta_info"]
    sample = Sample(tokens=[5, 6])
    sample.append_response_tokens(tokens=[7], log_probs=[-0.5], meta_info=meta)
    assert sample.rollout_routed_experts.tolist() == [[[1, 2]], [[3, 4]]]
    assert "routed_experts" not in sglang.answer(done, 2, "", **words)["meta_info"]
