"""The real server as a process of ours: its token, its port, and what is left of it when its driver dies."""

import asyncio
import json
import os
import re
import subprocess
import sys

import pytest
from raw_server import ENVIRONMENT, START_TIMEOUT, shared, temporary, words
from server_case import seen

from slime_sglang import held_ports as ports

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def named(session, name):
    """Processes of a session by the name that SGLang gave them."""
    return [pid for pid in ports.members(session) if seen(f"/proc/{pid}/cmdline").startswith(name)]


async def until(true):
    async with asyncio.timeout(START_TIMEOUT):
        while not true():
            await asyncio.sleep(0.05)


def test_the_token_is_asked_for_and_shows_nowhere(server):
    """SGLang's server listens on the port that we hold."""
    address, log = server.server.address, seen(server.server.log)
    assert address.generation == 1  # the first port it was given was its own
    for path in ("/model_info", "/server_info", "/v1/loads"):
        assert [server.call(path, token=token).status for token in (address.token, "", "wrong")] == [200, 401, 401]
    for pid in ports.members(server.server.pid):
        assert address.token not in seen(f"/proc/{pid}/cmdline")
        assert address.token not in seen(f"/proc/{pid}/environ")
    dumped = re.search(r"api_key'?[=:] ?('[^']*')", log)  # SGLang writes all its arguments
    assert dumped is not None
    assert dumped[1] == "'***'"
    assert address.token not in log


DRIVER = """
import asyncio, json, sys
from pathlib import Path
from slime_sglang.ports import server_launch
from slime_sglang.server import Server

async def main():
    given = json.loads(sys.argv[1])
    launch = server_launch(python=given["python"], arguments=tuple(given["words"]), log=Path(given["log"]), env=given["env"])
    server = Server.launch(launch)
    await server.start()
    await server.ready(given["timeout"])
    print(server.pid, server.address.url, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.nightly
def test_a_driver_that_is_killed_leaves_nothing_of_its_server_behind(sglang_python, served_model, tmp_path):
    """Processes, port, shared memory and temporary files, after SIGKILL of the driver."""
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
