"""A watchdog process beside a run, which can end it while a hook holds the interpreter, or the event loop.

driver    beats, running hooks -> memory of `slime_core.heartbeat`   -> watchdog
          signals, by Python's C handler, which needs no interpreter -> watchdog
watchdog  requests a thread's stack (`STACK`), which faulthandler writes without the interpreter
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import slime_cli
import slime_core
from slime_core.heartbeat import HEARTBEAT, INTERVAL, HeartbeatMemory

PROGRAM = Path(__file__).with_name("watchdog.py")
STACK = signal.SIGRTMIN + 11
"""Has the thread that gets it write its stack to the watchdog."""


@contextmanager
def watched(run_dir: Path, hang_timeout: float) -> Iterator[None]:
    """Have a process look whether this one's interpreter and event loop run, in this block of the main thread."""
    with ExitStack() as stack:
        memory = os.memfd_create("slime-heartbeat")
        signals, signalled = os.pipe()
        stacks, written = os.pipe()
        for descriptor in (memory, signals, stacks, written):
            stack.callback(os.close, descriptor)
        os.set_blocking(signalled, False)
        order = {
            "pid": os.getpid(),
            "memory": memory,
            "signals": signals,
            "stacks": stacks,
            "signal": int(STACK),
            "hang_timeout": hang_timeout,
            "run_dir": str(run_dir),
            "path": [str(Path(str(package.__file__)).parents[1]) for package in (slime_core, slime_cli)],
        }
        process = _process(order, (memory, signals, stacks))
        stack.callback(_end, signalled, process)
        if process is None:
            yield  # no room for another process: the run runs without it
            return
        faulthandler.register(STACK, written, all_threads=False)
        stack.callback(faulthandler.unregister, STACK)
        stack.enter_context(_beating(HeartbeatMemory(memory)))
        with suppress(ValueError):  # not the main thread
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(signalled, warn_on_full_buffer=False))
        yield


def _process(order: dict[str, object], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(order)]
    with suppress(OSError):
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True
        )
    return None


def _end(signalled: int, process: subprocess.Popen[bytes] | None) -> None:
    os.close(signalled)  # which it takes for the end
    if process is not None:
        process.wait()


@contextmanager
def _beating(memory: HeartbeatMemory) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(INTERVAL):
            HEARTBEAT.beat()

    thread = threading.Thread(target=beat, name="slime-heartbeat", daemon=True)
    HEARTBEAT.start(memory)
    thread.start()
    try:
        yield
    finally:
        HEARTBEAT.stop()
        over.set()
        thread.join()
