"""What the sandbox costs a candidate, over a bare fork of the same warm process: wall time of each, side by side.

    python tools/bench/bench_sandbox.py --rounds 200 --preload torch,triton

A round is one candidate of each kind, in turn, so that whatever else the machine does hits all of them alike. The bare
fork does what a plain fork server would: fork, one message in, one message out, exit code. Under `chrt -f 1` what else
the machine does delays no hand-over between processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec

from slime_sandbox import Limits, Policy, Sandbox

ENTRY = "slime_sandbox.probes:echo"
PAYLOAD = b"x" * 4096
BARE = """
import importlib, json, os, socket, sys
for name in filter(None, sys.argv[2].split(',')):
    importlib.import_module(name)
import gc
gc.collect(); gc.freeze()
sock = socket.socket(fileno=int(sys.argv[1]))
sock.send(b'ready')
while sock.recv(1):
    pid = os.fork()
    if not pid:
        sock.sendall(sock.recv(4096, socket.MSG_WAITALL))
        os._exit(0)
    os.waitpid(pid, 0)
    sock.send(b'.')
"""


class Bare:
    """A plain fork server, with the same imports and environment."""

    def __init__(self, preload: str) -> None:
        self.sock, theirs = socket.socketpair()
        words = [sys.executable, "-c", BARE, str(theirs.fileno()), preload]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, pass_fds=[theirs.fileno()], env=env)
        theirs.close()
        assert self.sock.recv(5) == b"ready"

    async def candidate(self) -> None:
        """One message in, one out."""
        self.sock.sendall(b"f" + PAYLOAD)
        assert len(self.sock.recv(len(PAYLOAD), socket.MSG_WAITALL)) == len(PAYLOAD)
        assert self.sock.recv(1) == b"."

    def close(self) -> None:
        """End it."""
        self.sock.close()
        self.process.wait()


async def measure(kinds: dict[str, Callable[[], Awaitable[None]]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every candidate, by kind."""
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for count in range(rounds + 5):
        for name, candidate in kinds.items():
            began = time.perf_counter()
            await candidate()
            if count >= 5:
                taken[name].append((time.perf_counter() - began) * 1e3)
    return taken


async def bench(rounds: int, preload: str, levels: list[str]) -> list[dict[str, object]]:
    """Rows of the table."""
    modules = tuple(name for name in preload.split(",") if name and find_spec(name))
    bare, boxes = Bare(",".join(modules)), {}
    for level in levels:
        policy = Policy(level=level, i_trust_this_code=True)  # type: ignore[arg-type]
        boxes[level] = await Sandbox.open(policy, preload=(*modules, "slime_sandbox.probes"))

    def of(box: Sandbox) -> Callable[[], Awaitable[None]]:
        async def candidate() -> None:
            outcome = await box.run(ENTRY, PAYLOAD, Limits(wall_seconds=30))
            assert outcome.result == PAYLOAD, outcome

        return candidate

    try:
        taken = await measure({"bare fork": bare.candidate} | {name: of(box) for name, box in boxes.items()}, rounds)
    finally:
        bare.close()
        for box in boxes.values():
            await box.aclose()
    base = statistics.median(taken["bare fork"])
    return [
        {
            "kind": name,
            "median ms": round(statistics.median(times), 2),
            "p90 ms": round(statistics.quantiles(times, n=10)[8], 2),
            "over a bare fork ms": round(statistics.median(times) - base, 2),
        }
        for name, times in taken.items()
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--preload", default="torch,triton")
    parser.add_argument("--levels", default="none,strong", help="comma-separated; medium as a plain user only")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = asyncio.run(bench(given.rounds, given.preload, given.levels.split(",")))
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{given.rounds} rounds, preloaded: {given.preload}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
