"""An update of adapters alone, from the FSDP trainer to the embedded engine of its process: seconds by part.

    python tools/bench/bench_adapter_sync.py --model /tmp/smollm2/model                  # on a CPU
    python tools/bench/bench_adapter_sync.py --device cuda --preset qwen3-4b --rank 32   # the target is 0.02 s

"publish" gathers the adapters and sums them, "load" copies them into what the engine multiplies, "compare" sums what
it then serves. The first update, which brings the base too, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_policy_step import make_folder
from sglang_place import scratch

HEADER = "| rank | adapters | tensors | MB | publish, ms | load, ms | compare, ms | all, ms |\n" + "| --- " * 8 + "|"


async def measure(args: argparse.Namespace) -> str:
    """A row of the table."""
    from slime_core.clusters.embedded import embedded_engine
    from slime_core.clusters.machine import resolve_machine
    from slime_core.config.load import load_config
    from slime_core.plugins import load_plugins
    from slime_core.threads import TorchThread
    from slime_core.trainers.fsdp import FsdpTrainer
    from slime_core.weights.folder import ModelFolder
    from slime_core.weights.update import sync_weights

    names = [f"adapter-{number}" for number in range(args.adapters)] if args.adapters > 1 else []
    flags = ["--hf-checkpoint", str(args.model), "--device", args.device, "--lora-rank", str(args.rank)]
    flags += ["--dtype", "bfloat16" if args.device == "cuda" else "float32", "train.lora_sync=adapter"]
    flags += [f"train.lora_adapters={names}"] if names else []
    config = resolve_machine(load_config(None, flags))
    thread, folder = TorchThread(1), ModelFolder.open(args.model)
    trainer = FsdpTrainer(config, load_plugins(config), folder, thread=thread, device=args.device)
    await trainer.begin(config)
    async with embedded_engine(config, folder, thread) as engine:
        await sync_weights(trainer, engine, 0)
        rows = []
        for version in range(1, args.rounds + 2):
            times = [await _now(thread, args.device)]
            update = await trainer.publish(version, await engine.route("all"))
            times.append(await _now(thread, args.device))
            await engine.load(update)
            times.append(await _now(thread, args.device))
            served = await engine.fingerprints(tuple(update.adapters))
            times.append(await _now(thread, args.device))
            assert served == update.fingerprints, "the engine does not serve what was published"
            rows.append([1000 * (end - begin) for begin, end in pairwise(times)])
        tensors = [tensor for adapter in update.adapters.values() for tensor in adapter.tensors.values()]
    thread.close()
    parts = [statistics.median(column) for column in zip(*rows[1:])]
    size = sum(tensor.nbytes for tensor in tensors) / 1e6
    times_text = " | ".join(f"{part:.1f}" for part in (*parts, sum(parts)))
    return f"| {args.rank} | {args.adapters} | {len(tensors)} | {size:.0f} | {times_text} |"


async def _now(thread: Any, device: str) -> float:
    """Seconds, when what was launched is done."""
    if device == "cuda":
        await thread.run(torch.cuda.synchronize)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder")
    parser.add_argument("--preset", default="qwen3-4b", help="shape of a random model, where there is no --model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    if args.model is None:
        args.model = Path(scratch(20 << 30) or tempfile.gettempdir()) / f"bench-adapters-{args.preset}"
        make_folder(args.model, args.preset)
    print(HEADER, asyncio.run(measure(args)), sep="\n")


if __name__ == "__main__":
    main()
