"""Servers as processes: started, found ready or not, and gone without a trace; the stand-in's wire is SGLang's."""

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from slime_core.engines.sglang import ports
from slime_core.engines.sglang.http import Transport
from slime_core.engines.sglang.server import Launch, Server
from slime_core.errors import EngineError

pytestmark = pytest.mark.integration

LONG = 120.0  # seconds in which a busy machine starts a stand-in


def seen(path):
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def listed(session):
    """What the launcher knows of shared memory."""
    folder = next((v for v in map(temporary, ports.members(session)) if v), "")
    return seen(f"{folder}/shared-memory")


def temporary(pid):
    """The temporary folder of a process of a server; empty where it is the launcher, whose own is another."""
    words = [word for word in seen(f"/proc/{pid}/environ").split("\0") if word.startswith("TMPDIR=")]
    return next((word[len("TMPDIR=") :] for word in words if "slime-sglang-" in word), "")


async def until(true):
    async with asyncio.timeout(LONG):
        while not true():
            await asyncio.sleep(0.01)


async def model_info(server):
    http = Transport(server.address.url, token=server.address.token)
    try:
        return json.loads((await http.ask("GET", "/model_info", end=asyncio.get_running_loop().time() + LONG)).body)
    finally:
        await http.close()


@asynccontextmanager
async def running(server):
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace=0)


@asynccontextmanager
async def stranger(answer, port=0, tls=None):
    """Another HTTP service; ``heard`` gets every request's path and headers."""
    heard = []

    async def reply(request):
        heard.append((request.path, dict(request.headers)))
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, ssl_context=tls)
    await site.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", heard
    finally:
        await runner.cleanup()


async def failure(server, timeout=LONG):
    with pytest.raises(EngineError) as raised:
        await server.ready(timeout)
    return raised.value


# -- servers of ours


def test_a_server_starts_serves_and_leaves_nothing_behind(stand_in, shared_memory):
    """Case 124, of the part that ends in order: processes, port, shared memory, temporary files."""

    async def check():
        server = stand_in("children")
        assert not server.address.url
        async with running(server):
            await server.ready(LONG)
            assert server.owned
            assert server.address.generation == 1
            assert (await model_info(server))["model_path"] == "stand-in"
            await until(lambda: "is up" in seen(server.log))  # the spawned child got the arguments
            session, port = server.pid, int(server.address.url.rpartition(":")[2])
            pids = ports.members(session)
            assert len(pids) >= 4  # launcher, server, resource tracker, scheduler
            assert len(shared_memory()) == 1
            folder = next(filter(None, map(temporary, pids)))
            assert os.listdir(folder)
            await server.stop()
            assert ports.members(session) == []
            assert ports.listeners(port) == frozenset()
            assert shared_memory() == set()
            assert not os.path.exists(folder)
            assert server.pid == 0

    asyncio.run(check())


def test_the_token_is_in_no_command_line_no_environment_and_no_log(stand_in):
    async def check():
        async with running(stand_in("children")) as server:
            await server.ready(LONG)
            await until(lambda: "is up" in seen(server.log))
            for pid in ports.members(server.pid):
                assert server.address.token not in seen(f"/proc/{pid}/cmdline")
                assert server.address.token not in seen(f"/proc/{pid}/environ")
            assert "api_key='***'" in seen(server.log)
            assert server.address.token not in seen(server.log)
            assert server.address.token not in repr(server.address)

    asyncio.run(check())


def test_a_token_that_the_log_holds_after_all_is_not_in_its_tail_and_long_lines_are_cut(stand_in):
    async def check():
        async with running(stand_in("talks")) as server:
            await server.ready(LONG)
            assert server.address.token in seen(server.log)
            assert "the token is ***" in server.tail()
            assert max(len(line) for line in server.tail().splitlines()) < 320
            assert "GET /health" not in server.tail()  # requests that were served are no news

    asyncio.run(check())


def test_a_proxy_of_the_environment_is_not_asked(stand_in, monkeypatch):
    """Case 92: HTTP_PROXY names something that is not there."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def check():
        async with running(stand_in()) as server:
            await server.ready(LONG)

    asyncio.run(check())


def test_a_server_that_never_answers_is_an_error_with_url_seconds_and_the_end_of_its_log(stand_in):
    """Case 69."""

    async def check():
        async with running(stand_in("mute")) as server:
            await until(lambda: ports.listeners(int(server.address.url.rpartition(":")[2])))
            error = await failure(server, timeout=0.5)
            assert error.code == "ENG69"
            assert server.address.url in error.what
            assert "0.5 s" in error.what
            assert error.where == str(server.log)
            assert "/health answered 503" in error.why
            assert "behave='mute'" in error.why

    asyncio.run(check())


def test_a_server_that_ends_while_it_starts_is_an_error_at_once(stand_in):
    """Case 69: nobody waits for the deadline."""

    async def check():
        async with running(stand_in("ends")) as server:
            async with asyncio.timeout(LONG):
                error = await failure(server, timeout=100 * LONG)
            assert error.code == "ENG69"
            assert "ended with exit code 3" in error.what
            assert "no such model, says SGLang" in error.why

    asyncio.run(check())


def test_a_python_that_does_not_exist_is_an_error_that_names_the_key(stand_in):
    async def check():
        server = stand_in(python="/no/such/python")
        with pytest.raises(EngineError) as raised:
            await server.start()
        assert raised.value.code == "ENG69"
        assert "sglang.python" in raised.value.fix
        await server.stop()

    asyncio.run(check())


def test_a_port_that_a_stranger_took_is_left_for_another_and_the_stranger_gets_no_token(stand_in, tmp_path):
    """Cases 70 and 71: only who asks for this very number can take a held port, and then hears nothing."""
    gate = tmp_path / "gate"

    async def check():
        server = stand_in(more=("--gate", gate))  # it does not listen before we have
        async with running(server):
            first = server.address.url
            async with stranger(lambda _: web.Response(text="hello"), int(first.rpartition(":")[2])) as (url, heard):
                assert url == first
                gate.touch()
                await server.ready(LONG)
                assert server.address.url != first
                assert server.address.generation == 2
                assert heard == []

    asyncio.run(check())


def test_a_server_that_says_its_address_is_in_use_is_started_on_another(stand_in, tmp_path):
    """Case 70: whoever had the port is gone again, or it was one of SGLang's further ports."""

    async def check():
        async with running(stand_in(f"busy@{tmp_path / 'once'}")) as server:
            await server.ready(LONG)
            assert server.address.generation == 2

    asyncio.run(check())


def test_a_port_that_is_taken_every_time_is_an_error(stand_in, tmp_path):
    """Case 70: it is not tried for ever."""

    async def check():
        async with running(stand_in(f"busy@{tmp_path / 'no such folder' / 'x'}", "ends")) as server:
            error = await failure(server)
            assert error.code == "ENG69"  # open() of the stand-in fails: it ends without the words
        launch = Launch(
            python=sys.executable, arguments=(), log=tmp_path / "busy.log", launcher=tmp_path / "launcher.py"
        )
        launch.launcher.write_text("print('ERROR: address already in use'); raise SystemExit(1)")
        async with running(Server.launch(launch)) as server:
            error = await failure(server)
            assert error.code == "ENG69"
            assert "4 times" in error.what

    asyncio.run(check())


@pytest.mark.parametrize(
    ("more", "nccl", "dist"),
    [
        ((), True, False),
        (("--dp-size", "2"), False, False),  # two workers refuse a common port
        (("--dp-size", "2", "--enable-dp-attention"), True, True),
        (("--nccl-port", "4567"), "4567", False),
    ],
)
def test_further_ports_of_sglang_are_held_too(stand_in, more, nccl, dist):
    async def check():
        async with running(stand_in(more=more)) as server:
            await server.ready(LONG)
            args = (await model_info(server))["args"]
            assert bool(args["nccl_port"]) == bool(nccl)
            assert bool(args["dist_init_addr"]) == dist
            if nccl is True:
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", args["nccl_port"]))
            elif nccl:
                assert args["nccl_port"] == int(nccl)

    asyncio.run(check())


def test_a_server_of_ours_that_asks_for_no_token_is_refused(stand_in):
    """Case 73, the other way: whoever is on this machine could use it."""

    async def check():
        async with running(stand_in("open")) as server:
            error = await failure(server)
            assert error.code == "ENG73"
            assert "without a token" in error.what

    asyncio.run(check())


def test_every_start_is_a_new_generation_on_a_port_of_its_own(stand_in):
    """Case 90: what answers at the old address is nobody's any more."""

    async def check():
        async with running(stand_in()) as server:
            await server.ready(LONG)
            first, session = server.address, server.pid
            await server.start()
            assert ports.members(session) == []
            await server.ready(LONG)
            assert server.address.generation == first.generation + 1
            assert server.address.url != first.url

    asyncio.run(check())


# -- ends


def test_a_killed_server_is_noticed_and_its_session_is_gone(stand_in, shared_memory):
    """Case 84, of the part that notices."""

    async def check():
        async with running(stand_in("children")) as server:
            await server.ready(LONG)
            await until(lambda: "is up" in seen(server.log))
            session = server.pid
            launcher = session
            (main,) = [pid for pid in ports.members(session) if seen(f"/proc/{pid}/cmdline").endswith("serve\0")]
            assert main != launcher
            await until(lambda: shared_memory() <= {Path(line).name for line in listed(session).splitlines()})
            os.kill(main, signal.SIGKILL)
            async with asyncio.timeout(LONG):
                assert await server.died() == "was killed by SIGKILL"
            assert not server.running
            assert ports.members(session) == []
            assert shared_memory() == set()

    asyncio.run(check())


def test_a_killed_child_of_the_server_is_named(stand_in):
    async def check():
        async with running(stand_in("children")) as server:
            await server.ready(LONG)
            await until(lambda: "is up" in seen(server.log))
            child = int(seen(server.log).split("scheduler ")[1].split()[0])
            os.kill(child, signal.SIGKILL)
            async with asyncio.timeout(LONG):
                how = await server.died()
            assert how == f"was killed by SIGKILL after its process scheduler_0 ({child}) was killed by SIGKILL"

    asyncio.run(check())


def test_a_killed_launcher_takes_the_server_with_it(stand_in, shared_memory):
    async def check():
        async with running(stand_in("children")) as server:
            await server.ready(LONG)
            session = server.pid
            folder = next(filter(None, map(temporary, ports.members(session))))
            await until(lambda: shared_memory() <= {Path(line).name for line in listed(session).splitlines()})
            os.kill(session, signal.SIGKILL)
            async with asyncio.timeout(LONG):
                assert await server.died() == "was killed by SIGKILL"
            assert ports.members(session) == []
            assert shared_memory() == set()
            assert not os.path.exists(folder)

    asyncio.run(check())


def test_a_server_that_does_not_hear_sigterm_is_killed(stand_in):
    async def check():
        async with running(stand_in("deaf", "children")) as server:
            await server.ready(LONG)
            session = server.pid
            await server.stop(grace=0.2)
            assert ports.members(session) == []
            await server.stop()  # again: nothing happens

    asyncio.run(check())


def test_a_stop_that_is_cancelled_kills_all_the_same(stand_in):
    async def check():
        async with running(stand_in("deaf")) as server:
            await server.ready(LONG)
            session = server.pid
            stopping = asyncio.create_task(server.stop(grace=LONG))
            await asyncio.sleep(0)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            async with asyncio.timeout(LONG):
                await server.died()
            assert ports.members(session) == []

    asyncio.run(check())


DRIVER = """
import asyncio, sys
from pathlib import Path
from slime_core.engines.sglang.server import Launch, Server

async def main():
    env = {"PYTHONPATH": sys.argv[1], "PYTHONDONTWRITEBYTECODE": "1"}
    launch = Launch(python=sys.executable, arguments=("--behave", "children"), log=Path(sys.argv[2]), env=env)
    server = Server.launch(launch)
    await server.start()
    await server.ready(100)
    print(server.pid, server.address.url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_driver_that_is_killed_leaves_nothing_behind(tmp_path, shared_memory):
    """Case 124: SIGKILL of the driver; processes, port, shared memory and temporary files are gone."""

    async def check():
        log = tmp_path / "engine.log"
        stand_in = Path(__file__).with_name("stand_in")
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, stand_in, log], stdout=subprocess.PIPE, text=True)
        try:
            session, url = (await asyncio.to_thread(driver.stdout.readline)).split()
            session = int(session)
            await until(lambda: "is up" in seen(log))
            folder = next(filter(None, map(temporary, ports.members(session))))
        finally:
            driver.kill()
            driver.wait()
            driver.stdout.close()
        await until(lambda: not ports.members(session))
        assert ports.listeners(int(url.rpartition(":")[2])) == frozenset()
        assert shared_memory() == set()
        assert not os.path.exists(folder)
        assert "the process that started this server is gone" in seen(log)

    asyncio.run(check())


# -- servers of others


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
            assert server.address.generation == 2  # case 90: the same address, and another server as far as we know
            assert server.address.url == url
            assert server.running

    asyncio.run(check())


def test_an_external_server_with_a_certificate_of_its_own_needs_its_authority_named(tmp_path):
    """Case 93: said at once, not after the deadline."""
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
    """Case 73: it is not asked again."""

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
    """Case 71."""
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
    """Case 69: 503 while it loads, then it serves."""
    asked = []

    def answer(request):
        asked.append(request.path)
        return web.Response(status=503) if len(asked) < 3 else as_sglang("t1")(request)

    async def check():
        async with stranger(answer) as (url, _):
            await Server.attach(url, token="t1").ready(LONG)

    asyncio.run(check())


def test_an_external_server_that_is_not_there_is_an_error_with_url_and_seconds():
    """Case 69: connection refused until the deadline."""

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
