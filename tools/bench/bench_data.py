"""How fast prompts come from a file of rows, and that memory does not grow with it.

    python tools/bench/bench_data.py                          # 200,000 rows in order and shuffled
    python tools/bench/bench_data.py --gigabytes 10           # and a file of 10 GB: opened, read from, resumed
    python tools/bench/bench_data.py --model DIR --json       # with a model's own tokenizer

A row has a question of about 200 characters, a label and metadata. ``in_order/s`` is of one process: lines found, JSON
read strictly, keys checked, the order worked out, prompts made. Encoding is measured apart (``encoded/s``), as it is
the tokenizer's own speed. The target is 20,000 rows a second in order, and constant memory; a line at the end for each
says whether it is met, by the clock and by processor time, which counts where the machine does other things. Files are
written below the current folder, and removed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.config.schema import Config
from slime_core.context import Context
from slime_core.data.opening import open_source
from slime_core.data.source import DataSource
from slime_core.testing.models import char_tokenizer

BLOCK_ROWS = 20_000
WARM = 1000
RATE = 20_000  # rows a second, in order
FLAT_MIB = 96  # line index (32), row and file buffers, the allocator's own; whatever the file's size


class Silent:
    """Encodes nothing: what is left is the data source."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """One token."""
        return [0]


class NoPlugins:
    """Rows come from the file."""

    def prompts(self, task: Any, ctx: Any) -> None:
        """None."""

    def messages(self, messages: Any, tools: Any, prompt: Any, ctx: Any) -> tuple[Any, Any]:
        """As they are."""
        return messages, tools

    def takes_replies(self, task: str, config: Config) -> bool:
        """No: every task generates."""
        return False

    def replaces_rollout(self, task: str, config: Config) -> bool:
        """No: the core generates."""
        return False

    generates_itself = replaces_rollout


def block(first: int = 0) -> bytes:
    """20,000 rows of about 330 bytes."""
    rows = (
        {
            "input": f"Question {first + i}: what is {i} plus {7 * i}? " + "Explain it step by step. " * 6,
            "label": str(8 * i),
            "metadata": {"level": i % 5, "source": "made up"},
        }
        for i in range(BLOCK_ROWS)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_file(path: Path, size: int) -> int:
    """Blocks until ``size`` bytes are there; the answer is the number of rows."""
    data = block()
    with path.open("wb", buffering=0) as file:
        count = max(1, -(-size // len(data)))
        for _ in range(count):
            file.write(data)
    return count * BLOCK_ROWS


def source(path: Path, tokenizer: Any, *, shuffle: bool = False) -> DataSource:
    """The source of a run over a file."""
    config = Config(data={"prompt_data": str(path), "label_key": "label", "rollout_shuffle": shuffle})  # type: ignore[arg-type]
    return open_source(config, NoPlugins(), tokenizer, Context(config=config))  # type: ignore[arg-type]


def peak_mib() -> float:
    """Most memory that this process held so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rates(name: str, found: DataSource, count: int) -> dict[str, float]:
    """Prompts a second, and a second of this process's own time: what a machine gives that does other things too."""
    found.next(WARM)
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(count // 100):
        found.next(100)
    seconds, own = time.perf_counter() - start, time.process_time() - busy
    return {f"{name}/s": round(count / seconds), f"{name}/cpu_s": round(count / own)}


def measure(path: Path, rows: int, count: int, tokenizer: Any) -> dict[str, float]:
    """Figures of one file."""
    figures: dict[str, float] = {"rows": rows, "bytes": path.stat().st_size, "peak_mib/before": round(peak_mib(), 1)}
    start = time.perf_counter()
    found = source(path, Silent())
    figures["open_seconds"] = round(time.perf_counter() - start, 2)
    figures |= rates("in_order", found, count)
    saved = found.state()
    start = time.perf_counter()
    again = source(path, Silent())
    again.restore(saved)
    figures["resume_seconds"] = round(time.perf_counter() - start, 2)
    if [p.where for p in again.next(100)] != [p.where for p in found.next(100)]:
        raise SystemExit("a resumed source gave other rows")
    del found, again
    figures |= rates("shuffled", source(path, Silent(), shuffle=True), count // 2)
    if tokenizer is not None:
        figures |= rates("encoded", source(path, tokenizer), count // 4)
    figures["peak_mib/after"] = round(peak_mib(), 1)
    return figures


def targets(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What has to be reached, and whether it is: rates by the clock and by processor time, memory as it grew."""
    lines = []
    for name, figures in found.items():
        rates = [
            f"{figures[key]:,} {how}: {'met' if figures[key] >= RATE else 'NOT met'}"
            for key, how in (("in_order/s", "by the clock"), ("in_order/cpu_s", "by processor time"))
        ]
        grown = figures["peak_mib/after"] - figures["peak_mib/before"]
        size = f"{name} file, {figures['bytes'] / 1e9:.3g} GB"
        lines.append(f"target: at least {RATE:,} rows/s in order ({size}): {'; '.join(rates)}")
        flat = "met" if grown <= FLAT_MIB else "NOT met"
        lines.append(f"target: memory grows by {FLAT_MIB} MiB at most ({size}): {grown:.0f} MiB: {flat}")
    return [*lines, f"load {os.getloadavg()[0]:.3g} on {os.cpu_count()} processors"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="rows that are read in order")
    parser.add_argument("--gigabytes", type=float, default=0.0, help="size of a second, large file")
    parser.add_argument("--model", help="model folder whose tokenizer encodes; default: one of characters")
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    tokenizer: Any = char_tokenizer()
    if args.model:
        from slime_core.weights.folder import ModelFolder

        tokenizer = ModelFolder.open(args.model, init_weights="random").tokenizer()
    found = {}
    folder = Path(tempfile.mkdtemp(prefix="bench-data-", dir="."))
    try:
        for name, size in (("small", 1), ("large", int(args.gigabytes * 1e9))):
            if size:
                path = folder / f"{name}.jsonl"
                found[name] = measure(path, write_file(path, size), args.rows, tokenizer if name == "small" else None)
                path.unlink()
    finally:
        shutil.rmtree(folder)
    if args.json:
        json.dump(found, sys.stdout, indent=1)
        return
    for name, figures in found.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key:<18} {value:>16,}")
    print("\n".join(targets(found)))


if __name__ == "__main__":
    main()
