"""What a fresh process pays before its first kernel, alone and beside others: the bound of a judge that trusts none.

    python tools/bench/bench_cuda_start.py [--processes 16] [--at-once 1 4 16] [--set CUDA_DEVICE_MAX_CONNECTIONS=1]

Processes are forked from one that has imported torch, as the judge's are. Printed, in ms at the median: ``context``
(the driver and torch's own start), ``kernel`` (the first product of two tensors), ``room`` (1 GiB), ``end`` (from the
last line to when the process is gone), and processes a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import statistics
import time

import torch

NAMES = ("context", "kernel", "room", "end")


def child(pipe: int) -> None:
    """Start, compute, tell the times."""
    marks = [time.perf_counter()]

    def mark() -> None:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    one = torch.empty(1024, device="cuda")
    mark()
    one.mul_(one)
    mark()
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(0)
    mark()
    os.write(pipe, json.dumps(marks).encode())
    os._exit(0)


def run(processes: int, at_once: int) -> dict[str, float]:
    """So many, so many at once."""
    rows: list[list[float]] = []
    running: dict[int, int] = {}
    begun, started = time.perf_counter(), 0
    while len(rows) < processes:
        while started < processes and len(running) < at_once:
            reader, writer = os.pipe()
            if not (pid := os.fork()):
                child(writer)
            os.close(writer)
            running[reader] = pid
            started += 1
        for reader in select.select(list(running), [], [])[0]:
            marks = json.loads(os.read(reader, 4096))
            os.waitpid(running.pop(reader), 0)
            os.close(reader)
            marks.append(time.perf_counter())
            rows.append([1e3 * (after - before) for before, after in itertools.pairwise(marks)])
    took = time.perf_counter() - begun
    found = dict(zip(NAMES, (round(statistics.median(column), 1) for column in zip(*rows))))
    return found | {"a second": round(processes / took, 2)}


def main() -> None:
    """Print a line for each number at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="given")
    asked = parser.parse_args()
    os.environ.update(one.split("=", 1) for one in asked.given)
    for at_once in asked.at_once:
        print(f"{at_once} at once", *asked.given, json.dumps(run(asked.processes, at_once)), flush=True)


if __name__ == "__main__":
    main()
