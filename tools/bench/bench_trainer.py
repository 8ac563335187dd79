"""One optimizer step of the FSDP trainer against plain transformers on a padded batch, and the products' own limit.

    python tools/bench/bench_trainer.py --threads 2
    python tools/bench/bench_trainer.py --threads 1 --clock cpu       # on a machine that is busy with other things

16 prompts of 13 tokens x 8 samples through a Qwen3-shaped model of 2.8M parameters (hidden 256, 4 layers), alternating
in one process. "plain" pads to the longest sample, takes the logits of all rows, and uses torch's fused AdamW: what a
training loop does that takes no particular care. Generation is not part of it; `bench_vs_trl.py` measures whole steps.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_vs_trl as whole
import numpy as np
import torch

from slime_core.config.schema import Config
from slime_core.plugins import load_plugins
from slime_core.threads import TorchThread
from slime_core.trainers.fsdp import FsdpTrainer
from slime_core.types import Batch
from slime_core.weights.folder import ModelFolder


def make_batch(responses: np.ndarray, vocab: int) -> Batch:
    """Random tokens; neighbours of one group share their prompt."""
    draw = np.random.default_rng(0)
    count, lengths = len(responses), responses + whole.PROMPT
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = draw.integers(3, vocab, offsets[-1]).astype(np.int32)
    for i in range(count):
        first = i // whole.ROLLOUTS * whole.ROLLOUTS
        tokens[offsets[i] : offsets[i] + whole.PROMPT] = tokens[offsets[first] : offsets[first] + whole.PROMPT]
    total = int(responses.sum())
    return Batch(
        version=0,
        sample_ids=[str(i) for i in range(count)],
        tasks=["default"] * count,
        group=np.arange(count) // whole.ROLLOUTS,
        rollout=np.arange(count),
        reward=np.zeros(count),
        tokens=tokens,
        offsets=offsets,
        loss_mask=np.ones(total, np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(responses)]).astype(np.int64),
        columns={"advantages": draw.normal(size=total).astype(np.float32)},
    )


class Plain:
    """A padded batch through transformers' model."""

    def __init__(self, folder: ModelFolder, batch: Batch, dtype: str) -> None:
        self.model: Any = folder.build_model("float32").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.dtype = getattr(torch, dtype)
        longest = int(batch.lengths.max())
        self.tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        self.mask = torch.zeros(len(batch), longest, dtype=torch.int64)
        self.advantages = torch.zeros(len(batch), longest)
        for i in range(len(batch)):
            length, count = int(batch.lengths[i]), int(batch.response_lengths[i])
            self.tokens[i, :length] = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].copy())
            self.mask[i, :length] = 1
            part = batch.columns["advantages"][batch.response_offsets[i] : batch.response_offsets[i + 1]]
            self.advantages[i, length - count : length] = torch.from_numpy(part) / count / len(batch)

    def step(self) -> None:
        """Forward, backward, clip, AdamW."""
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            logits = (
                self.model(input_ids=self.tokens, attention_mask=self.mask, use_cache=False).logits[:, :-1].float()
            )
        log_probs = logits.log_softmax(-1).gather(2, self.tokens[:, 1:, None])[..., 0]
        ratio = (log_probs - log_probs.detach()).exp()
        (-ratio * self.advantages[:, 1:]).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(case: str, args: argparse.Namespace, path: Path) -> None:
    """Print a row of the table: the best of each side's rounds."""
    side = whole.Side(
        case=case, dtype=args.dtype, steps=1, threads=args.threads, seed=0, trl_batch=128, max_tokens=args.max_tokens,
        slots=1, clock=whole.CLOCKS[args.clock],
    )  # fmt: skip
    folder, thread = ModelFolder.open(path), TorchThread(args.threads)
    batch = make_batch(np.array(whole.lengths(side)[0]), folder.vocab_size)
    train = {"dtype": args.dtype, "lr": 1e-5, "max_tokens_per_gpu": args.max_tokens}
    config = Config.model_validate({"rollout": {"hf_checkpoint": str(path)}, "train": train})
    trainer = FsdpTrainer(config, load_plugins(config), folder, thread=thread)
    thread.call(trainer._worker.begin, config)
    plain = Plain(folder, batch, args.dtype)
    clock = getattr(time, side.clock)

    def timed(call: Callable[..., Any], *values: Any) -> float:
        start = clock()
        call(*values)
        return float(clock() - start)

    ours, theirs, speed = [], [], 0.0
    for _ in range(args.rounds + 1):
        speed = max(speed, thread.call(whole.products, args.threads, args.dtype, side.clock))
        theirs.append(thread.call(timed, plain.step))
        ours.append(thread.call(timed, trainer._worker.step, batch))
    thread.close()
    weights = sum(p.numel() for p in plain.model.parameters() if p.ndim == 2)
    best, other, least = min(ours[1:]), min(theirs[1:]), 6 * weights * int(batch.lengths.sum()) / speed
    print(
        f"| {case} ({whole.CASES[case]}) | {args.dtype} | {other:.2f} | {best:.2f} | {other / best:.2f} | {least:.2f} "
        f"| {other / least:.2f} | {best / least:.2f} | {speed / 1e9:.0f} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens a micro-batch of slime")
    parser.add_argument("--clock", choices=whole.CLOCKS, default="wall", help="cpu: processor seconds")
    args = parser.parse_args()
    print(f"one optimizer step on 128 samples; {args.threads} threads; {args.clock} seconds, best of {args.rounds}\n")
    print(
        "| lengths | dtype | plain | slime | ratio | products alone | plain / products | slime / products | GFLOP/s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name:
        whole.make_model(Path(name) / "model")
        for case in whole.CASES:
            compare(case, args, Path(name) / "model")


if __name__ == "__main__":
    main()
