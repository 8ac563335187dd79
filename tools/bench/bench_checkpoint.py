"""What a checkpoint costs a training step: seconds that training waits, and seconds until it is on disk.

    python tools/bench/bench_checkpoint.py                       # a Qwen3 of 0.6B from a seed, bfloat16, on a GPU
    python tools/bench/bench_checkpoint.py --model DIR           # the shape of DIR/config.json, random weights
    python tools/bench/bench_checkpoint.py --device cpu --small  # what runs without a GPU; it proves nothing

The real FSDP trainer takes optimizer steps on a batch of rollouts; nothing is generated, so a step of a whole run is
longer and a checkpoint's share smaller. "stall" is the time of the call that begins a checkpoint, and what the steps
took longer than the median step until it was published: waiting for the copy, and the writer's share of the machine.
"blocking" waits until the checkpoint is published.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1]))

from durability.memory_ledger import MemoryLedger
from slime_core.checkpoint import CheckpointMetadata, Checkpoints
from slime_core.config.schema import Config
from slime_core.plugins import load_plugins
from slime_core.testing.models import char_tokenizer
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import Batch
from slime_core.weights.folder import ModelFolder

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "small": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192},
}  # fmt: skip


def make_folder(path: Path, args: argparse.Namespace) -> ModelFolder:
    """A folder with a config and a tokenizer; its weights are drawn from a seed when the model is built."""
    from transformers import AutoConfig, Qwen3Config

    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(str(path))
    if args.model:
        config = AutoConfig.from_pretrained(args.model)
    else:
        shape = SHAPES["small" if args.small else "0.6B"]
        config = Qwen3Config(tie_word_embeddings=True, max_position_embeddings=32768, bos_token_id=None, **shape)
        config.architectures = ["Qwen3ForCausalLM"]
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.save_pretrained(str(path))
    return ModelFolder.open(path, init_weights="random")


def make_batch(args: argparse.Namespace, vocab: int) -> Batch:
    """Groups of 8 rollouts of one prompt, responses of half to all of ``--response`` tokens."""
    draw = np.random.default_rng(0)
    responses = draw.integers(args.response // 2, args.response + 1, args.samples)
    offsets = np.concatenate([[0], np.cumsum(responses + args.prompt)]).astype(np.int64)
    total = int(responses.sum())
    return Batch(
        version=0,
        sample_ids=[str(i) for i in range(args.samples)],
        tasks=["default"] * args.samples,
        group=np.arange(args.samples) // 8,
        rollout=np.arange(args.samples),
        reward=np.zeros(args.samples),
        tokens=draw.integers(3, vocab, offsets[-1]).astype(np.int32),
        offsets=offsets,
        loss_mask=np.ones(total, np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(responses)]).astype(np.int64),
        columns={
            "advantages": draw.normal(size=total).astype(np.float32),
            "rollout_log_probs": np.full(total, -12.0, np.float32),
        },
    )


@dataclass
class Measured:
    """Seconds; each list has a value a round."""

    steps: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)  # of the call that begins a checkpoint
    after: list[float] = field(default_factory=list)  # the first step after it
    stalls: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)  # from the call to the published folder
    blocking: list[float] = field(default_factory=list)
    prints: list[float] = field(default_factory=list)


async def seconds(work: Awaitable[Any]) -> float:
    """How long it took, the device's part of it too."""
    start = time.perf_counter()
    await work
    if torch.cuda.is_initialized():
        await asyncio.to_thread(torch.cuda.synchronize)
    return time.perf_counter() - start


async def measure(trainer: FsdpTrainer, config: Config, batch: Batch, folder: Path, rounds: int) -> Measured:
    """Steps alone, steps beside checkpoints, and checkpoints that are waited for."""
    found, ledger = Measured(), MemoryLedger()
    about = CheckpointMetadata(state={}, config={}, plugins="", machine={}, epoch=1)
    checkpoints = Checkpoints(folder, keep=1, note=print)
    print(
        f"the stage begins: {await seconds(trainer.begin(config)):.2f} s, the host memory of a save in it", flush=True
    )
    for number in range(3 + max(5, rounds)):
        took = await seconds(trainer.step(batch))
        found.steps += [took] if number >= 3 else []
    usual = statistics.median(found.steps)
    version = 0
    for _ in range(rounds):
        version += 1
        start = time.perf_counter()
        await checkpoints.begin(version, about, trainer, ledger)
        call = time.perf_counter() - start
        published: list[float] = []
        waiting = asyncio.create_task(checkpoints.wait())
        waiting.add_done_callback(lambda _, start=start, to=published: to.append(time.perf_counter() - start))  # type: ignore[misc]
        steps = [await seconds(trainer.step(batch))]
        while not waiting.done():
            steps.append(await seconds(trainer.step(batch)))
        await waiting
        found.calls.append(call)
        found.after.append(steps[0])
        found.stalls.append(call + sum(steps) - usual * len(steps))
        found.written.append(published[0])
        print(f"  begin {call * 1e3:.1f} ms, then steps of {' '.join(f'{s:.3f}' for s in steps)} s", flush=True)
    for _ in range(min(2, rounds)):
        version += 1
        start = time.perf_counter()
        await checkpoints.begin(version, about, trainer, ledger)
        await checkpoints.wait()
        found.blocking.append(time.perf_counter() - start)
    found.prints = [await seconds(trainer.fingerprint()) for _ in range(3)]
    return found


def show(found: Measured, folder: Path) -> None:
    """Print the table."""
    path = max(folder.glob("step-*"))
    size = sum(mark["size"] for mark in json.loads((path / "MANIFEST.json").read_text())["files"].values())
    middle = statistics.median
    step, stall, written = middle(found.steps), middle(found.stalls), middle(found.written)
    first = middle(found.calls) + middle(found.after) - step
    rows = {
        "a step": f"{step:.3f} s (from {min(found.steps):.3f} to {max(found.steps):.3f})",
        "bytes of a checkpoint": f"{size / 1e9:.2f} GB",
        "stall: the call": f"{middle(found.calls) * 1e3:.1f} ms",
        "stall: the call and the next step": f"{first * 1e3:.1f} ms, {first / step * 100:.2f}% of a step",
        "stall: all steps until it is published": f"{stall * 1e3:.1f} ms, {stall / step * 100:.2f}% of a step",
        "from the call to the published folder": f"{written:.2f} s, {size / 1e9 / written:.2f} GB/s",
        "blocking": f"{middle(found.blocking):.2f} s, {middle(found.blocking) / step * 100:.0f}% of a step",
        "a fingerprint": f"{min(found.prints) * 1e3:.1f} ms, {min(found.prints) / step * 100:.2f}% of a step",
    }
    print("\n| what | measured |\n| --- | --- |")
    for name, text in rows.items():
        print(f"| {name} | {text} |")


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder whose config.json gives the shape")
    parser.add_argument("--small", action="store_true", help="a few million parameters, short responses")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"], help="auto: small without a GPU")
    parser.add_argument("--dtype", default="", choices=["", "bfloat16", "float32"], help="of compute")
    parser.add_argument("--samples", type=int, default=0, help="0: 128, or 16 with --small")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=0, help="longest response; 0: 1024, or 64 with --small")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints")
    parser.add_argument("--threads", type=int, default=4, help="torch's on the CPU")
    parser.add_argument("--dir", default="", help="where checkpoints go; default: a temporary folder")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
        args.small |= args.device == "cpu"
    args.samples = args.samples or (16 if args.small else 128)
    args.response = args.response or (64 if args.small else 1024)
    dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    base = Path(tempfile.mkdtemp(prefix="slime-bench-", dir=args.dir or None))
    try:
        folder = make_folder(base / "model", args)
        train = {"dtype": dtype, "lr": 1e-6, "max_tokens_per_gpu": args.max_tokens}
        rollout = {"hf_checkpoint": str(folder.path), "init_weights": "random"}
        config = Config.model_validate({"rollout": rollout, "train": train})
        thread = TorchThread(args.threads)
        trainer = FsdpTrainer(config, load_plugins(config), folder, thread=thread, device=args.device)
        batch = make_batch(args, folder.vocab_size)
        weights = sum(p.numel() for p in trainer._worker.actor.parameters().values())
        name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        print(f"{name}, torch {torch.__version__}, {dtype}, {date.today()}: {weights / 1e6:.1f}M parameters, "
              f"{args.samples} samples, {int(batch.offsets[-1])} tokens a step", flush=True)  # fmt: skip
        show(asyncio.run(measure(trainer, config, batch, base / "checkpoints", args.rounds)), base / "checkpoints")
        thread.close()
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
