"""How fast the ledger makes samples durable, and how large and how quick to open a big one is.

    python tools/bench/bench_ledger.py  # 8 writers, 20,000 samples of 8 KiB; a ledger of 10 M rows
    python tools/bench/bench_ledger.py --samples 2000 --rows 200000
    python tools/bench/bench_ledger.py --json > ledger.json

Everything is written below the current folder, on its file system, and removed. A sample has 1,024 tokens and as many
log-probs, 8 KiB. ``disk`` is a plain 8 KiB write and fsync, for comparison: no ledger can be faster than its disk.
``ms a sample`` is a writer's wait for a group's answer, divided by the samples of the group: of the eight that keep
the ledger busy, and of a lone one, which is what the ledger adds to a run that does not saturate it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from durability.large_ledger import fill_ledger
from slime_core.ledger.ledger import SqliteLedger
from slime_core.protocols import Ledger
from slime_core.types import Group, Prompt, Sample

TOKENS = 1024  # 4 bytes each, and 4 of each log-prob
CHUNK = 1_000_000


def make_groups(first: int, count: int, size: int) -> list[Group]:
    """``count`` finished groups of ``size`` samples."""
    rng = random.Random(first)
    groups = []
    for position in range(first, first + count):
        prompt = Prompt(id=f"main/{position}", position=position)
        samples = []
        for rollout in range(size):
            sample = Sample(id=f"{prompt.id}-{rollout}", rollout_id=position * size + rollout, reward=rng.random())
            tokens = [rng.randrange(32_000) for _ in range(TOKENS)]
            sample.append_response(tokens, log_probs=[-rng.randrange(1 << 20) / (1 << 20) for _ in tokens], version=3)
            samples.append(sample)
        groups.append(Group(prompt=prompt, samples=samples, rollouts={}))
    return groups


async def write(ledger: Ledger, groups: list[Group], writers: int) -> list[float]:
    """Finish every group, ``writers`` at a time; seconds that each call took."""
    waits: list[float] = []

    async def writer(mine: list[Group]) -> None:
        for group in mine:
            begun = time.perf_counter()
            await ledger.finish(group)
            waits.append(time.perf_counter() - begun)

    await ledger.issue(groups)
    await asyncio.gather(*(writer(groups[i::writers]) for i in range(writers)))
    return waits


async def append(folder: Path, samples: int, size: int, writers: int) -> dict[str, float]:
    """Samples a second and the wait of each."""
    groups = make_groups(0, samples // size, size)
    ledger = SqliteLedger(folder)
    begun = time.perf_counter()
    waits = await write(ledger, groups, writers)
    seconds = time.perf_counter() - begun
    await ledger.close()
    waits.sort()
    return {
        "samples_a_second": len(groups) * size / seconds,
        "ms_a_sample_median": statistics.median(waits) / size * 1e3,
        "ms_a_sample_p99": waits[int(len(waits) * 0.99)] / size * 1e3,
        "calls_a_commit": len(waits) / ledger.commits.committed,
        "payload_mib_a_second": len(groups) * size * TOKENS * 8 / seconds / (1 << 20),
    }


def plain_disk(folder: Path, count: int = 200) -> float:
    """Plain writes of 8 KiB with an fsync each, a second."""
    fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT, 0o600)
    data = os.urandom(8192)
    begun = time.perf_counter()
    for number in range(count):
        os.pwrite(fd, data, number * len(data))
        os.fsync(fd)
    seconds = time.perf_counter() - begun
    os.close(fd)
    return count / seconds


async def opened(folder: Path) -> float:
    """Seconds to open a ledger and to know its counts."""
    begun = time.perf_counter()
    ledger = SqliteLedger(folder)
    await ledger.counts()
    seconds = time.perf_counter() - begun
    await ledger.close()
    return seconds


def grow(folder: Path, rows: int) -> list[dict[str, float]]:
    """A ledger of up to ``rows`` rows: bytes a row and the time to open it, at each of ten sizes."""
    asyncio.run(opened(folder))
    path, found = folder / "ledger.sqlite", []
    step = max(rows // 10, 1)
    for size in range(step, step * 10 + 1, step):
        for begin in range(size - step, size, CHUNK):
            fill_ledger(path, min(CHUNK, size - begin))
        _forget_cache(path)
        found.append(
            {"rows": size, "bytes_a_row": path.stat().st_size / size, "open_ms": asyncio.run(opened(folder)) * 1e3}
        )
        sys.stderr.write(f"{size:,} rows\n")
    return found


def _forget_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [f"disk                {found['disk_syncs_a_second']:10,.0f} writes of 8 KiB and fsyncs a second"]
    if "append" in found:
        one = found["append"]
        lines += [
            f"ledger              {one['samples_a_second']:10,.0f} samples of 8 KiB a second, durable"
            f"  ({one['payload_mib_a_second']:.0f} MiB/s)",
            f"ms a sample         {one['ms_a_sample_median']:10.3f} median {one['ms_a_sample_p99']:10.3f} p99",
            f"with one writer     {found['alone']['ms_a_sample_median']:10.3f} median"
            f" {found['alone']['ms_a_sample_p99']:10.3f} p99",
            f"calls a commit      {one['calls_a_commit']:10.1f}",
        ]
    for one in found.get("large", ()):
        lines.append(
            f"{one['rows']:>14,.0f} rows {one['bytes_a_row']:10.1f} bytes a row {one['open_ms']:10.1f} ms to open"
        )
    return "\n".join(lines)


def main() -> int:
    """The command; 1 where a figure misses its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--group", type=int, default=8, help="samples a group")
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the large ledger; 0 leaves it out")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-ledger-", dir=Path.cwd()) as name:
        folder = Path(name)
        found: dict[str, Any] = {"disk_syncs_a_second": plain_disk(folder)}
        if asked.samples:
            found["append"] = asyncio.run(append(folder / "append", asked.samples, asked.group, asked.writers))
            found["alone"] = asyncio.run(append(folder / "alone", asked.samples // 10, asked.group, 1))
        if asked.rows:
            (folder / "large").mkdir()
            found["large"] = grow(folder / "large", asked.rows)
    append_ok = "append" not in found or (
        found["append"]["samples_a_second"] >= 2000 and found["alone"]["ms_a_sample_median"] < 1
    )
    large = found.get("large", ())
    found["reached"] = append_ok and all(one["bytes_a_row"] < 300 and one["open_ms"] < 1000 for one in large)
    print(json.dumps(found, indent=1) if asked.json else table(found))
    return 0 if found["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
