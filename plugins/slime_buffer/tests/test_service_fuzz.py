"""Every route under bodies made from its own schema, right ones, wrong ones and rubbish: never a 5xx, never a hang.

What is sent is drawn from the OpenAPI page that the service itself shows, then perhaps broken: another type in a place,
a key too many or too few, huge numbers, deep nesting, cut or foreign text, another header, another method or path.
"""

import asyncio
import json
import re
import string

import httpx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from slime_buffer.service import models
from slime_buffer.service.app import make_app
from slime_buffer.service.buffer_service import BufferService
from slime_buffer.service.tables import BufferLimits

pytestmark = pytest.mark.unit

TOKEN = "a-token-of-the-tests"
USUAL = ["a", "b", "a-0", "a-1", "grpo/17", "run", "w1", "b1", "../x", "%00", "~", "http://127.0.0.1:1"]
NAMES = st.sampled_from(USUAL)
TEXT = st.one_of(NAMES, st.text(max_size=12), st.text(string.printable, max_size=40))
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([10**400, -1, 2**31, 2**53, 2**63, 2**64, 1e308, 1e-320, -0.0]),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
    st.sampled_from(["x" * 5000, "\x00", "\ud7ff", "NaN", "\u202e"]),
    st.lists(st.integers(-2, 2), max_size=3),
    st.dictionaries(TEXT, st.integers(), max_size=2),
    st.integers(1, 60).map(lambda depth: json.loads("[" * depth + "]" * depth)),
    st.integers(1, 60).map(lambda depth: json.loads('{"a":' * depth + "0" + "}" * depth)),
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), NAMES, st.lists(st.integers(0, 9), max_size=2))


def from_schema(schema, schemas):
    """Values that fit the subset of JSON schema that our page uses."""
    if not isinstance(schema, dict):
        return PLAIN
    if "$ref" in schema:
        return st.deferred(lambda: from_schema(schemas[schema["$ref"].rpartition("/")[2]], schemas))
    if "anyOf" in schema:
        return st.one_of([from_schema(option, schemas) for option in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    kind = schema.get("type")
    if kind == "object":
        return _object(schema, schemas)
    if kind == "array":
        least, most = schema.get("minItems", 0), min(schema.get("maxItems", 3), 3)
        return st.lists(from_schema(schema["items"], schemas), min_size=least, max_size=max(most, least))
    if kind == "integer":
        most = schema.get("exclusiveMaximum", schema.get("maximum", 8) + 1) - 1
        return st.integers(schema.get("minimum", 0), most)
    if kind == "number":
        high = schema.get("maximum", 5)
        return st.floats(schema.get("minimum", -5), high, allow_nan=False).filter(
            lambda x: x > schema.get("exclusiveMinimum", float("-inf"))
        )
    if kind == "string":
        if "pattern" not in schema:
            return TEXT
        usual = [name for name in USUAL if re.fullmatch(schema["pattern"], name)]
        return st.one_of(
            st.sampled_from(usual) if usual else st.nothing(), st.from_regex(schema["pattern"], fullmatch=True)
        )
    return {"boolean": st.booleans(), "null": st.none()}.get(kind, PLAIN)


def _object(schema, schemas):
    properties = schema.get("properties", {})
    if not properties:
        return st.dictionaries(NAMES, from_schema(schema.get("additionalProperties") or {}, schemas), max_size=2)
    wanted = schema.get("required", [])
    fields = {name: from_schema(part, schemas) for name, part in properties.items()}
    optional = {name: value for name, value in fields.items() if name not in wanted}
    return st.fixed_dictionaries({name: fields[name] for name in wanted}, optional=optional)


@st.composite
def broken(draw, value):
    """The value with one place changed."""
    if draw(st.integers(0, 3)) == 0 or not isinstance(value, (dict, list)) or not value:
        return draw(ODD)
    if isinstance(value, list):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], draw(broken(value[place])), *value[place + 1 :]]
    name = draw(st.sampled_from(sorted(value)))
    match draw(st.integers(0, 3)):
        case 0:
            return {key: item for key, item in value.items() if key != name}
        case 1:
            return {**value, draw(TEXT): draw(ODD)}
    return {**value, name: draw(broken(value[name]))}


def _fitting(value):
    """The value with sequences whose lists agree, which a schema cannot say."""
    if isinstance(value, list):
        return [_fitting(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {key: _fitting(item) for key, item in value.items()}
    if "log_probs" in value:
        count = len(value["tokens"])
        lists = {"log_probs": [-0.5] * count, "weight_versions": [1] * count, "response_length": count}
        return {**{key: item for key, item in value.items() if key != "loss_mask"}, **lists}
    if "sample" in value:
        return {
            key: item for key, item in value.items() if key != ("failed" if value.get("sequences") else "sequences")
        }
    return value


def _patient(value):
    """No claim of a fuzzed body waits."""
    if isinstance(value, dict):
        waits = value.get("wait_seconds")
        shorter = {"wait_seconds": 0.0} if isinstance(waits, (int, float)) and 0 < waits <= 30 else {}
        return {**{key: _patient(item) for key, item in value.items()}, **shorter}
    return [_patient(item) for item in value] if isinstance(value, list) else value


class Routes:
    """The service's routes as its own page tells them, and one way to ask each."""

    def __init__(self, page):
        self.schemas = page["components"]["schemas"]
        self.all = [
            (method.upper(), path, self._body(operation))
            for path, operations in page["paths"].items()
            for method, operation in operations.items()
        ]

    def _body(self, operation):
        content = operation.get("requestBody", {}).get("content", {})
        return from_schema(content["application/json"]["schema"], self.schemas) if content else None

    def requests(self):
        """``method, path, headers, content``"""

        @st.composite
        def request(draw):
            method, path, body = draw(st.sampled_from(self.all))
            path = path.replace(
                "{claim}", draw(st.sampled_from(["b1", "b2", "b999999999999999999", "w1", "x", "%2e"]))
            )
            headers = {"content-type": "application/json"}
            content = b""
            if body is not None:
                value = draw(st.one_of(body, body.map(_fitting)))
                for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
                    value = draw(broken(value))
                content = json.dumps(_patient(value), ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
            if method == "GET" and draw(st.booleans()):
                keys = st.sampled_from(["state", "run", "after", "limit", "x"])
                values = st.sampled_from(["open", "read", "-1", "0", "7", "1e9", "9" * 40, "", "%", "a b"])
                path += "?" + "&".join(f"{k}={v}" for k, v in draw(st.lists(st.tuples(keys, values), max_size=4)))
            match draw(st.integers(0, 15)):
                case 0:
                    content = content[: draw(st.integers(0, len(content)))]
                case 1:
                    content = draw(st.binary(max_size=200))
                case 2:
                    headers["content-type"] = draw(st.sampled_from(["text/xml", "", "application/json5", "a/b;c"]))
                case 3:
                    content = draw(
                        st.sampled_from([b"[" * 9999, b"{" * 9999, b'{"a":' * 5000, b"1" * 9999, b"-", b"\xff"])
                    )
                case 4:
                    method = draw(st.sampled_from(["PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"]))
                case 5:
                    path += draw(st.sampled_from(["/", "/x", "/../..", "%00", "//", "?a=%ff"]))
            return method, path, headers, content

        return request()


class Harness:
    """One service and one loop for all examples."""

    def __init__(self, folder):
        self.runner = asyncio.Runner()
        self.run = self.runner.run
        self.run(self._open(folder))

    async def _open(self, folder):
        self.service = BufferService(folder, BufferLimits(unread=20, open=40, runs=8))
        self.app = make_app(self.service, token=TOKEN, max_body=1 << 18, max_tokens=512)
        await self.service.start()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://buffer.example")
        self.auth = {"authorization": f"Bearer {TOKEN}"}
        self.routes = Routes((await self.http.get("/openapi.json", headers=self.auth)).json())
        self.statuses = set()

    def close(self):
        self.run(self._close())
        self.runner.close()

    async def _close(self):
        await self.http.aclose()
        await self.service.close()

    async def check(self, request):
        method, path, headers, content = request
        async with asyncio.timeout(10):
            reply = await self.http.request(method, path, headers={**headers, **self.auth}, content=content)
            bare = await self.http.request(method, path, headers=headers, content=content)
        assert reply.status_code < 500, (request, reply.text)
        assert bare.status_code == 401, request
        if reply.status_code >= 400 and method != "HEAD":
            models.Refusal.model_validate_json(reply.content)
        self.statuses.add((path.split("?")[0], reply.status_code))


@pytest.fixture
def harness(tmp_path):
    made = Harness(tmp_path)
    yield made
    made.close()


def _fuzz(harness, examples):
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(harness.routes.requests())
    def fuzz(request):
        harness.run(harness.check(request))

    fuzz()
    stats = harness.run(harness.service.stats())
    assert stats.conserved
    return stats


def test_no_body_brings_the_service_down(harness):
    _fuzz(harness, 200)
    answered = {path for path, status in harness.statuses if status == 200}
    assert len(answered) >= 6, "the fuzz has hardly a valid body"
    assert {422, 405, 404} <= {status for _, status in harness.statuses}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_body_brings_the_service_down_however_long_one_tries(harness):
    stats = _fuzz(harness, 20_000)
    assert stats.samples["issued"] > 0
    answered = {path for path, status in harness.statuses if status == 200}
    assert len(answered) >= 10
