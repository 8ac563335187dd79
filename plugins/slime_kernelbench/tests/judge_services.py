"""Services of the judge for tests, in this process with real workers or a process, and requests to them."""

import asyncio
import json
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import httpx
from click.testing import CliRunner

from slime_kernelbench.commands import kernelbench
from slime_kernelbench.problems import shipped
from slime_kernelbench.service.app import ServiceState, make_app
from slime_kernelbench.service.client import RemoteJudge
from slime_kernelbench.service.devices import Device
from slime_kernelbench.service.judge_service import JudgeService
from slime_kernelbench.service.pool import Pool, PoolLimits
from slime_kernelbench.service.process import JudgeWorker
from slime_service.serving import HttpServer

STAND_IN = Path(__file__).with_name("stand_in_worker.py")
TOKEN = "a-token-of-the-tests"
RELU = next(problem for problem in shipped() if problem.name == "relu")
ONE = (Device(name="cpu-0"),)
QUICK = {"first_rest": 0.02, "longest_rest": 0.1}


def judged(folder):
    """What the stand-ins were given, as (device, word), canaries left out."""
    lines = (folder / "judged").read_text().splitlines() if (folder / "judged").exists() else []
    return [tuple(line.split()) for line in lines if not line.endswith(" canary")]


def canaries(folder):
    return (folder / "judged").read_text().count(" canary\n")


@asynccontextmanager
async def service(folder, *, places=ONE, **limits):
    """URL, pool and state of a service in this process, with worker processes of their own."""
    command = (sys.executable, str(STAND_IN), str(folder))
    start = partial(JudgeWorker.start, options={}, command=command)
    async with Pool(places, start=start, limits=PoolLimits(**QUICK, **limits)) as pool:
        state = ServiceState()
        async with serving(make_app(JudgeService(pool), token=TOKEN, state=state)) as url:
            yield url, pool, state
    assert not [place.pid for place in pool.places if place.pid and Path(f"/proc/{place.pid}").exists()]


@asynccontextmanager
async def serving(app, **runs):
    up = asyncio.get_running_loop().create_future()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = {"closing": 60, "lifespan": "off", "log_level": "critical", **runs}
        server = HttpServer(app, listening, started=up.set_result, **words)
        task = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield await up
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def remote(url, **kwargs):
    judge = RemoteJudge(url, token=TOKEN, **{"pause": 0.01, **kwargs})
    try:
        yield judge
    finally:
        await judge.aclose()


def body(source="correct", key="k" * 16, **more):
    return {"key": key, "source": source, "problem": asdict(RELU), **more}


async def post(url, data, token=TOKEN, **headers):
    """Status, headers and JSON of a request that no client of ours would send."""
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"} | headers
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{url}/v1/judge", content=raw, headers=headers)
        return answer.status_code, answer.headers, answer.json()


class Server:
    """A service as a process of its own: what a command serves in a folder."""

    def __init__(self, folder, *command):
        self.process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        self.token = (folder / "token").read_text().strip()

    @classmethod
    def stand_in(cls, folder, *, workers=1, grace=30.0):
        """With workers that do what a candidate says."""
        return cls(folder, STAND_IN, "serve", folder, workers, grace)

    @classmethod
    def real(cls, folder, *words):
        """`slime kernelbench serve`."""
        return cls(folder, "-m", "slime_cli.main", "kernelbench", "serve", folder, *words)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def eval(self, path):
        return invoke("eval", path, "--url", self.url, "--json", SLIME_KERNELBENCH_TOKEN=self.token)


def invoke(*words, **env):
    """`slime kernelbench WORDS` in this process."""
    return CliRunner().invoke(kernelbench, [str(word) for word in words], env=env)
