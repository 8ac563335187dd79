"""What watching costs a run: steps a second of the demo, and processor time, with and without a watcher.

    python tools/bench/bench_watch.py                        # the terminal's view, then the live page
    python tools/bench/bench_watch.py --pairs 8 --seconds 30

One run of rm_math's demo trains in its supervised stage. Windows of time with a watcher and without one take turns in
it, a pair in the one order and the next in the other. The terminal's view is drawn on a terminal of 80 columns; the
page is read as a browser reads it, each update as soon as it comes. A watcher starts before its window, since one that
starts imports its libraries for a second. "processor" is the watcher's processor time by that which the machine has in
the window, all cores together: the most that it can take from a run. Other load changes it less than steps a second.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

SLIME = [sys.executable, "-m", "slime_cli.main"]
TICK = os.sysconf("SC_CLK_TCK")


def processor(pid: int) -> float:
    """Processor seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICK


@contextmanager
def drained(descriptor: int) -> Iterator[None]:
    """Read what a terminal gets, as a terminal does."""

    def read() -> None:
        try:
            while os.read(descriptor, 1 << 16):
                pass
        except OSError:
            return  # its other end is closed

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield
    thread.join()


@contextmanager
def terminal(run: Path) -> Iterator[int]:
    """The terminal's view on a terminal of 80 columns; its pid."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color")
        os.execv(SLIME[0], [*SLIME, "watch", str(run), "--terminal"])
    with drained(descriptor):
        time.sleep(6)
        try:
            yield pid
        finally:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)


@contextmanager
def page(run: Path) -> Iterator[int]:
    """The live page, read by one reader; its server's pid."""
    process = subprocess.Popen([*SLIME, "watch", str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url, _, token = process.stdout.readline().strip().partition("/?token=")

    def read() -> None:
        cursor = ""
        while process.poll() is None:
            request = urllib.request.Request(f"{url}/updates?after={cursor}")
            request.add_header("Authorization", f"Bearer {token}")
            try:
                with urllib.request.urlopen(request) as response:
                    cursor = json.load(response)["cursor"]
            except OSError:
                return  # it has ended

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    time.sleep(3)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()
        thread.join()


def window(run: Path, seconds: float, watcher: int | None = None) -> tuple[float, float]:
    """Steps a second of the run, and the watcher's processor time by the machine's."""
    steps, started, used = lines(run), time.monotonic(), processor(watcher) if watcher else 0.0
    time.sleep(seconds)
    elapsed, used = time.monotonic() - started, (processor(watcher) if watcher else 0.0) - used
    return (lines(run) - steps) / elapsed, used / elapsed / (os.cpu_count() or 1)


def lines(run: Path) -> int:
    """Steps that are reported."""
    return (run / "metrics.jsonl").read_bytes().count(b'"kind": "step"')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [*SLIME, "run", "--plugin", "rm_math", "--run-dir", str(run), "stage.warmup.num_rollout=100000"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not (run / "metrics.jsonl").exists() or lines(run) < 20:
                time.sleep(1)
                assert process.poll() is None, "the run has ended"
            for name, watching in (("terminal", terminal), ("page", page)):
                ratios, shares = [], []
                for pair in range(options.pairs):
                    alone = window(run, options.seconds) if pair % 2 else None
                    with watching(run) as pid:
                        watched, share = window(run, options.seconds, pid)
                    alone = alone or window(run, options.seconds)
                    ratios.append(watched / alone[0])
                    shares.append(share)
                    print(f"{name}: {watched:.3f} steps/s watched, {alone[0]:.3f} alone, processor {share:.2%}")
                print(
                    f"{name}: steps/s watched by alone {median(ratios):.3f}, processor {median(shares):.2%} (medians)"
                )
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
