"""The judge as a service: who may ask, what a request may say, a full queue, keys."""

import asyncio
import gzip
import json
from dataclasses import asdict

import httpx
import pytest
from judge_services import RELU, TOKEN, body, judged, post, remote, service, serving

from slime_kernelbench.service.app import ServiceState, make_app
from slime_kernelbench.service.client import RemoteJudge
from slime_kernelbench.service.devices import Device

pytestmark = pytest.mark.integration


def test_verdicts_come_back_from_several_workers(folder):
    async def scenario():
        places = [Device(name=f"cpu-{number}", gpu=f"GPU-{number}") for number in range(2)]
        async with service(folder, places=places) as (url, pool, _), remote(url) as judge:
            words = ["correct 1", "wrong 2", "correct 3", "wrong 4"]
            verdicts = await asyncio.gather(*(judge.judge(word, RELU) for word in words))
            assert [verdict.status for verdict in verdicts] == ["correct", "wrong", "correct", "wrong"]
            assert {verdict.launches for verdict in verdicts} == {1}
            assert len({verdict.source_hash for verdict in verdicts}) == 4
            assert pool.state()["verdicts"] == {"correct": 2, "wrong": 2}
            assert (await judge.health())["status"] == "ok"

    asyncio.run(scenario())
    assert sorted(word for _, word in judged(folder)) == ["correct", "correct", "wrong", "wrong"]


def test_every_route_asks_for_the_token_and_a_wrong_one_is_infra_at_once(folder):
    async def scenario():
        async with service(folder) as (url, _, _):
            async with httpx.AsyncClient() as http:
                for method, path in (
                    ("POST", "/v1/judge"),
                    ("GET", "/health"),
                    ("GET", "/nothing"),
                    ("PUT", "/health"),
                ):
                    answer = await http.request(method, url + path)
                    assert answer.status_code == 401, path
                    assert answer.json()["error"]["code"] == "unauthorized"
            judge = RemoteJudge(url, token="another", tries=99, pause=60)
            verdict = await judge.judge("correct", RELU)
            await judge.aclose()
            assert (verdict.status, verdict.diagnostics[0].kind) == ("infra", "Token")

    asyncio.run(scenario())
    assert judged(folder) == []


FORGED = {
    "a verdict": body(verdict={"status": "correct", "reached": "speed"}),
    "a status": body(status="correct"),
    "options of the judge": body(options={"sandbox": "none"}),
    "a seed": body(seed=42),
    "a deadline": body(deadline=1e9),
    "a field in the problem": body() | {"problem": asdict(RELU) | {"tolerance": 1e9}},
    "a level that is not a number": body() | {"problem": asdict(RELU) | {"level": "1"}},
    "an id with a path": body() | {"problem": asdict(RELU) | {"id": "../../x"}},
    "a problem that is a text": body() | {"problem": RELU.source},
    "no problem": {"key": "k" * 16, "source": "correct"},
    "a source that is a list": body(source=["correct"]),
    "a source that is too long": body(source="correct " + "x" * (1 << 20)),
    "a key with a newline": body(key="k" * 16 + "\n"),
    "a short key": body(key="k"),
    "an array": [body()],
    "no JSON": b"{",
    "not UTF-8": b'{"key": "\xff"}',
    "nested deeply": b"[" * 100_000 + b"]" * 100_000,
    "nothing": b"",
}


def test_no_field_of_a_request_says_more_than_what_is_to_be_judged(folder):
    async def scenario():
        async with service(folder) as (url, _, _):
            for name, forged in FORGED.items():
                status, _, answer = await post(url, forged)
                assert (status, answer["error"]["code"]) == (422, "invalid"), name
                assert "verdict" not in answer
            status, _, answer = await post(url, body(source="wrong correct"))
            assert (status, answer["verdict"]["status"]) == (200, "wrong")  # the honest request beside them
            status, _, answer = await post(url, b" " * (9 << 20))
            assert (status, answer["error"]["code"]) == (413, "too_large")
            status, _, answer = await post(url, body(), **{"Content-Type": "text/plain"})
            assert (status, answer["error"]["code"]) == (415, "type")

    asyncio.run(scenario())
    assert [word for _, word in judged(folder)] == ["wrong"]


def test_a_compressed_body_is_refused_and_not_unpacked(folder):
    async def scenario():
        async with service(folder) as (url, _, _):
            for raw in (gzip.compress(json.dumps(body()).encode()), b"no gzip"):
                status, _, answer = await post(url, raw, **{"Content-Encoding": "gzip"})
                assert (status, answer["error"]["code"]) == (415, "encoding")

    asyncio.run(scenario())
    assert judged(folder) == []


async def sent(url, raw):
    """What the service answers to bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(raw)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def test_bytes_that_are_no_http_are_refused_without_a_line_in_the_log(folder, caplog):
    async def scenario():
        async with service(folder) as (url, _, _):
            for raw in (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"\x16\x03\x01\0\r\n\r\n"):
                assert b" 400 " in await sent(url, raw)

    asyncio.run(scenario())
    assert caplog.records == []


@pytest.mark.parametrize("raw", [b"", b"POST /v1/judge HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_ends_its_connection(folder, raw):
    async def scenario():
        async with serving(make_app(None, token=TOKEN, state=ServiceState()), head_seconds=0.05) as url:
            assert await sent(url, raw) == b""

    asyncio.run(scenario())


def test_a_full_queue_says_when_to_come_again_and_the_client_does(folder):
    async def scenario():
        async with service(folder, waiting=1) as (url, pool, _), remote(url, tries=1) as judge:
            first = asyncio.create_task(judge.judge("wait 1", RELU))
            await asyncio.to_thread((folder / "begun").read_text)  # the only worker is busy
            second = asyncio.create_task(judge.judge("correct 2", RELU))
            while not pool.state()["queue"]["waiting"]:
                await asyncio.sleep(0)
            status, headers, answer = await post(url, body())
            assert (status, headers["Retry-After"], answer["error"]["code"]) == (429, "1", "full")
            third = asyncio.create_task(judge.judge("correct 3", RELU))
            assert (await judge.health())["queue"] == {"waiting": 1, "judging": 1, "limit": 1}  # it answers meanwhile
            await asyncio.to_thread((folder / "go").write_text, "")
            assert [(await task).status for task in (first, second, third)] == ["correct"] * 3

    asyncio.run(scenario())


def test_a_key_is_judged_once_and_another_candidate_under_it_is_refused(folder):
    async def scenario():
        async with service(folder) as (url, _, _):
            asked = [asyncio.create_task(post(url, body(source="wait"))) for _ in range(3)]
            await asyncio.to_thread((folder / "begun").read_text)
            clash = await post(url, body(source="correct"))
            assert (clash[0], clash[2]["error"]["code"]) == (409, "key")
            await asyncio.to_thread((folder / "go").write_text, "")
            answers = [(await task)[2] for task in asked] + [(await post(url, body(source="wait")))[2]]
            assert answers == [answers[0]] * 4
            assert answers[0]["verdict"]["status"] == "correct"

    asyncio.run(scenario())
    assert [word for _, word in judged(folder)] == ["wait"]


def test_a_request_whose_client_has_gone_is_not_judged(folder):
    async def scenario():
        async with service(folder) as (url, pool, _), remote(url) as judge:
            first = asyncio.create_task(judge.judge("wait 1", RELU))
            await asyncio.to_thread((folder / "begun").read_text)
            gone = asyncio.create_task(judge.judge("correct 2", RELU))
            while not pool.state()["queue"]["waiting"]:
                await asyncio.sleep(0)
            gone.cancel()
            while pool.state()["queue"]["waiting"]:
                await asyncio.sleep(0)
            await asyncio.to_thread((folder / "go").write_text, "")
            assert (await first).status == "correct"

    asyncio.run(scenario())
    assert [word for _, word in judged(folder)] == ["wait"]
