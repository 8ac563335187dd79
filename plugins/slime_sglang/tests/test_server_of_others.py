"""Servers that somebody else runs: attached, told apart from other services, never stopped."""

import asyncio
import ssl
import subprocess
from dataclasses import replace

import pytest
from aiohttp import web
from server_case import LONG, failure, stranger

from slime_sglang import held_ports as ports
from slime_sglang.server import Server

pytestmark = pytest.mark.integration


def as_sglang(token):
    """Answers of a server that somebody else runs with this token."""

    def answer(request):
        if request.path == "/health":
            return web.Response()
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"model_path": "theirs"})

    return answer


def test_an_external_server_is_attached_and_never_stopped():
    async def check():
        async with stranger(as_sglang("t1")) as (url, heard):
            server = Server.attach(url + "/", token="t1", number=3)
            assert server.address.url == url
            assert not server.owned
            await server.start()
            await server.ready(LONG)
            assert server.address.generation == 1
            await server.stop()
            before = len(heard)
            await server.start()
            await server.ready(LONG)  # it still serves
            assert len(heard) > before
            assert server.address.generation == 2  # the same address, and another server as far as we know
            assert server.address.url == url
            assert server.running

    asyncio.run(check())


def test_an_external_server_with_a_certificate_of_its_own_needs_its_authority_named(tmp_path):
    """Said at once, not after the deadline."""
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    subprocess.run([*words, *more], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def check():
        async with stranger(as_sglang("t1"), tls=tls) as (url, _):
            error = await failure(Server.attach(url, token="t1"), timeout=100 * LONG)
            assert error.code == "ENG93"
            await Server.attach(url, token="t1", ca=str(tmp_path / "cert.pem")).ready(LONG)

    asyncio.run(check())


@pytest.mark.parametrize("token", ["", "wrong"])
def test_an_external_server_that_refuses_the_token_is_an_error_at_once(token):
    """It is not asked again."""

    async def check():
        async with stranger(as_sglang("t1")) as (url, heard):
            error = await failure(Server.attach(url, token=token), timeout=100 * LONG)
            assert error.code == "ENG73"
            assert "rollout_engine_token_env" in error.fix
            assert ("no token was given" in error.why) == (not token)
            assert [path for path, _ in heard] == ["/health", "/model_info"]

    asyncio.run(check())


@pytest.mark.parametrize("status", [200, 404])
def test_another_service_on_the_port_is_an_error_with_its_first_bytes(status):
    page = "<html>" + "hello " * 100

    async def check():
        async with stranger(lambda _: web.Response(text=page, status=status)) as (url, _):
            error = await failure(Server.attach(url, token="t1"), timeout=100 * LONG)
            assert error.code == "ENG71"
            assert url in error.what
            assert page[:200] in error.why
            assert page[:210] not in error.why

    asyncio.run(check())


def test_an_external_server_that_starts_later_is_waited_for(tmp_path):
    """503 while it loads, then it serves."""
    asked = []

    def answer(request):
        asked.append(request.path)
        return web.Response(status=503) if len(asked) < 3 else as_sglang("t1")(request)

    async def check():
        async with stranger(answer) as (url, _):
            await Server.attach(url, token="t1").ready(LONG)

    asyncio.run(check())


def test_an_external_server_that_is_not_there_is_an_error_with_url_and_seconds():
    """Connection refused until the deadline."""

    async def check():
        with ports.hold() as held:  # nobody listens there
            url = f"http://127.0.0.1:{held.port}"
            error = await failure(Server.attach(url), timeout=0.3)
        assert error.code == "ENG69"
        assert url in error.what
        assert "0.3 s" in error.what
        assert "refused" in error.why.lower() or "connect" in error.why.lower()

    asyncio.run(check())


def test_the_death_of_an_external_server_is_not_ours_to_see():
    async def check():
        server = Server.attach("http://127.0.0.1:9")
        waiting = asyncio.create_task(server.died())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        assert server.tail() == "its log is not ours"

    asyncio.run(check())


def test_an_address_is_a_value_of_its_own():
    server = Server.attach("http://127.0.0.1:9", token="t")
    assert replace(server.address, generation=2).generation == 2
    assert server.address.generation == 1
