"""A training step of adapters over one of the whole model: seconds, memory, and the seconds of a weight update.

    python tools/bench/bench_lora.py --model /tmp/smollm2/model --length 512 --sequences 4      # on a CPU
    python tools/bench/bench_lora.py --device cuda --preset qwen3-4b --length 8192 --sequences 4
    python tools/bench/bench_lora.py --device cuda --layers 18 --length 1024 --sequences 8 --tokens 8192   # 80 GB
    python tools/bench/bench_lora.py --device cuda --length 8192 --peak     # what lies in memory when it is fullest
    python tools/bench/bench_lora.py --device cuda --rank 8 32 128 --set train.lora_target_modules=q_proj,v_proj

Each way has a process of its own, one after the other. On a CPU seconds are those of the process on its one thread,
which other processes do not lengthen; on a GPU they are wall time. "update" merges all weights with adapters where the
embedded engine reads them (`publish`); of the whole model, whose storage the engine shares, it is next to nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import memory_peak
import torch
from bench_policy_step import make_batch, make_folder
from sglang_place import scratch

HEADER = "| trained | parameters | seconds a step | of full | update, s | GiB |\n| --- | --- | --- | --- | --- | --- |"


def worker_of(args: argparse.Namespace) -> Any:
    """A worker in its stage, of the whole model or with adapters of ``args.worker``, a rank."""
    from slime_core.clusters.machine import resolve_machine
    from slime_core.config.load import load_config
    from slime_core.plugins import load_plugins
    from slime_core.trainers.fsdp.worker import FsdpWorker
    from slime_core.weights.folder import ModelFolder

    given = ["--hf-checkpoint", str(args.model), "--device", args.device, "--lr", "1e-5", "--save-interval", "0"]
    given += ["--max-tokens-per-gpu", str(args.tokens or args.length)]
    given += ["--dtype", "bfloat16" if args.device == "cuda" else "float32"]
    given += [f"train.lora_rank={args.worker}"] if args.worker else []
    given += ["--gradient-checkpointing"] if args.recompute else []
    config = resolve_machine(load_config(None, [*given, *(args.set if args.worker else ())]))
    worker = FsdpWorker(config, load_plugins(config), ModelFolder.open(args.model), 0, 1, args.device, None)
    worker.begin(config)
    return worker


def measure(args: argparse.Namespace) -> None:
    """One way in this process, as a line of JSON."""
    torch.set_num_threads(1)
    worker = worker_of(args)
    batch = make_batch(args.length, args.sequences, min(worker.folder.vocab_size, 40_000))
    clock = time.process_time if args.device == "cpu" else time.perf_counter

    def seconds(call: Any) -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        start = clock()
        call()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    steps = [seconds(lambda: worker.step(batch)) for _ in range(args.warm_up + args.rounds)][args.warm_up :]
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else resident()
    if args.peak:
        with memory_peak.recorded() as lines:
            worker.step(batch)
        print(*lines, sep="\n", file=sys.stderr)
    updates = [seconds(lambda: worker.publish(1)) for _ in range(3)]
    count = sum(p.numel() for name, p in worker.actor.parameters().items() if name not in worker.policy.frozen())
    row = {"seconds": min(steps), "update": min(updates), "memory": peak, "parameters": count}
    print(json.dumps(row | {"fused": worker.policy.fused}), flush=True)


def resident() -> float:
    """GiB of this process at its peak."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="a model folder; else one of the preset's shape is drawn")
    parser.add_argument("--preset", default="qwen3-4b")
    parser.add_argument("--layers", type=int, default=0, help="so many of the preset's alone, where all have no room")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, nargs="+", default=[32])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=0, help="of a micro-batch; 0 is the length")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--peak", action="store_true", help="of a GPU: which lines hold its memory at the peak")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="more of the config, of adapters alone")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model is None:
        args.model = Path(scratch(20 << 30) or tempfile.gettempdir()) / f"bench-lora-{args.preset}-{args.layers}"
        make_folder(args.model, args.preset, args.layers)
    if args.worker is not None:
        return measure(args)
    rows: dict[int, Any] = {}
    for rank in (0, *args.rank):
        command = [sys.executable, *sys.argv, "--worker", str(rank), "--model", str(args.model)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows[rank] = json.loads(done.stdout.splitlines()[-1])
    print(HEADER)
    for rank, row in rows.items():
        name = f"rank {rank}" if rank else "all"
        ratio = row["seconds"] / rows[0]["seconds"]
        fused = "" if row["fused"] else ", not fused"
        print(
            f"| {name}{fused} | {row['parameters'] / 1e6:.1f} M | {row['seconds']:.3f} | {ratio:.2f} | "
            f"{row['update']:.3f} | {row['memory']:.2f} |"
        )


if __name__ == "__main__":
    main()
