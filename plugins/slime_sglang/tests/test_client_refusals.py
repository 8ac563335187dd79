"""The client before a server that refuses, is busy, fails or is not the one: what is asked again and what is told."""

import asyncio
import socket
import ssl
import subprocess
import time
from contextlib import asynccontextmanager

import faults
import pytest
from client_case import ask, both, client_of, error_of, right
from fake_sglang import TOKEN, FakeServer
from faults import FaultProxy

from slime_sglang import http
from slime_sglang.client import ServerFault

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("short_pauses")]


def closed_port():
    """A port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_refused_connection_names_the_url_after_bounded_tries():
    """Connection refused at start."""

    async def main():
        url = f"http://127.0.0.1:{closed_port()}"
        client = client_of(url)
        error = await error_of(ask(client), ServerFault)
        assert error.code == "ENG69"
        assert url in error.where
        assert client.progress.retries == 3
        assert TOKEN not in str(error)
        await client.close()

    asyncio.run(main())


def test_a_server_that_comes_up_meanwhile_is_found():
    """Nothing was sent, so asking again is safe and costs no abort."""

    async def main():
        async with both(retries=1000) as (client, proxy, server):
            await proxy.down()
            task = asyncio.create_task(ask(client))
            while not client.progress.retries:
                await asyncio.sleep(0)
            await proxy.up()
            assert right(await task)
            assert len(server.bodies) == 1
            assert server.aborts == []

    asyncio.run(main())


def test_another_service_is_quoted():
    """Wrong service on the port (HTML 200)."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.always(faults.html)
            error = await error_of(ask(client), ServerFault)
            assert error.code == "ENG71"
            assert "Printer" in error.why
            assert len(error.why) < 400
            assert (proxy.count("/generate"), server.bodies) == (1, [])
            proxy.always(faults.html, "/model_info")
            assert (await error_of(client.model_info())).code == "ENG71"

    asyncio.run(main())


def test_a_prompt_that_the_server_finds_too_long_is_not_asked_again():
    """HTTP 400 (prompt too long)."""
    said = b'{"error": {"message": "The input (70 tokens) is longer than the model\'s context length (64 tokens)."}}'

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faults.status(400, body=said))
            error = await error_of(ask(client))
            assert error.code == "ENG72"
            assert "70 tokens" in error.what
            assert not isinstance(error, ServerFault)
            proxy.always(faults.status(400))
            error = await error_of(ask(client))
            assert error.code == "ENG78"
            assert "made up: 400" in error.what
            assert proxy.paths == ["/generate"] * 2

    asyncio.run(main())


@pytest.mark.parametrize("code", [401, 403])
def test_a_refused_token_is_not_asked_again_and_not_shown(code):
    """401 and 403: a hint, no retry."""

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faults.status(code))
            error = await error_of(ask(client))
            assert error.code == "ENG73"
            assert "rollout_engine_token_env" in error.fix
            assert not isinstance(error, ServerFault)
            assert TOKEN not in str(error)
            assert TOKEN not in repr(client.address)
            assert proxy.paths == ["/generate"]

    asyncio.run(main())


def test_a_wrong_token_is_refused():
    async def main():
        async with both(token="another") as (client, _, _):
            assert (await error_of(ask(client))).code == "ENG73"

    asyncio.run(main())


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_is_asked_again_a_bounded_number_of_times(code):
    """429 and 503: nothing was begun, so no abort is sent."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faults.status(code), faults.status(code))
            assert right(await ask(client))
            assert (client.progress.retries, server.aborts) == (2, [])
            proxy.always(faults.status(code))
            error = await error_of(ask(client), ServerFault)
            assert (error.code, proxy.count("/generate")) == ("ENG74", 3 + 4)

    asyncio.run(main())


def test_retry_after_is_waited_for_within_the_deadline():
    """Retry-After."""

    async def main():
        async with both(timeout=50.0) as (client, proxy, _):
            proxy.add(faults.status(503, headers=["Retry-After: 1"]))
            begun = time.monotonic()
            assert right(await ask(client))
            assert time.monotonic() - begun > 0.9
            proxy.add(faults.status(503, headers=["Retry-After: 60"]))
            assert (await error_of(ask(client), ServerFault)).code == "ENG74"  # that is past the deadline
            assert http.retry_after({"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}) == 0.0

    asyncio.run(main())


@pytest.mark.parametrize("code", [500, 502, 504])
def test_a_server_that_failed_once_is_asked_again_after_an_abort_of_the_old_rid(code):
    """500 once."""

    async def main():
        async with both() as (client, proxy, server):
            proxy.add(faults.status(code))
            assert right(await ask(client))
            assert proxy.paths == ["/generate", "/abort_request", "/generate"]
            assert server.aborts[0]["rid"] != server.bodies[0]["rid"]

    asyncio.run(main())


def test_a_server_that_always_fails_is_given_up():
    """500 always: bounded tries, then an error that says the server is at fault."""

    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faults.status(500))
            error = await error_of(ask(client), ServerFault)
            assert (error.code, proxy.count("/generate"), client.progress.in_flight) == ("ENG75", 4, 0)
            proxy.always(faults.status(501))
            assert (await error_of(ask(client), ServerFault)).code == "ENG75"
            assert proxy.count("/generate") == 5

    asyncio.run(main())


def test_nothing_is_asked_again_while_the_old_try_may_still_run():
    """The abort of the old rid fails too."""

    async def main():
        async with both(retries=1) as (client, proxy, _):
            proxy.add(faults.status(500))
            proxy.always(faults.status(500), "/abort_request")
            assert (await error_of(ask(client), ServerFault)).code == "ENG75"
            assert proxy.count("/generate") == 1

    asyncio.run(main())


def test_an_unknown_name_is_named():
    """DNS failure."""

    async def main():
        client = client_of("http://no-such-host.invalid:1", retries=0)
        error = await error_of(ask(client), ServerFault)
        assert error.code == "ENG69"
        assert "no-such-host.invalid" in str(error)
        await client.close()

    asyncio.run(main())


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    """Proxy variables: a proxy would see the token."""

    async def main():
        async with FaultProxy(closed_port()) as trap:
            for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
                monkeypatch.setenv(name, trap.url)
            monkeypatch.delenv("NO_PROXY", raising=False)
            async with both() as (client, _, _):
                assert right(await ask(client))
            assert trap.paths == []

    asyncio.run(main())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate of 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem"]
    subprocess.run([*words, *more], check=True, capture_output=True)
    return folder


@asynccontextmanager
async def secured(server, folder):
    """The server behind TLS: its url."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async def pump(source, target):
        while data := await source.read(65536):
            target.write(data)
        target.close()

    async def relay(reader, writer):
        other, back = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pump(reader, back), pump(other, writer), return_exceptions=True)

    listener = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


def test_a_self_signed_certificate_needs_its_authority_named(certificate):
    """TLS/self-signed: an explicit file, and no switch that turns the check off."""

    async def main():
        async with FakeServer() as server, secured(server, certificate) as url:
            client = client_of(url)
            error = await error_of(ask(client))
            assert error.code == "ENG93"
            assert "rollout_engine_ca" in error.fix
            assert not isinstance(error, ServerFault)
            await client.close()
            client = client_of(url, ca=str(certificate / "cert.pem"))
            assert right(await ask(client))
            await client.close()
            client = client_of(url, ca=str(certificate / "none.pem"))
            assert (await error_of(ask(client))).code == "ENG93"
            await client.close()

    asyncio.run(main())


def test_a_server_without_tls_at_an_https_address_is_said_so():
    async def main():
        async with FakeServer() as server:
            client = client_of(server.url.replace("http://", "https://"))
            assert (await error_of(ask(client))).code == "ENG93"
            await client.close()

    asyncio.run(main())


def test_a_post_that_may_have_begun_is_not_repeated_unless_that_is_safe():
    async def main():
        async with both() as (client, proxy, _):
            proxy.always(faults.reset, "/update_weights_from_disk")
            assert (await error_of(client.post("/update_weights_from_disk", {}, timeout=60.0))).code == "ENG77"
            assert proxy.count("/update_weights_from_disk") == 1
            error = await error_of(client.post("/update_weights_from_disk", {}, timeout=60.0, retry=True))
            assert (error.code, proxy.count("/update_weights_from_disk")) == ("ENG77", 5)
            proxy.always(faults.status(503), "/update_weights_from_disk")
            await error_of(client.post("/update_weights_from_disk", {}, timeout=60.0))
            assert proxy.count("/update_weights_from_disk") == 9  # busy: nothing was begun
            proxy.always(faults.hang, "/model_info")
            assert (await error_of(client.get("/model_info", timeout=0.2))).code == "ENG76"

    asyncio.run(main())
