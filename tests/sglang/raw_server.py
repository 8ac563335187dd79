"""A real SGLang server on this CPU, spoken to without any code of slime: what the facts of `test_facts.py` are about."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.engines.sglang.address import Address

STUBS = Path(__file__).with_name("stubs")
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(STUBS), "OMP_NUM_THREADS": "1"}
"""What a server on a CPU has in its environment; ours gets none of it."""
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
START_TIMEOUT = 240.0
"""Seconds: 24 on an idle machine with two cores, three to four times that beside other work."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def words(options: dict[str, Any] = OPTIONS) -> tuple[str, ...]:
    """Options as SGLang's command line has them."""
    return tuple(
        word
        for name, value in options.items()
        for word in ((f"--{name}",) if value is True else (f"--{name}", str(value)))
    )


@dataclass(slots=True)
class Answer:
    """What came back: the status, and the body as JSON or as text."""

    status: int
    body: Any


@dataclass(slots=True)
class RawServer:
    """A server that runs. ``pool`` makes calls in the background: `server.pool.submit(server.generate, ...)`."""

    address: Address
    model: Path
    log: Path
    process: subprocess.Popen[bytes]
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
        request = urllib.request.Request(self.address.url + path)
        token = self.address.token if token is None else token
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
        params = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True, **sampling}
        named = {"rid": rid} if rid else {}
        body = {"input_ids": list(tokens), "sampling_params": params, "return_logprob": True, **named}
        return self.ask("/generate", body)

    def begin(self, tokens: Sequence[int], count: int, *, rid: str) -> Future[Any]:
        """A request whose first token has come when this returns; the future has its last answer."""
        first: Future[None] = Future()
        done = self.pool.submit(self._stream, tokens, count, rid, first)
        done.add_done_callback(lambda _: first.done() or first.set_result(None))
        first.result(60)
        return done

    def _stream(self, tokens: Sequence[int], count: int, rid: str, first: Future[None]) -> Any:
        params = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True}
        body = {
            "input_ids": list(tokens),
            "sampling_params": params,
            "return_logprob": True,
            "rid": rid,
            "stream": True,
        }
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

    def processes(self) -> list[int]:
        """The server's process and those that it started, those of its session that live."""
        return [pid for pid, session, state in sessions() if session == self.process.pid and state != "Z"]

    def settle(self) -> None:
        """Nothing is paused and nothing runs, as a test found it."""
        self.ask("/continue_generation", {})
        self.ask("/abort_request", {"rid": "", "abort_all": True})

    def stop(self) -> None:
        """End all its processes."""
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(30)
        self.pool.shutdown(wait=False, cancel_futures=True)


def sessions() -> Iterator[tuple[int, int, str]]:
    """Every process of this machine: pid, session, state."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            yield int(entry.name), int(fields[3]), fields[0]


@contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else gets meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def start(python: str, model: Path, log: Path, *more: str, token: str = "facts-token") -> RawServer:
    """Start a server and wait until it serves."""
    with held_port() as port:
        pass
    address = Address(url=f"http://127.0.0.1:{port}", token=token)
    command = [
        python,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
        "--port",
        str(port),
        "--api-key",
        token,
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *words(), *more],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server = RawServer(address, model, log, process)

    def up() -> bool:
        assert process.poll() is None, f"the server ended:\n{log.read_text(errors='replace')[-3000:]}"
        try:
            return server.call("/health", timeout=5).status == 200
        except OSError:
            return False

    try:
        server.until(up, "the server serves", START_TIMEOUT)
    except BaseException:
        server.stop()
        raise
    return server
