"""Worker processes that make entries and score answers; one that is late or ends is replaced."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

START_SECONDS = 120.0  # to import reasoning_gym


class WorkerError(Exception):
    """A request without a result: the task raised, was late, or ended its process.

    ``by_answer``: a scorer raised, and does not for the task's own answer.
    """

    def __init__(self, text: str, *, by_answer: bool = False) -> None:
        super().__init__(text)
        self.by_answer = by_answer


class EntryWorker:
    """One process and the socket to it."""

    def __init__(self) -> None:
        parent_end, child_end = socket.socketpair()
        command = [sys.executable, "-m", "slime_reasoning_gym.worker", str(child_end.fileno()), str(os.getpid())]
        paths = os.pathsep.join(path for path in sys.path if path)
        env = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        with child_end:
            self.process = subprocess.Popen(
                command, pass_fds=[child_end.fileno()], stdin=subprocess.DEVNULL, env=env, start_new_session=True
            )
        self._socket, self._file = parent_end, parent_end.makefile("rwb")
        self.kill = weakref.finalize(self, _end, self.process, self._socket, self._file)
        self.loaded = False

    def load(self) -> None:
        """Wait until it has imported reasoning_gym.

        Raises:
            WorkerError: the import raised.
            OSError, EOFError: as :meth:`ask`.
        """
        try:
            self.ask({"do": "describe"}, START_SECONDS)
        except WorkerError as error:
            raise WorkerError(f"reasoning_gym does not load: {error}") from error
        self.loaded = True

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """The value of a request.

        Raises:
            WorkerError: the task raised.
            OSError, EOFError: it was late, or the process ended.
        """
        self._socket.settimeout(seconds)
        self._file.write(json.dumps(request).encode() + b"\n")
        self._file.flush()
        line = self._file.readline()
        if not line:
            raise EOFError
        response = json.loads(line)
        if "error" in response:
            raise WorkerError(response["error"], by_answer=response["by_answer"])
        return response["value"]


def _end(process: subprocess.Popen[bytes], *files: Any) -> None:
    process.kill()
    process.wait()
    for file in reversed(files):
        with suppress(OSError):  # what could not be sent
            file.close()


class Workers:
    """At most ``most`` workers, started when they are needed; for any thread.

    Example:
        workers.score("7", seconds=5.0, **address)
    """

    def __init__(self, most: int = 0) -> None:
        self._free = threading.Semaphore(most or max(1, min(8, os.cpu_count() or 1)))
        self._idle: list[EntryWorker] = []
        self._busy: list[EntryWorker] = []
        self._closings = 0
        self._lock = threading.Lock()  # of the three above
        self._description: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        """Tasks and system prompts, see `worker.Library.describe`."""
        self._description = self._description or self.ask("describe")
        return self._description

    def ask(self, do: str, *, seconds: float = START_SECONDS, **request: Any) -> Any:
        """The value of a request of `worker.Library`.

        Raises:
            WorkerError: the task raised, took longer than ``seconds``, or ended its process.
        """
        return self._ask([({"do": do, **request}, seconds)])

    def score(self, answer: str, seconds: float, **address: Any) -> float:
        """The score of an answer; ``seconds`` begin when its entry is made.

        Raises:
            WorkerError: as :meth:`ask`.
        """
        requests = [
            ({"do": "entry", **address}, START_SECONDS),
            ({"do": "score", "answer": answer, **address}, seconds),
        ]
        return float(self._ask(requests))

    def _ask(self, requests: list[tuple[dict[str, Any], float]]) -> Any:
        """The value of the last of the requests, which one worker gets."""
        closings = self._closings
        with self._free:
            worker = self._take(closings)
            seconds, intact = START_SECONDS, False
            try:
                if not worker.loaded:
                    worker.load()
                for request, seconds in requests:
                    value = worker.ask(request, seconds)
                intact = True
            except WorkerError:
                intact = worker.loaded
                raise
            except (OSError, EOFError) as error:
                late = isinstance(error, TimeoutError)
                raise WorkerError(f"no result in {seconds:g} s" if late else "its process ended") from None
            finally:
                self._put_back(worker, closings, intact)
            return value

    def close(self) -> None:
        """End the workers; requests that wait or that one works at fail, later ones start new workers."""
        with self._lock:
            self._closings += 1
            for worker in self._busy:
                worker.process.kill()
            while self._idle:
                self._idle.pop().kill()

    def _take(self, closings: int) -> EntryWorker:
        """An idle or new worker, now busy, for a request that came after ``closings`` calls of `close`."""
        with self._lock:
            if closings != self._closings:
                raise WorkerError("the workers were closed")
            worker = self._idle.pop() if self._idle else None
            if worker is not None and worker.process.poll() is not None:
                worker.kill()
                worker = None
            worker = worker or EntryWorker()
            self._busy.append(worker)
            return worker

    def _put_back(self, worker: EntryWorker, closings: int, intact: bool) -> None:
        with self._lock:
            self._busy.remove(worker)
            if intact and closings == self._closings:
                self._idle.append(worker)
                return
        worker.kill()
