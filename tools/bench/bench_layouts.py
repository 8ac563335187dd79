"""What each rank holds and takes, by how FSDP ranks share weights, sequences and products.

    python tools/bench/bench_layouts.py --device cuda --ranks 4 --length 32768 \
        --layouts data context=4 tensor=4 tensor=2,context=2 shard=2
    python tools/bench/bench_layouts.py --ranks 2 --folder MODEL --length 2048        # on a CPU, over gloo

A layout is ``context=N,tensor=N,shard=N``; what is left out is 1, and shard all ranks; ``data`` is none of them.
Every rank is a process that makes ``--rounds`` optimizer steps of as many sequences as there are ranks, each of
``--length`` random tokens, a sequence a pack. "state" are the bytes of this rank's weights and moments; "peak" is the
device's, on a CPU what the process grew by from before its model to its largest; both of the rank that has most.
Without --folder the model has the shape of ``--preset``, of ``--layers`` layers, drawn from a seed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_policy_step import make_batch, make_folder

KEYS = {"context": "context_parallel_size", "tensor": "tensor_parallel_size", "shard": "fsdp_shard_size"}
DEFAULT = ("data", "context=2", "tensor=2", "shard=1")
COLUMNS = ("layout", "ranks", "tokens/s", "seconds a step", "state, GiB", "peak, GiB")


def sizes_of(layout: str) -> dict[str, int]:
    """Keys of [train] of a layout."""
    pairs = [part.split("=") for part in layout.split(",") if "=" in part]
    return {KEYS[name]: int(size) for name, size in pairs}


def measure(args: argparse.Namespace) -> None:
    """One rank in this process: a line of JSON."""
    from slime_core.config.load import load_config
    from slime_core.plugins import load_plugins
    from slime_core.trainers.fsdp.worker import FsdpWorker
    from slime_core.weights.folder import ModelFolder

    sizes = sizes_of(args.layout)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = ["--hf-checkpoint", str(args.folder), "--device", args.device, "--lr", "1e-6", "--save-interval", "0"]
    words += [
        "--actor-num-gpus-per-node",
        str(args.ranks),
        "--max-tokens-per-gpu",
        str(args.length // sizes.get(KEYS["context"], 1)),
    ]
    words += ["--gradient-checkpointing"] if args.recompute else []
    words += [f"train.{name}={size}" for name, size in sizes.items()]
    words += ["--dtype", "bfloat16" if args.device == "cuda" else "float32"]
    config = load_config(None, words)
    folder = ModelFolder.open(args.folder)
    worker = FsdpWorker(
        config, load_plugins(config), folder, args.rank, args.ranks, args.device, args.out / f"meet-{args.layout}"
    )
    worker.begin(config)
    batch = make_batch(args.length, args.ranks, folder.vocab_size)
    seconds = []
    for _ in range(1 + args.rounds):  # the first is slower
        worker.barrier()
        start = time.perf_counter()
        worker.step(batch)
        worker.barrier()
        seconds.append(time.perf_counter() - start)
    state = [*worker.actor.locals().values(), *worker.actor.states()]
    if args.device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    row = {"seconds": min(seconds[1:]), "state": sum(t.numel() * t.element_size() for t in state), "peak": peak}
    print(json.dumps(row), flush=True)


def run_layout(args: argparse.Namespace, layout: str) -> list[dict[str, Any]] | str:
    """What each rank measured, or why there is nothing."""
    command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(args.folder), "--out", str(args.out)]
    ranks = [
        subprocess.Popen(
            [*command, "--layout", layout, "--rank", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(args.ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=args.limit) for rank in ranks]
    except subprocess.TimeoutExpired:
        return f"cut off after {args.limit:.0f} s"
    finally:
        for rank in ranks:
            rank.kill()
    lines = [[line for line in out.splitlines() if line.startswith('{"seconds"')] for out, _ in outputs]
    if not all(lines):
        return next(error for (_, error), line in zip(outputs, lines) if not line)[-2000:]
    return [json.loads(line[-1]) for line in lines]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layouts", nargs="+", default=list(DEFAULT))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--folder", type=Path, default=None, help="of a model; without it one of the preset's shape")
    parser.add_argument("--preset", default="qwen3-4b")
    parser.add_argument("--layers", type=int, default=0, help="so many of the preset's; 0 is all")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=280.0, help="seconds a layout")
    for name, kind in (("--layout", str), ("--rank", int), ("--out", Path)):
        parser.add_argument(name, type=kind, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    args = parse()
    if args.layout is not None:
        measure(args)
        return
    args.out = Path(tempfile.mkdtemp())
    if args.folder is None:
        args.folder = args.out / "model"
        make_folder(args.folder, args.preset, args.layers, smoke=args.device == "cpu")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for layout in args.layouts:
        rows = run_layout(args, layout)
        if isinstance(rows, str):
            print(f"{layout}: {rows}")
            continue
        seconds = max(row["seconds"] for row in rows)
        state, peak = (max(row[name] for row in rows) / 2**30 for name in ("state", "peak"))
        speed = args.ranks * args.length / seconds
        print(f"| {layout} | {args.ranks} | {speed:,.0f} | {seconds:.2f} | {state:.2f} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
