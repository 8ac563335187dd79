"""The real server as a process of ours: its token, its port, what is noticed when a part of it dies, what is left."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from raw_server import ENVIRONMENT, START_TIMEOUT, words

from slime_core.engines.sglang import ports
from slime_core.engines.sglang.http import Transport
from slime_core.engines.sglang.server import Launch, Server

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def seen(path):
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def named(session, name):
    """Processes of a session by the name that SGLang gave them."""
    return [pid for pid in ports.members(session) if seen(f"/proc/{pid}/cmdline").startswith(name)]


def temporary(session):
    """The folder for temporary files of a server's session."""
    (server,) = [pid for pid in ports.members(session) if seen(f"/proc/{pid}/cmdline").endswith("serve\0")]
    return seen(f"/proc/{server}/environ").split("\0TMPDIR=")[1].split("\0")[0]


def shared(folder):
    """Files of shared memory that the launcher knows as the server's."""
    return seen(f"{folder}/shared-memory").splitlines()


async def until(true):
    async with asyncio.timeout(START_TIMEOUT):
        while not true():
            await asyncio.sleep(0.05)


async def status(server, path, token):
    http = Transport(server.address.url, token=token)
    try:
        return (await http.ask("GET", path, end=time.monotonic() + 60)).status
    finally:
        await http.close()


def test_the_token_is_asked_for_and_a_killed_scheduler_is_noticed_and_named(sglang_python, served_model, tmp_path):
    """Cases 70 (SGLang's server listens on the port that we hold), 73 and 84."""

    async def check():
        launch = Launch(
            python=sglang_python, arguments=words(served_model), log=tmp_path / "engine-0.log", env=ENVIRONMENT
        )
        server = Server.launch(launch)
        await server.start()
        try:
            await server.ready(START_TIMEOUT)
            assert server.address.generation == 1  # the first port it was given was its own
            for path in ("/model_info", "/server_info", "/v1/loads"):
                assert await status(server, path, server.address.token) == 200
                assert await status(server, path, "") == 401
                assert await status(server, path, "wrong") == 401
            session, folder = server.pid, temporary(server.pid)
            for pid in ports.members(session):
                assert server.address.token not in seen(f"/proc/{pid}/cmdline")
                assert server.address.token not in seen(f"/proc/{pid}/environ")
            dumped = re.search(r"api_key'?[=:] ?('[^']*')", seen(server.log))  # SGLang writes all its arguments
            assert dumped is not None
            assert dumped[1] == "'***'"
            assert server.address.token not in seen(server.log)
            await until(lambda: shared(folder))
            files = shared(folder)
            (scheduler,) = named(session, "sglang::scheduler")
            os.kill(scheduler, signal.SIGKILL)
            async with asyncio.timeout(START_TIMEOUT):
                how = await server.died()
            assert f"scheduler_0 ({scheduler}) was killed by SIGKILL" in how
            assert ports.members(session) == []
            assert [file for file in files if os.path.exists(file)] == []
            assert not os.path.exists(folder)
        finally:
            await server.stop(grace=0)

    asyncio.run(check())


DRIVER = """
import asyncio, json, sys
from pathlib import Path
from slime_core.engines.sglang.server import Launch, Server

async def main():
    given = json.loads(sys.argv[1])
    launch = Launch(python=given["python"], arguments=tuple(given["words"]), log=Path(given["log"]), env=given["env"])
    server = Server.launch(launch)
    await server.start()
    await server.ready(given["timeout"])
    print(server.pid, server.address.url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_driver_that_is_killed_leaves_nothing_of_its_server_behind(sglang_python, served_model, tmp_path):
    """Case 124: processes, port, shared memory and temporary files, after SIGKILL of the driver."""
    log = tmp_path / "engine-0.log"
    given = {
        "python": sglang_python,
        "words": words(served_model),
        "log": str(log),
        "env": ENVIRONMENT,
        "timeout": START_TIMEOUT,
    }

    async def check():
        driver = subprocess.Popen([sys.executable, "-c", DRIVER, json.dumps(given)], stdout=subprocess.PIPE, text=True)
        try:
            session, url = (await asyncio.to_thread(driver.stdout.readline)).split()
            session = int(session)
            folder = temporary(session)
            assert named(session, "sglang::scheduler")
            await until(lambda: shared(folder))
            files = shared(folder)
        finally:
            driver.kill()
            driver.wait()
            driver.stdout.close()
        await until(lambda: not ports.members(session))
        assert ports.listeners(int(url.rpartition(":")[2])) == frozenset()
        assert [file for file in files if os.path.exists(file)] == []
        assert not os.path.exists(folder)
        assert "the process that started this server is gone" in seen(log)

    asyncio.run(check())
