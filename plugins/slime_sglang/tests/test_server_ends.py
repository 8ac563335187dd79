"""Ends of servers of ours: killed, stopped, deaf, without their driver; nothing is left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from server_case import LONG, running, seen, temporary, until

from slime_sglang import held_ports as ports

pytestmark = pytest.mark.integration


def listed(session):
    """What the launcher knows of shared memory."""
    folder = next((v for v in map(temporary, ports.members(session)) if v), "")
    return seen(f"{folder}/shared-memory")


# -- ends


def test_a_killed_server_is_noticed_and_its_session_is_gone(stand_in, shared_memory):
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


def test_a_model_folder_in_shared_memory_stays_when_its_server_ends(stand_in, shared_memory, monkeypatch):
    """What the server had there itself goes; a folder is a person's, mapped or not."""

    async def check(model):
        async with running(server := stand_in("children")):
            await server.ready(LONG)
            assert any(str(model) in seen(f"/proc/{pid}/maps") for pid in ports.members(server.pid))
            await server.stop()
        assert model.exists()
        assert not shared_memory()

    with tempfile.TemporaryDirectory(prefix="slime-model-", dir="/dev/shm") as folder:
        model = Path(folder) / "model.safetensors"
        model.write_bytes(bytes(4096))
        monkeypatch.setenv("STAND_IN_MODEL", str(model))
        asyncio.run(check(model))


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
from slime_sglang.ports import server_launch
from slime_sglang.server import Server

async def main():
    env = {"PYTHONPATH": sys.argv[1], "PYTHONDONTWRITEBYTECODE": "1"}
    launch = server_launch(python=sys.executable, arguments=("--behave", "children"), log=Path(sys.argv[2]), env=env)
    server = Server.launch(launch)
    await server.start()
    await server.ready(100)
    print(server.pid, server.address.url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_driver_that_is_killed_leaves_nothing_behind(tmp_path, shared_memory):
    """SIGKILL of the driver; processes, port, shared memory and temporary files are gone."""

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
