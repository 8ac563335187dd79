"""What the service lets in: nothing without the token, nothing too large or too slow, and never a bare error."""

import asyncio
import json

import pytest

from slime_buffer.service import models
from slime_service import guard

pytestmark = pytest.mark.unit

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


def refusal(reply):
    return models.Refusal.model_validate_json(reply.content).error


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic a-token-of-the-tests", "a-token-of-the-tests"]
)
def test_no_route_answers_without_its_token(serving, header):
    """Reliability 2.3: every route that the application has, and those that it does not have."""

    async def body():
        async with serving() as world:
            paths = {route.path for route in world.app.routes}
            assert {"/openapi.json", "/docs", "/health", "/v1/samples", "/v1/stats"} <= paths
            world.http.headers.pop("authorization")
            headers = {} if header is None else {"authorization": header}
            for path in [*paths, "/", "/v1", "/nothing", "//health", "/health/", "/%2e%2e/token"]:
                for method in METHODS:
                    reply = await world.http.request(method, path.replace("{claim}", "b1"), headers=headers)
                    assert reply.status_code == 401, (method, path)
                    assert method == "HEAD" or refusal(reply).code == "unauthorized"
                    assert reply.headers["www-authenticate"] == "Bearer"

    asyncio.run(body())


def test_a_websocket_is_closed(serving):
    async def body():
        async with serving() as world:
            sent = []

            async def send(message):
                sent.append(message)

            await world.app({"type": "websocket", "path": "/", "headers": []}, None, send)
            assert sent == [{"type": "websocket.close", "code": 1008}]

    asyncio.run(body())


def test_a_large_body_is_refused_before_it_is_read(serving):
    async def body():
        async with serving(max_body=1000) as world:
            taken = []

            async def chunks():
                for _ in range(1000):
                    taken.append(1)
                    yield b" " * 100

            reply = await world.http.post("/v1/rollouts", content=chunks())
            assert (reply.status_code, refusal(reply).code) == (413, "too_large")
            headers = {"content-length": "1001", "content-type": "application/json"}
            reply = await world.http.post("/v1/rollouts", content=b"{}", headers=headers)
            assert reply.status_code == 413
            for length in ("9" * 400, "-1", "abc", "1e3"):
                reply = await world.http.post(
                    "/v1/rollouts", content=b"{}", headers={**headers, "content-length": length}
                )
                assert reply.status_code == 413

    asyncio.run(body())


def test_a_body_that_does_not_come_is_not_waited_for(serving, monkeypatch):
    """A total deadline, not one a read."""
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.05)

    async def body():
        async with serving() as world:
            never = asyncio.Event()
            sent = []

            async def receive():
                await never.wait()

            async def send(message):
                sent.append(message)

            headers = [(b"authorization", f"Bearer {world.token}".encode())]
            scope = {"type": "http", "method": "POST", "path": "/v1/rollouts", "headers": headers}
            await world.app(scope, receive, send)
            assert sent[0]["status"] == 408

    asyncio.run(body())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
    ],
    ids=["text", "form", "gzip", "json"],
)
def test_only_plain_json_is_read(serving, headers, status):
    async def body():
        async with serving() as world:
            reply = await world.http.post("/v1/rollouts", content=b'{"run": "r", "groups": []}', headers=headers)
            assert reply.status_code == status

    asyncio.run(body())


BAD = {
    "nothing": b"",
    "cut": b'{"run": "r", "groups": [',
    "nan": b'{"run": "r", "groups": [], "x": NaN}',
    "deep": b"[" * 100_000,
    "long number": b'{"run": ' + b"9" * 100_000 + b"}",
    "list": b"[]",
    "utf-16": '{"run": "r"}'.encode("utf-16"),
    "surrogate": b'{"run": "\\ud800", "groups": []}',
    "nul": b'{"run": "a\\u0000b", "groups": []}',
    "unknown key": b'{"run": "r", "groups": [], "extra": 1}',
    "number as text": b'{"run": 7, "groups": []}',
    "path as name": b'{"run": "../../etc", "groups": []}',
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_bad_body_is_told_what_is_wrong(serving, text):
    async def body():
        async with serving() as world:
            headers = {"content-type": "application/json"}
            reply = await world.http.post("/v1/rollouts", content=text, headers=headers)
            assert reply.status_code == 422
            problem = refusal(reply)
            assert problem.code == "invalid"
            assert problem.why
            assert problem.fix
            assert len(reply.content) < 3000
            assert "Traceback" not in reply.text

    asyncio.run(body())


SEQUENCE = {
    "tokens": [1, 2, 3],
    "response_length": 2,
    "log_probs": [-0.5, -0.5],
    "weight_versions": [0, 0],
}
WRONG = {
    "lengths": ({"log_probs": [-0.5]}, "response_length 2"),
    "response longer than tokens": ({"response_length": 4}, "3 tokens"),
    "log-prob above 0": ({"log_probs": [-0.5, 0.7]}, "above 0"),
    "token outside int32": ({"tokens": [1, 2, 2**31]}, "tokens"),
    "negative token": ({"tokens": [-1, 2, 3]}, "tokens"),
    "version of a token that trains": ({"weight_versions": [0, -1]}, "weight version"),
    "mask": ({"loss_mask": [1, 2]}, "loss_mask"),
    "boolean token": ({"tokens": [True, 2, 3]}, "tokens"),
    "no response": ({"response_length": 0, "log_probs": [], "weight_versions": []}, "response_length"),
    "deep metadata": ({"metadata": json.loads("[" * 20 + "]" * 20 and '{"a":' * 20 + "1" + "}" * 20)}, "nested"),
    "huge integer": ({"metadata": {"a": 10**30}}, "64 bits"),
    "status": ({"status": "aborted"}, "status"),
}


@pytest.mark.parametrize(("change", "told"), WRONG.values(), ids=WRONG)
def test_a_sequence_that_training_could_not_use_is_refused(serving, change, told):
    """Lists of one length, ids in range, finite log-probs, a version for what trains."""

    async def body():
        async with serving() as world:
            await world.ask("a")
            row = {"group": "a", "sample": "a-0", "sequences": [{**SEQUENCE, **change}]}
            reply = await world.http.post("/v1/samples", json={"run": "run", "trajectories": [row]})
            assert reply.status_code == 422
            assert told in refusal(reply).why
            assert (await world.service.stats()).queues["staged_rollouts"] == 0

    asyncio.run(body())


def test_rows_and_tokens_of_a_request_are_bounded(serving):
    async def body():
        async with serving(max_tokens=4, max_body=16 << 20) as world:
            await world.ask("a")
            row = {"group": "a", "sample": "a-0", "sequences": [{**SEQUENCE, "tokens": [1] * 5}]}
            reply = await world.http.post("/v1/samples", json={"run": "run", "trajectories": [row]})
            assert (reply.status_code, refusal(reply).code) == (422, "too_long")
            failed = {"group": "a", "sample": "a-0", "failed": "x"}
            reply = await world.http.post("/v1/samples", json={"run": "run", "trajectories": [failed] * 1025})
            assert reply.status_code == 422
            assert "1024" in refusal(reply).why

    asyncio.run(body())


def test_other_methods_and_paths_are_told_in_the_same_form(serving):
    async def body():
        async with serving() as world:
            assert refusal(await world.http.get("/v1/nothing")).code == "no_route"
            assert refusal(await world.http.delete("/v1/samples")).code == "method"
            assert refusal(await world.http.get("/v1/groups?state=odd")).code == "invalid"
            assert refusal(await world.http.get("/v1/groups?page=2")).code == "invalid"
            assert refusal(await world.http.post("/v1/batches/b%2e%2e/ack", json={})).code in ("invalid", "no_route")

    asyncio.run(body())


def test_a_full_disk_is_a_503_with_its_code_and_changes_nothing(serving):
    """SQLite's own limit of pages stands for the disk's."""

    async def body():
        async with serving() as world:
            await world.ask("a")
            db = world.service._tables.db
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {pages}")
            reply = await world.http.post(
                "/v1/rollouts",
                json={"run": "run", "groups": [json.loads(_big(name)) for name in ("b", "c", "d", "e")]},
            )
            assert (reply.status_code, refusal(reply).code) == (503, "STO109")
            assert reply.headers["retry-after"] == "1"
            db.execute("PRAGMA max_page_count = 1000000")
            assert await world.states() == {("a", 0): "open"}
            await world.ask("b")

    asyncio.run(body())


def _big(name):
    return models.AskedGroup(
        id=name,
        prompt="x" * 20_000,
        samples=[models.Wanted(id=f"{name}-0")],
        sampling=models.Sampling(max_new_tokens=1),
    ).model_dump_json()


def test_an_internal_error_is_logged_and_answered_without_a_stack(serving, caplog):
    async def body():
        async with serving(check=False) as world:
            await world.service.close()
            reply = await world.http.get("/v1/groups")
            assert (reply.status_code, refusal(reply).code) == (500, "SLM00")
            assert "Traceback" not in reply.text

    asyncio.run(body())
    assert "RuntimeError" in caplog.text


def test_the_openapi_page_names_every_route_with_its_types_and_refusals(serving):
    async def body():
        async with serving() as world:
            page = (await world.http.get("/openapi.json")).json()
            operations = [op for path in page["paths"].values() for op in path.values()]
            assert len(operations) == 13
            for operation in operations:
                assert operation["description"]
                assert {"200", "401", "422", "429"} <= set(operation["responses"])
                schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
                assert schema["$ref"].startswith("#/components/schemas/")
            schemas = page["components"]["schemas"]
            assert all(not s.get("additionalProperties", True) for s in schemas.values() if s.get("type") == "object")
            assert "examples" in json.dumps(schemas)

    asyncio.run(body())
