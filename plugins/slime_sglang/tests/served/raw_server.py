"""A real SGLang server on this CPU, started by slime and spoken to over plain HTTP: what `test_facts.py` is about."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from server_case import seen

from slime_sglang import held_ports as ports
from slime_sglang.host import Launch
from slime_sglang.installation import environment_of
from slime_sglang.server import Server

T = TypeVar("T")
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= environment_of({}, "cpu")
"""What a server on a CPU has in its environment; ours gets none of it."""
FORKED = str(Path(__file__).with_name("forked_server"))
FORKING = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((ENVIRONMENT["PYTHONPATH"], FORKED))}
"""The same, and a plugin of SGLang that forks a server's processes."""
OPTIONS = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "disable-overlap-schedule": True,
    "dtype": "float32",
    "mem-fraction-static": 0.2,
    "max-total-tokens": 20000,
    "skip-server-warmup": True,
    "sleep-on-idle": True,
}
"""SGLang's own options that make it serve on a CPU; the last one lets the other worker of the suite have the cores."""
START_TIMEOUT = 280.0
"""Seconds: 24 on an idle machine with two cores, three to four times that beside other work."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def words(model: Path, *more: str) -> tuple[str, ...]:
    """SGLang's command line for a model."""
    found = ["--model-path", str(model)]
    for name, value in OPTIONS.items():
        found += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return (*found, *more)


class Loop:
    """An event loop in a thread of its own, where servers are watched between the tests; a context manager."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout: float = START_TIMEOUT) -> T:
        """Run a coroutine there and wait for what it returns."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise


@dataclass(slots=True)
class Answer:
    """What came back: the status, and the body as JSON or as text."""

    status: int
    body: Any


@dataclass(slots=True)
class RawServer:
    """A server that runs. ``pool`` makes calls in the background: `server.pool.submit(server.generate, ...)`."""

    server: Server
    model: Path
    loop: Loop
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def call(self, path: str, body: object = None, *, token: str | None = None, timeout: float = 60.0) -> Answer:
        """GET without a body, else POST."""
        try:
            with DIRECT.open(self._request(path, body, token), timeout=timeout) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read()
        try:
            return Answer(status, json.loads(raw))
        except ValueError:
            return Answer(status, raw.decode(errors="replace"))

    def _request(self, path: str, body: object = None, token: str | None = None) -> urllib.request.Request:
        request = urllib.request.Request(self.server.address.url + path)
        token = self.server.address.token if token is None else token
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        return request

    def ask(self, path: str, body: object = None, timeout: float = 60.0) -> Any:
        """The same, which must succeed."""
        answer = self.call(path, body, timeout=timeout)
        assert answer.status == 200, answer
        return answer.body

    def generate(self, tokens: Sequence[int], count: int, *, rid: str | None = None, **sampling: Any) -> Any:
        """``count`` tokens, whatever they are, with log-probs."""
        return self.ask("/generate", body_of(tokens, count, rid, **sampling))

    def begin(self, tokens: Sequence[int], count: int, *, rid: str) -> Future[Any]:
        """A request whose first token has come when this returns; the future has its last answer."""
        first: Future[None] = Future()
        done = self.pool.submit(self._stream, {**body_of(tokens, count, rid), "stream": True}, first)
        done.add_done_callback(lambda _: first.done() or first.set_result(None))
        first.result(60)
        return done

    def _stream(self, body: object, first: Future[None]) -> Any:
        last = None
        with DIRECT.open(self._request("/generate", body), timeout=60) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    last = json.loads(line[6:])
                    first.done() or first.set_result(None)
        return last

    @staticmethod
    def until(true: Any, what: str, seconds: float = 60.0) -> None:
        """Poll until ``true()``; fails where it does not become so."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"{seconds} s, and not: {what}"
            time.sleep(0.01)

    def processes(self) -> dict[int, str]:
        """Its processes that live, and what they call themselves; the first is the launcher."""
        names = {pid: title(pid) for pid in ports.members(self.server.pid)}
        return {pid: name for pid, name in names.items() if name}

    def scheduler(self) -> int:
        """The process that computes."""
        (found,) = [pid for pid, name in self.processes().items() if name.startswith("sglang::scheduler")]
        return found

    def settle(self) -> None:
        """Nothing is paused and nothing runs, as a test found it."""
        self.ask("/continue_generation", {})
        self.ask("/abort_request", {"rid": "", "abort_all": True})

    def stop(self) -> None:
        """End all its processes."""
        self.loop.run(self.server.stop())
        self.pool.shutdown(wait=False, cancel_futures=True)


def start(loop: Loop, launch: Launch, model: Path) -> RawServer:
    """Start a server and wait until it serves."""

    async def up() -> Server:
        server = Server.launch(launch)
        try:
            await server.start()
            await server.ready(START_TIMEOUT)
        except BaseException:
            await server.stop()
            raise
        return server

    return RawServer(loop.run(up(), START_TIMEOUT + 20), model, loop)


def body_of(tokens: Sequence[int], count: int, rid: str | None, **sampling: Any) -> dict[str, Any]:
    """A request for ``count`` tokens, whatever they are, with log-probs."""
    params = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True, **sampling}
    named = {"rid": rid} if rid else {}
    return {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, **named}


def title(pid: int) -> str:
    """What a process calls itself; nothing where it is gone."""
    return seen(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def temporary(session: int) -> str:
    """The folder for temporary files of a server's session."""
    (server,) = [pid for pid in ports.members(session) if seen(f"/proc/{pid}/cmdline").endswith("serve\0")]
    return seen(f"/proc/{server}/environ").split("\0TMPDIR=")[1].split("\0")[0]


def shared(folder: str) -> list[str]:
    """Files of shared memory that the launcher knows as the server's."""
    return seen(f"{folder}/shared-memory").splitlines()
