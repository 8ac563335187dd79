"""A GRPO step of a small model on one GPU: seconds of `score` and `step`, launches, waits, and where the time goes.

    python tools/bench/bench_small_step.py                               # SmolLM2-135M's shape, 256 sequences of 100
    python tools/bench/bench_small_step.py --profile 25 --set max_tokens_per_gpu=32768
    python tools/bench/bench_small_step.py --smoke                       # a tiny model on a CPU: it proves nothing

Sequences are drawn from a seed around --length, --group of a prompt, a third of each its prompt. "plain" is what a
loop without a framework does: transformers' sdpa on rows padded to the longest, autocast, fused AdamW.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 1e5,
    "tie_word_embeddings": True,
}  # fmt: skip
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")


def make_folder(path: Path, smoke: bool) -> None:
    """A model of the shape with random weights, and the tokenizer of the tests' small models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from slime_core.testing.models import char_tokenizer, tiny_model

    if smoke:
        tiny_model(path, family="llama", tied=True)
        return
    torch.manual_seed(0)
    with torch.device("cuda"):
        LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(path)
    char_tokenizer().save_pretrained(str(path))


def make_batch(args: argparse.Namespace, group: int, vocab: int) -> Any:
    """Groups of sequences with a prompt of their own, responses of odd lengths."""
    from slime_core.types import Batch

    draw = np.random.default_rng(0)
    prompts = np.repeat(draw.integers(args.length // 4, args.length // 2, args.sequences // group), group)
    responses = draw.integers(args.length // 3, args.length, len(prompts))
    offsets = np.concatenate([[0], np.cumsum(prompts + responses)]).astype(np.int64)
    tokens = draw.integers(3, vocab, offsets[-1]).astype(np.int32)
    for i, (start, prompt) in enumerate(zip(offsets[:-1], prompts)):
        first = offsets[i // group * group]
        tokens[start : start + prompt] = tokens[first : first + prompt]
    total, count = int(responses.sum()), len(prompts)
    return Batch(
        version=0,
        stage="main",
        sample_ids=[str(i) for i in range(count)],
        tasks=["default"] * count,
        group=np.arange(count) // group,
        rollout=np.arange(count),
        reward=np.zeros(count),
        tokens=tokens,
        offsets=offsets,
        loss_mask=np.ones(total, np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(responses)]).astype(np.int64),
        columns={
            "advantages": draw.normal(size=total).astype(np.float32),
            "rollout_log_probs": np.full(total, -10.8, np.float32),
        },
        temperature=np.ones(count, np.float32),
    )


def make_trainer(folder: Path, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """A worker that has begun, the plugins and its [train] section."""
    from slime_core.clusters.machine import resolve_machine
    from slime_core.config.load import load_config
    from slime_core.plugins import load_plugins
    from slime_core.trainers.fsdp.worker import FsdpWorker
    from slime_core.weights.folder import ModelFolder

    words = ["--hf-checkpoint", str(folder), "--lr", "1e-6", "--save-interval", "0", *(f"train.{s}" for s in args.set)]
    words += [] if args.smoke else ["--device", "cuda", "--dtype", args.dtype]
    config = resolve_machine(load_config(None, words))
    plugins = load_plugins(config)
    worker = FsdpWorker(config, plugins, ModelFolder.open(folder), 0, 1, "cpu" if args.smoke else "cuda", None)
    worker.begin(config)
    return worker, plugins, config.train


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Print each round's seconds, and a last round's launches and kernels, for batches of each --group."""
    begun = time.perf_counter()
    worker, plugins, train = make_trainer(folder, args)
    needs = plugins.needs(train)
    print(f"built in {time.perf_counter() - begun:.1f} s, roles to score: {sorted(needs)}", flush=True)
    wait = (lambda: None) if args.smoke else torch.cuda.synchronize
    for group in args.group:
        batch = make_batch(args, group, worker.folder.vocab_size)
        packs = [len(m.tokens) for step in worker.packs(worker.partitioner().partition(batch)[0]) for m in step]
        print(f"\n{len(batch.tokens)} tokens of {len(batch)} sequences, {group} a prompt; micro-batches {packs}")

        def step(batch: Any = batch) -> dict[str, float]:
            if needs:
                worker.score(batch, needs)
            found: dict[str, float] = worker.step(batch)
            return found

        for number in range(args.rounds):
            wait()
            start = time.perf_counter()
            figures = step()
            wait()
            print(f"round {number}: {time.perf_counter() - start:.4f} s", flush=True)
        print({name: round(value, 6) for name, value in figures.items()})
        if args.profile:
            profile(args, step)
        if args.check:
            check(worker, batch)
    if not args.smoke:
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        start = time.perf_counter()
        for _ in range(3):
            worker.fingerprint()
            worker.publish(1)
        wait()
        print(f"fingerprint and publish: {(time.perf_counter() - start) / 3:.4f} s")


def check(worker: Any, batch: Any) -> None:
    """How far gradients by written-out layers are from those by the model's own."""
    from slime_core.trainers.optimizer_step import LossSums

    rank_batch, results = worker.partitioner().partition(batch)[0], []
    for worker.policy.fused in (True, False):
        sums = LossSums(rank_batch, worker.device)
        worker.run_backward(worker.packs(rank_batch)[0], sums)
        results.append({name: grad.clone() for name, grad in worker.actor.gradients().items()})
        print(f"fused {worker.policy.fused}: loss {sums.totals['loss']:.6f}, norm {worker.actor.norm():.6f}")
        worker.zero_grad()
    worker.policy.fused = True
    apart = {n: float((grad - results[1][n]).norm() / results[1][n].norm()) for n, grad in results[0].items()}
    print("gradients apart, the worst:", sorted(((round(d, 4), n) for n, d in apart.items()), reverse=True)[:4])


def profile(args: argparse.Namespace, step: Any) -> None:
    """Launches, waits, and the longest kernels and calls of a step."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([] if args.smoke else [ProfilerActivity.CUDA])]
    with torch.profiler.profile(activities=activities) as found:
        step()
        if not args.smoke:
            torch.cuda.synchronize()
    rows = found.key_averages()
    calls = {row.key: row.count for row in rows}
    busy = sum(row.self_device_time_total for row in rows if row.device_type.name == "CUDA") / 1e6
    print(f"launches {sum(calls.get(n, 0) for n in LAUNCHES)}, kernels busy {busy:.4f} s, waits", end=" ")
    print({name: calls[name] for name in (*WAITS, "aten::item", "cudaMemcpyAsync") if name in calls})
    for order in ("self_cpu_time_total", "self_device_time_total"):
        shown = [row for row in rows if getattr(row, order) > 0]
        for row in sorted(shown, key=lambda row: -getattr(row, order))[: args.profile]:
            print(f"  {order[5:8]} {getattr(row, order) / 1e3:9.2f} ms {row.count:6d} x {row.key[:90]}")


def plain(args: argparse.Namespace, folder: Path) -> None:
    """Seconds of the same step in a plain loop."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    batch = make_batch(args, args.group[0], model.config.vocab_size)
    rows = [torch.from_numpy(batch.tokens[a:b].astype(np.int64)) for a, b in zip(batch.offsets, batch.offsets[1:])]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).cuda()
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    for _ in range(args.rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for some, where in zip(tokens.split(32), mask.split(32)):
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(input_ids=some, attention_mask=where, use_cache=False).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), some[:, 1:].flatten(), reduction="none")
            (losses * where[:, 1:].flatten()).sum().div(len(batch.tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        print(f"plain: {time.perf_counter() - start:.4f} s", flush=True)


def main() -> None:
    """Print it all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--group", type=int, nargs="+", default=[8, 1], help="sequences of a prompt")
    parser.add_argument("--length", type=int, default=96, help="tokens of the longest response")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of [train]")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="profile a last round")
    parser.add_argument("--check", action="store_true", help="compare gradients with those by the model's own layers")
    parser.add_argument("--plain", action="store_true", help="the plain loop instead")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU: it proves nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name:
        folder = Path(name) / "model"
        make_folder(folder, args.smoke)
        (plain if args.plain else measure)(args, folder)


if __name__ == "__main__":
    main()
