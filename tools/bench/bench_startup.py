"""Time `slime --help` and `slime plugins list`, each in fresh processes, beside a bare interpreter.

    python tools/bench/bench_startup.py --runs 20

Medians of wall time; exit code 1 where one is over its target. The first, cold call is left out.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

TARGETS = {("--help",): 150.0, ("plugins", "list"): 250.0}  # milliseconds


def milliseconds(command: list[str], runs: int) -> float:
    """Median wall time of ``runs`` calls after one that warms the file cache."""
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[1:])


def main() -> int:
    """Print the table; the answer is the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    slime = str(Path(sys.executable).with_name("slime"))
    print("| command | median ms | target ms |")
    print("| --- | --- | --- |")
    print(f"| `python -c pass` | {milliseconds([sys.executable, '-c', 'pass'], runs):.0f} | |")
    late = False
    for words, target in TARGETS.items():
        found = milliseconds([slime, *words], runs)
        late |= found > target
        print(f"| `slime {' '.join(words)}` | {found:.0f} | {target:.0f} |", flush=True)
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
