"""A full-parameter policy step on one GPU: tokens a second and MFU of either backend, over a plain Hugging Face model.

    python tools/bench_policy_step.py --backend fsdp megatron plain --length 8192 --sequences 4
    python tools/bench_policy_step.py --backend megatron --length 16384 --set recompute_granularity=selective

The model has the shape of a preset of slime-models (default qwen3-4b); it is drawn from a seed and written once into
--folder. Each backend has a process of its own, one after the other. "plain" is transformers with sdpa, its layers
compiled, the loss in chunks of 2048 rows and fused AdamW in bfloat16: what a loop without a framework reaches.

MFU = (6 * parameters * tokens + 6 * layers * heads * head_dim * length^2 * sequences) / seconds / peak; the second
term is causal attention's, the peak is 989e12 (dense bfloat16 of an H100 or H200) unless --peak says otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROMPT = 64  # tokens in front of each response


def make_folder(path: Path, preset: str) -> None:
    """A model of the preset's shape in bfloat16, with the tokenizer of the tests' small models."""
    if (path / "config.json").is_file():
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    from slime_core.testing.models import char_tokenizer
    from slime_models.presets import presets

    config = AutoConfig.for_model(**vars(presets()[preset].config))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    char_tokenizer().save_pretrained(str(path))


def make_batch(length: int, sequences: int, vocab: int) -> Any:
    """Sequences of random tokens, every one of them ``length`` long."""
    from slime_core.types import Batch

    draw, responses = np.random.default_rng(0), length - PROMPT
    total = sequences * responses
    return Batch(
        version=0,
        stage="main",
        sample_ids=[str(i) for i in range(sequences)],
        tasks=["default"] * sequences,
        group=np.arange(sequences),
        rollout=np.arange(sequences),
        reward=np.zeros(sequences),
        tokens=draw.integers(3, vocab, sequences * length).astype(np.int32),
        offsets=np.arange(sequences + 1, dtype=np.int64) * length,
        loss_mask=np.ones(total, np.float32),
        response_offsets=np.arange(sequences + 1, dtype=np.int64) * responses,
        columns={
            "advantages": draw.normal(size=total).astype(np.float32),
            "rollout_log_probs": np.full(total, -11.0, np.float32),
        },
    )


def worker_step(args: argparse.Namespace) -> Any:
    """A call that makes one optimizer step of a backend, and the model's config."""
    from slime_core.clusters.machine import resolve_machine
    from slime_core.config.load import load_config
    from slime_core.plugins import load_plugins
    from slime_core.weights.folder import ModelFolder

    given = ["--plugin", "models", "--hf-checkpoint", str(args.folder), "--device", "cuda", "--dtype", "bfloat16"]
    given += ["--lr", "1e-6", "--max-tokens-per-gpu", str(args.length), "--train-backend", args.worker]
    if args.recompute:
        given.append("--gradient-checkpointing")
    given += [f"megatron.{one}" for one in args.set] if args.worker == "megatron" else []
    config = resolve_machine(load_config(None, given))
    folder, plugins = ModelFolder.open(args.folder), load_plugins(config)
    if args.worker == "megatron":
        from slime_core.trainers.megatron.worker import Worker
    else:
        from slime_core.trainers.fsdp.worker import Worker  # type: ignore[assignment]
    worker = Worker(config, plugins, folder, 0, 1, "cuda", None)
    worker.begin(config)
    batch = make_batch(args.length, args.sequences, folder.vocab_size)
    return lambda: worker.step(batch)


def plain_step(args: argparse.Namespace) -> Any:
    """The same of a plain loop: one sequence a pass, gradients added up."""
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16, device_map="cuda")
    model.train()
    if args.recompute:
        model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    vocab = int(model.config.vocab_size)
    tokens = torch.from_numpy(make_batch(args.length, args.sequences, vocab).tokens.astype(np.int64)).cuda()

    def chunk(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model.lm_head(hidden).float(), target, reduction="sum")

    def step() -> None:
        for row in tokens.view(args.sequences, args.length):
            hidden = model.model(input_ids=row[None], use_cache=False).last_hidden_state[0, PROMPT - 1 : -1]
            parts = zip(hidden.split(2048), row[PROMPT:].split(2048), strict=True)
            total = sum(torch.utils.checkpoint.checkpoint(chunk, *part, use_reentrant=False) for part in parts)
            (total / tokens.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(args: argparse.Namespace) -> None:
    """One backend in this process: a line of JSON."""
    step = plain_step(args) if args.worker == "plain" else worker_step(args)
    seconds = []
    for _ in range(args.warm_up + args.rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds[args.warm_up :], "memory": torch.cuda.max_memory_allocated() / 2**30}))


def work(folder: Path, length: int, sequences: int) -> float:
    """Floating-point operations of a step, recomputation not counted."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    from slime_core.weights.shards import Shards

    names = Shards.open(folder)
    parameters = sum(names[name].numel() for name in names)
    return float(6 * parameters * length * sequences + 6 * layers * heads * width * length**2 * sequences)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", nargs="+", choices=["fsdp", "megatron", "plain"], default=["fsdp", "megatron"])
    parser.add_argument("--preset", default="qwen3-4b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/policy-step-model"))
    parser.add_argument("--length", type=int, default=8192, help="tokens a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="a step")
    parser.add_argument("--recompute", action="store_true", help="keep layer inputs only")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of [megatron]")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--peak", type=float, default=989e12)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        measure(args)
        return
    make_folder(args.folder, args.preset)
    torch.cuda.empty_cache()
    operations, tokens = work(args.folder, args.length, args.sequences), args.length * args.sequences
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{args.preset}, {args.sequences} x {args.length} tokens, {machine}\n")
    print("| backend | seconds a step | tokens/s | MFU | GiB |\n| --- | --- | --- | --- | --- |", flush=True)
    for backend in args.backend:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", backend]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {backend} | failed | | | |\n\n{done.stderr[-2000:]}", flush=True)
            continue
        found = json.loads(done.stdout.strip().splitlines()[-1])
        best = min(found["seconds"])
        mfu = operations / best / args.peak
        print(f"| {backend} | {best:.3f} | {tokens / best:,.0f} | {mfu:.3f} | {found['memory']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
