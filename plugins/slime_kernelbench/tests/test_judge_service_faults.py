"""What keeps a verdict from coming: strange answers, silence, servers that end or are killed."""

import asyncio
import json
import os
import select
import signal
from contextlib import asynccontextmanager, suppress

import pytest
from judge_services import RELU, TOKEN, Server, body, post, remote, service, serving
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from slime_core import ConfigError
from slime_service import guard

pytestmark = pytest.mark.integration


def said(status, **more):
    return json.dumps({"verdict": {"status": status, "reached": "speed"} | more})


@pytest.mark.parametrize(
    ("answer", "kind", "calls"),
    [
        pytest.param({"content": "<html>Welcome</html>"}, "NoVerdict", 1, id="another service"),
        pytest.param({"content": "[]"}, "NoVerdict", 1, id="an array"),
        pytest.param({"content": said("perfect")}, "NoVerdict", 1, id="a new status"),
        pytest.param({"content": said("correct", source_hash="00")}, "NoVerdict", 1, id="another source"),
        pytest.param({"content": "x", "status_code": 500}, "HTTP500", 3, id="an error, always"),
        pytest.param({"content": "x", "status_code": 404}, "HTTP404", 1, id="no route"),
        pytest.param({"content": b"x" * (9 << 20)}, "Unreachable", 3, id="a huge answer"),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_verdict_is_infra_after_a_number_of_tries(answer, kind, calls):
    seen = []

    async def strange(request):
        seen.append(json.loads(await request.body())["key"])
        return Response(**answer)

    async def scenario():
        other = Starlette(routes=[Route("/v1/judge", strange, methods=["POST"])])
        async with serving(other) as url, remote(url, tries=3) as judge:
            return await judge.judge("correct", RELU)

    verdict = asyncio.run(scenario())
    assert (verdict.status, verdict.diagnostics[0].kind) == ("infra", kind)
    assert len(seen) == calls
    assert len(set(seen)) == 1  # every try has the same key


def test_a_service_that_is_away_is_infra_and_a_proxy_of_the_environment_is_not_asked(folder, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def scenario():
        async with remote("http://127.0.0.1:9", tries=2) as judge:
            verdict = await judge.judge("correct", RELU)
            assert (verdict.status, verdict.diagnostics[0].kind) == ("infra", "Unreachable")
            with pytest.raises(ConfigError, match="no judge answers"):
                await judge.health()
        async with service(folder) as (url, _, _), remote(url) as judge:
            assert (await judge.judge("correct", RELU)).status == "correct"

    asyncio.run(scenario())


BEGUN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"


@pytest.mark.parametrize(
    ("said", "closes", "kind"),
    [
        pytest.param(b"", False, "Deadline", id="silence"),
        pytest.param(BEGUN, False, "Deadline", id="silence in the middle of an answer"),
        pytest.param(BEGUN, True, "Unreachable", id="an answer cut short"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", True, "Unreachable", id="no HTTP"),
    ],
)
def test_an_answer_that_does_not_come_whole_is_infra_within_the_deadline(said, closes, kind):
    async def scenario():
        open_, gone = 0, asyncio.Event()

        async def say(reader, writer):
            nonlocal open_
            open_ += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(said)
            await writer.drain()
            if not closes:
                await reader.read()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            open_ -= 1
            if not open_:
                gone.set()

        server = await asyncio.start_server(say, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, remote(url, tries=2, deadline=60.0 if closes else 0.5) as judge:
            verdict = await judge.judge("correct", RELU)
            await judge.aclose()
            await gone.wait()
        return verdict

    verdict = asyncio.run(scenario())
    assert (verdict.status, verdict.diagnostics[0].kind) == ("infra", kind)


def test_a_body_that_does_not_come_is_refused(folder, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)

    async def scenario():
        async with service(folder) as (url, _, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            headers = f"Host: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json"
            writer.write(f"POST /v1/judge HTTP/1.1\r\n{headers}\r\nContent-Length: 100\r\n\r\n{{".encode())
            answer = await reader.readuntil(b"\r\n")
            writer.close()
            await writer.wait_closed()
            return answer

    assert b" 408 " in asyncio.run(scenario())


@pytest.mark.parametrize("source", ["lone \udc80 surrogate", "x" * ((1 << 20) + 1)], ids=["no UTF-8", "too long"])
def test_a_text_that_no_file_holds_is_its_authors_fault(source):
    async def scenario():
        async with remote("http://127.0.0.1:9") as judge:
            return await judge.judge(source, RELU)

    verdict = asyncio.run(scenario())
    assert (verdict.status, verdict.reached) == ("rejected", "static")


@asynccontextmanager
async def at_work(server, folder, **more):
    """A client whose one candidate a worker has taken and holds: the client, the verdict's task, the worker."""
    async with remote(server.url, **more) as judge:
        judge._token = server.token
        first = asyncio.create_task(judge.judge("wait 1", RELU))
        yield judge, first, int(await asyncio.to_thread((folder / "begun").read_text))


def test_a_server_that_is_asked_to_end_finishes_what_it_took(folder):
    async def scenario(server):
        async with at_work(server, folder) as (judge, first, worker):
            server.process.send_signal(signal.SIGTERM)
            while (await judge.health())["status"] != "draining":
                await asyncio.sleep(0)
            status, headers, answer = await post(server.url, body(), token=server.token)
            assert (status, headers["Retry-After"], answer["error"]["code"]) == (503, "1", "draining")
            await asyncio.to_thread((folder / "go").write_text, "")
            assert (await first).status == "correct"
            return worker

    with Server.stand_in(folder) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        worker = asyncio.run(scenario(server))
        assert server.process.wait(20) == 0
        assert ended(worker)


def test_a_candidate_that_the_grace_is_too_short_for_is_infra_and_no_worker_is_left(folder):
    async def scenario(server):
        async with at_work(server, folder, tries=2) as (_, first, worker):
            server.process.send_signal(signal.SIGTERM)
            return worker, await first

    with Server.stand_in(folder, grace=0.1) as server:
        worker, verdict = asyncio.run(scenario(server))
        assert verdict.status == "infra"
        assert server.process.wait(20) == 0
        assert ended(worker)


def test_a_server_that_is_killed_is_infra_and_leaves_no_orphan(folder):
    async def scenario(server):
        async with at_work(server, folder, tries=2) as (judge, first, worker):
            others = [place["pid"] for place in (await judge.health())["devices"]]
            server.process.kill()
            return {worker, *others}, await first

    with Server.stand_in(folder, workers=2) as server:
        workers, verdict = asyncio.run(scenario(server))
        assert len(workers) == 2
        assert (verdict.status, verdict.diagnostics[0].kind) == ("infra", "Unreachable")
        assert all(ended(pid) for pid in workers)


def ended(pid):
    """Whether a process ends in time."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            return bool(select.select([descriptor], [], [], 20)[0])
        finally:
            os.close(descriptor)
    return True
