"""Servers of ours: they start, keep their token to themselves, find a port, and say why they did not start."""

import asyncio
import json
import os
import socket
import sys

import pytest
from aiohttp import web
from server_case import LONG, failure, running, seen, stranger, temporary, until

from slime_core.errors import EngineError
from slime_sglang import held_ports as ports
from slime_sglang.http import Transport
from slime_sglang.ports import server_launch
from slime_sglang.server import Server

pytestmark = pytest.mark.integration


async def model_info(server):
    http = Transport(server.address.url, token=server.address.token)
    try:
        return json.loads((await http.ask("GET", "/model_info", end=asyncio.get_running_loop().time() + LONG)).body)
    finally:
        await http.close()


# -- servers of ours


def test_a_server_starts_serves_and_leaves_nothing_behind(stand_in, shared_memory):
    """Of a server that ends in order: processes, port, shared memory, temporary files."""

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
            assert len(shared_memory()) == 2
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
    """HTTP_PROXY names something that is not there."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def check():
        async with running(stand_in()) as server:
            await server.ready(LONG)

    asyncio.run(check())


def test_a_server_that_never_answers_is_an_error_with_url_seconds_and_the_end_of_its_log(stand_in):
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
    """Nobody waits for the deadline."""

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
    """Only who asks for this very number can take a held port, and then hears nothing."""
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
    """Whoever had the port is gone again, or it was one of SGLang's further ports."""

    async def check():
        async with running(stand_in(f"busy@{tmp_path / 'once'}")) as server:
            await server.ready(LONG)
            assert server.address.generation == 2

    asyncio.run(check())


def test_a_port_that_is_taken_every_time_is_an_error(stand_in, tmp_path, monkeypatch):
    """It is not tried for ever."""
    monkeypatch.syspath_prepend(tmp_path)

    async def check():
        async with running(stand_in(f"busy@{tmp_path / 'no such folder' / 'x'}", "ends")) as server:
            error = await failure(server)
            assert error.code == "ENG69"  # open() of the stand-in fails: it ends without the words
        launch = server_launch(
            python=sys.executable,
            arguments=(),
            log=tmp_path / "busy.log",
            launcher="busy_launcher",
        )
        (tmp_path / "busy_launcher.py").write_text("print('ERROR: address already in use'); raise SystemExit(1)")
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
    """Whoever is on this machine could use it."""

    async def check():
        async with running(stand_in("open")) as server:
            error = await failure(server)
            assert error.code == "ENG73"
            assert "without a token" in error.what

    asyncio.run(check())


def test_every_start_is_a_new_generation_on_a_port_of_its_own(stand_in):
    """What answers at the old address is nobody's any more."""

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
