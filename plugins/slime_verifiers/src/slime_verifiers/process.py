"""One process that runs environments: requests and replies as JSON lines, and how it ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from slime_core.errors import shortened

SERVE = Path(__file__).parent / "worker" / "serve.py"
LAST_WORDS = 4000  # characters of stderr that an error shows
TO_END = 10.0  # seconds that the supervisor has to end everything


class ProcessLost(Exception):
    """The process has ended, or wrote something other than replies; its requests have no answer."""


class EnvironmentProcess:
    """See the module.

    Raises:
        OSError: there is no such interpreter.

    Example:
        process = EnvironmentProcess("/env/bin/python", memory=0)
        process.ask(do="load", env={"taskset": {"id": "gsm8k"}})[1].result(60)["count"]
    """

    def __init__(self, python: str, memory: int) -> None:
        self.python = python
        self.failures = 0  # episodes that failed since the last that did not
        self.version = Future[dict[str, Any]]()  # what it says first
        self._waiting: dict[int, Future[dict[str, Any]]] = {0: self.version}
        self._number = 0
        self._lock = threading.Lock()
        self._stderr: deque[str] = deque(maxlen=60)
        self._lost = ""
        self._process = subprocess.Popen(
            [python, str(SERVE), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"},
        )
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # b"" closes stdin
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._listen, self._read_stderr)]
        for thread in (*self._readers, threading.Thread(target=self._write, daemon=True)):
            thread.start()

    @property
    def running(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    @property
    def lost(self) -> bool:
        """Whether it can be asked no more."""
        return bool(self._lost)

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    def ask(self, **request: Any) -> tuple[int, Future[dict[str, Any]]]:
        """Send a request: its number, and its reply or ProcessLost."""
        reply = Future[dict[str, Any]]()
        with self._lock:
            self._number += 1
            number = self._number
            self._waiting[number] = reply
            self._send({"id": number, **request})
            if self._lost:
                self._give_up()
        return number, reply

    def cancel(self, number: int) -> None:
        """Stop what a request has begun; its reply says so."""
        self._send({"id": number, "do": "cancel"})

    def close(self) -> None:
        """End it with everything that it has started; blocks until then."""
        self._lost = self._lost or "it was closed"
        self._requests.put(b"")
        for harder in (self._process.terminate, self._process.kill):  # it may read nothing, and so not see the end
            try:
                self._process.wait(TO_END)
                break
            except subprocess.TimeoutExpired:
                harder()
        self._process.wait()
        for reader in self._readers:
            reader.join(TO_END)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def last_words(self) -> str:
        """The end of its stderr."""
        return shortened("".join(self._stderr).strip(), LAST_WORDS)

    def _send(self, request: dict[str, Any]) -> None:
        """Leave a request to the writer: a process that hangs reads nothing, and nobody may wait for it."""
        self._requests.put(json.dumps(request).encode() + b"\n")

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as stdin:  # the reader sees its end
            while line := self._requests.get():
                stdin.write(line)
                stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        breach = ""
        with suppress(ValueError, OSError):
            for line in self._process.stdout:
                try:
                    reply = json.loads(line)
                    waiting = self._waiting.pop(reply["id"])
                except (ValueError, KeyError, TypeError):
                    breach = f"it wrote something other than a reply: {shortened(repr(line), 200)}"
                    break
                waiting.set_result(reply)
        if breach:
            self._process.terminate()
        code = self._process.wait()
        self._requests.put(b"")
        self._readers[1].join(TO_END)
        with self._lock:
            self._lost = self._lost or breach or f"it ended with {_ending(code)}"
            self._give_up()

    def _give_up(self) -> None:
        while self._waiting:
            _, reply = self._waiting.popitem()
            words = self.last_words()
            reply.set_exception(ProcessLost(self._lost + (f"; its last words:\n{words}" if words else "")))

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with suppress(ValueError, OSError):
            for line in self._process.stderr:
                self._stderr.append(line.decode(errors="replace"))


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
