"""Workers that grade by a deadline, each a process that can be killed.

    ask -> a thread a worker -> packet -> worker (`worker.py`) -> packet -> Verdict
                                  late, or dead: the worker is killed and another is forked for the next answer

One answer is lost with a worker at most; an answer whose worker died is tried once more.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_rm_math.graders.verdict import GradingVerdict, unjudged, unparsable
from slime_rm_math.graders.worker import PACKET

START_SECONDS = 60.0  # to import math-verify, on a busy machine
ORDER_SECONDS = 10.0  # to end a worker and fork another
ANSWERS_A_WORKER = 5000  # then a fresh one takes its place
STARVED = 0.2  # share of the deadline: a worker that had less of a processor was not given its time
KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")


class Dead(Exception):
    """A worker ended before it answered."""


class NoWorkers(Exception):
    """Workers cannot be started; says why."""


@dataclass(slots=True)
class GraderSlot:
    """Where a worker sits: a number, its end of a socket, its process, and how many answers it has given."""

    number: int
    link: socket.socket | None = None
    process: int = 0
    answers: int = 0


class GraderPool:
    """A number of workers behind one parent process that has math-verify loaded.

    Example:
        with Pool(workers=2, seconds=1.5, memory_mb=512) as pool:
            pool.ask(r"\\frac{1}{2}", "0.5").result()      # Verdict(outcome="right")

    Args:
        workers: processes, and threads of this process that wait for them.
        seconds: for one answer.
        memory_mb: MiB of address space of a worker.
    """

    def __init__(self, *, workers: int, seconds: float, memory_mb: int) -> None:
        self.seconds = seconds
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="slime-grader")
        self._slots: queue.LifoQueue[GraderSlot] = queue.LifoQueue()
        self._order = threading.Lock()
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            self._parent = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "slime_rm_math.graders.worker",
                    str(child_end.fileno()),
                    str(memory_mb << 20),
                ],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in KEPT if name in os.environ} | {"PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        self._control = parent_end
        slots = [GraderSlot(number) for number in range(workers)]
        for slot in slots:
            self._slots.put(slot)
        self._ready = threading.Event()
        self._close = weakref.finalize(self, _close, parent_end, self._parent, self._threads, slots, os.getpid())

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        self._close()

    def start(self) -> None:
        """Wait until every worker is there; :meth:`ask` does it by itself where it must.

        Raises:
            NoWorkers: they cannot be started.
        """
        slots = [self._slots.get() for _ in range(self._threads._max_workers)]
        try:
            for slot in slots:
                self._sit(slot)
        finally:
            for slot in slots:
                self._slots.put(slot)

    def processes(self) -> list[int]:
        """The workers that have answered something and are not busy."""
        with self._slots.mutex:
            return [slot.process for slot in self._slots.queue if slot.process]

    def ask(self, gold: str, answer: str) -> Future[GradingVerdict]:
        """Whether ``answer`` is ``gold``; the future never raises."""
        return self._threads.submit(self._verdict, json.dumps({"gold": gold, "answer": answer}).encode())

    def form(self, text: str) -> Future[str]:
        """One text for all answers that equal ``text``, "" where no worker could tell; the future never raises."""
        return self._threads.submit(self._form, json.dumps({"text": text}).encode())

    def _verdict(self, question: bytes) -> GradingVerdict:
        verdict = self._ask(question)
        assert isinstance(verdict, GradingVerdict)
        return verdict

    def _form(self, question: bytes) -> str:
        form = self._ask(question)
        return form if isinstance(form, str) else ""

    def _ask(self, question: bytes) -> GradingVerdict | str:
        slot = self._slots.get()
        try:
            self._sit(slot)
            until = time.monotonic() + self.seconds
            for _ in range(2):
                with suppress(Dead):
                    return self._exchange(slot, question, until)
                self._stand(slot)
                self._sit(slot)
            return unparsable("the worker that read it ended, twice")
        except NoWorkers as error:
            return unjudged(f"no grading worker: {error}")
        except OSError as error:
            self._stand(slot)
            return unjudged(f"a grading worker cannot be reached: {error}")
        finally:
            self._slots.put(slot)

    def _exchange(self, slot: GraderSlot, question: bytes, until: float) -> GradingVerdict | str:
        link, label_read = slot.link, False
        assert link is not None
        started = processor_seconds(slot.process)
        try:
            link.send(question)
            while True:
                link.settimeout(max(until - time.monotonic(), 0.001))
                packet = link.recv(PACKET)
                if not packet:
                    raise Dead
                reply = json.loads(packet)
                slot.answers += "label" not in reply
                if "form" in reply:
                    return str(reply["form"])
                if "outcome" in reply:
                    return GradingVerdict(outcome=reply["outcome"], why=reply["why"])
                label_read = True
        except TimeoutError:
            used = processor_seconds(slot.process) - started
            self._stand(slot)
            return self._late(used, label_read)
        except (BrokenPipeError, ConnectionError):
            raise Dead from None

    def _late(self, used: float, label_read: bool) -> GradingVerdict:
        if used < STARVED * self.seconds:
            return unjudged(f"no verdict in {self.seconds:g} s, of which the worker had a processor for {used:.2f} s")
        if not label_read:
            return unjudged(f"the label alone took {self.seconds:g} s")
        return unparsable(f"no verdict in {self.seconds:g} s")

    def _sit(self, slot: GraderSlot) -> None:
        """Have a worker in the slot.

        Raises:
            NoWorkers: there is none to be had.
        """
        if slot.link is not None and slot.answers < ANSWERS_A_WORKER:
            return
        self._stand(slot, order=False)
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            try:
                slot.process = self._tell(slot.number, [child_end.fileno()])
            except BaseException:
                parent_end.close()
                raise
        slot.link, slot.answers = parent_end, 0

    def _stand(self, slot: GraderSlot, *, order: bool = True) -> None:
        """End the slot's worker; without ``order`` only forget it, since another is about to take the slot."""
        if slot.link is not None:
            slot.link.close()
        if order and slot.process:
            with suppress(NoWorkers):
                self._tell(slot.number, [])
        slot.link, slot.process = None, 0

    def _tell(self, number: int, sockets: list[int]) -> int:
        with self._order:
            try:
                if not self._ready.is_set():
                    self._control.settimeout(START_SECONDS)
                    self._read_message()
                    self._ready.set()
                self._control.settimeout(ORDER_SECONDS)
                socket.send_fds(self._control, [json.dumps({"slot": number}).encode()], sockets)
                return int(self._read_message()["process"])
            except OSError as error:
                raise NoWorkers(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error

    def _read_message(self) -> dict[str, Any]:
        packet = self._control.recv(PACKET)
        message: dict[str, Any] = json.loads(packet) if packet else {"error": "their parent process has ended"}
        if "error" in message:
            raise NoWorkers(str(message["error"]))
        return message


def _close(
    control: socket.socket,
    parent: subprocess.Popen[bytes],
    threads: ThreadPoolExecutor,
    slots: Sequence[GraderSlot],
    owner: int,
) -> None:
    if os.getpid() != owner:  # a fork of the process that started them
        return
    threads.shutdown(cancel_futures=True)
    for link in (control, *(slot.link for slot in slots if slot.link is not None)):
        link.close()
    try:
        parent.wait(2.0)
    except subprocess.TimeoutExpired:
        parent.kill()
        parent.wait()


def processor_seconds(process: int) -> float:
    """What a process has had of a processor; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
