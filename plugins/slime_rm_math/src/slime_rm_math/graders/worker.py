"""The processes that ask math-verify: `python -P -m slime_rm_math.graders.worker FD MEMORY`, a parent of forks.

    pool --FD--> parent of forks    {"slot": n} and a socket: end the slot's worker, fork one that serves the socket
    pool <-----> worker             {"gold", "answer"} -> {"label": true} once the label is read -> {"outcome", "why"}
                                    {"text"} -> {"form"}, one text for all that are equal (`forms.py`), "" for none

The parent imports math-verify once and never reads an answer. A worker has limits on memory, files and processes, and
an audit hook that refuses to open files for writing, sockets, programs and foreign functions. It imports nothing of
slime_core. Messages are JSON packets. Everything ends with the pool: at the end of the parent's socket.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import warnings
from collections import OrderedDict
from typing import Any, NoReturn

from slime_rm_math.graders.forms import of_expression

PACKET = 1 << 17  # bytes of the largest message
LONGEST_FORM = 1000  # characters; a longer form is told by its hash
LABELS = 256  # parsed labels that a worker keeps
SET_PDEATHSIG = 1
REFUSED = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.remove", "os.rename",
    "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.kill", "os.putenv",
    "subprocess.", "socket.", "shutil.", "ctypes.", "urllib.", "ftplib.", "http.", "smtplib.", "webbrowser.", "pty.",
    "tempfile.", "signal.", "sqlite3.", "mmap.", "resource.",
)  # fmt: skip
WARM = (
    ("1/2", "0.5"), (r"\frac{3}{4}", r"\frac{6}{8}"), ("(1,2)", "[1,2]"), (r"\{1,2\}", "2,1"),
    (r"\sqrt{8}", r"2\sqrt{2}"), ("x=5", "5"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"), (r"x^2+2x+1", "(x+1)^2"),
    (r"50\%", "0.5"), (r"\text{east}", "east"), ("2^{10}", "1024"),
    (r"(-\infty,1]\cup[2,\infty)", "x>2"), ("3.14", r"\pi"),
    (r"\sin(x)", r"\cos(x)"), ("5!", "120"), ("1 < x < 2", "(1,2)"), ("1,234", "1234"), (r"3\frac12", "3.5"),
)  # fmt: skip


class Mathematics:
    """math-verify with its clocks off, and labels that are read once."""

    def __init__(self) -> None:
        from math_verify import parse, verify

        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        self._parse, self._verify = parse, verify
        self._labels: OrderedDict[str, list[Any]] = OrderedDict()

    def label(self, gold: str) -> list[Any]:
        """A label's expressions."""
        if gold not in self._labels:
            self._labels[gold] = self.read(gold)
            if len(self._labels) > LABELS:
                self._labels.popitem(last=False)
        return self._labels[gold]

    def read(self, text: str) -> list[Any]:
        r"""math-verify's expressions of a text, as the content of ``\boxed{}``; the last is the text itself."""
        expressions: list[Any] = self._parse("\\boxed{" + text + "}", parsing_timeout=None)
        return expressions

    def form(self, text: str) -> str:
        """The text of the expression that math-verify reads; "" where it reads none."""
        expressions = self.read(text)
        form = of_expression(expressions[0]) if expressions and not isinstance(expressions[0], str) else ""
        return form if len(form) <= LONGEST_FORM else f"sha256 {hashlib.sha256(form.encode()).hexdigest()}"

    def outcome(self, gold: str, answer: str) -> dict[str, str]:
        """``right``, ``wrong`` or ``unparsable``, and why."""
        label, expressions = self.label(gold), self.read(answer)
        if not expressions:
            return {"outcome": "unparsable", "why": "math-verify reads nothing in it"}
        if self._verify(label, expressions, timeout_seconds=None):
            return {"outcome": "right", "why": ""}
        if all(isinstance(one, str) for one in expressions):
            return {"outcome": "unparsable", "why": "math-verify reads no mathematics in it"}
        return {"outcome": "wrong", "why": ""}


def main(descriptor: int, memory: int) -> None:
    """Import, tell the pool, fork workers until its socket ends."""
    control, parent = socket.socket(fileno=descriptor), os.getppid()
    try:
        mathematics = Mathematics()
        for gold, answer in WARM:
            mathematics.outcome(gold, answer)
            mathematics.form(gold)
    except Exception as error:
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    gc.collect()
    gc.freeze()  # forks share these pages
    control.send(b'{"ready": true}')
    slots: dict[int, int] = {}
    while os.getppid() == parent:
        if not select.select([control], [], [], 1.0)[0]:
            continue
        packet, sockets, _, _ = socket.recv_fds(control, PACKET, 1)
        if not packet:
            break
        slot = int(json.loads(packet)["slot"])
        _end(slots.pop(slot, 0))
        if sockets:
            slots[slot] = _fork(control, sockets[0], mathematics, memory)
        control.send(json.dumps({"slot": slot, "process": slots.get(slot, 0)}).encode())
    for process in slots.values():
        _end(process)


def _end(process: int) -> None:
    if process:
        os.kill(process, signal.SIGKILL)  # not reaped yet, so the number is still its own
        os.waitpid(process, 0)


def _fork(control: socket.socket, served: int, mathematics: Mathematics, memory: int) -> int:
    process = os.fork()
    if process:
        os.close(served)
        return process
    try:
        control.close()
        pool = socket.socket(fileno=served)
        _confine(memory)
        serve(pool, mathematics)
    finally:
        os._exit(1)


def _confine(memory: int) -> None:
    """Die with the parent; no more memory than ``memory`` bytes; nothing to write, to start or to connect to."""
    ctypes.CDLL(None, use_errno=True).prctl(SET_PDEATHSIG, signal.SIGKILL)
    limits = {"AS": memory, "FSIZE": 0, "CORE": 0, "NPROC": 0, "NOFILE": 64}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    sys.addaudithook(refuse)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook of workers.

    Raises:
        PermissionError: for everything that changes something outside of the process.
    """
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        if writes or (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            raise PermissionError(f"a grading worker opens nothing for writing: {arguments[0]!r}")
    elif event.startswith(REFUSED):
        raise PermissionError(f"a grading worker does not {event}")


def serve(pool: socket.socket, mathematics: Mathematics) -> None:
    """Answer questions until the pool goes away, or memory ran out."""
    while packet := pool.recv(PACKET):
        question = json.loads(packet)
        try:
            if "text" in question:
                reply = {"form": mathematics.form(question["text"])}
            else:
                mathematics.label(question["gold"])
                pool.send(b'{"label": true}')
                reply = mathematics.outcome(question["gold"], question["answer"])
        except MemoryError:
            pool.send(b'{"outcome": "unparsable", "why": "it takes more memory than a worker has"}')
            return
        except Exception as error:  # math-verify may raise anything; only the answer is hurt
            reply = {"outcome": "unparsable", "why": f"math-verify: {type(error).__name__}"}
        pool.send(json.dumps(reply).encode())


def _run() -> NoReturn:
    main(int(sys.argv[1]), int(sys.argv[2]))
    sys.exit(0)


if __name__ == "__main__":
    _run()
