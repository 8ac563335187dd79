"""One GRPO step of slime against one of TRL's GRPOTrainer: same model, data, samples, precision and threads.

    python tools/bench/bench_vs_trl.py                            # uniform and long-tail lengths, float32
    python tools/bench/bench_vs_trl.py --case tail --rounds 2 --dtype bfloat16

Both run whole, in processes of their own that alternate in one run: slime as `slime run` with a plugin that this file
writes, TRL as GRPOTrainer with transformers' generate. A step is the wall time from the end of one optimizer step to
the end of the next: prompts, generation, reward, advantages, loss, backward, AdamW, and for slime the ledger, the
metrics and the weights' way to its engine. The first step of each process is left out.

How long each response is does not depend on model, prompt or framework: sample i of step s has length L[s][i], drawn
here. TRL's generate gets a logits processor that forbids the end token before L and forces it at L; slime's plugin
asks its engine for L tokens with the end token ignored. Both train on all L tokens.

On a machine that is busy with other things, `--threads 1 --clock cpu` counts processor seconds in place of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GROUPS, ROLLOUTS, PROMPT = 16, 8, 13  # prompts a step, samples a prompt, tokens a prompt
CLOCKS = {"wall": "monotonic", "cpu": "process_time"}
CASES = {"uniform": "48 tokens each", "tail": "geometric, mean 60, at most 512"}
PLUGIN = """
import asyncio, dataclasses, json, os, time
from slime_core import hookimpl

TABLE = json.loads(os.environ["BENCH_LENGTHS"])
STAMPS = os.environ["BENCH_STAMPS"]

@hookimpl
async def slime_generate(group, ctx):
    lengths = TABLE[group.prompt.position // {groups}]
    first = group.prompt.position % {groups} * {rollouts}
    await asyncio.gather(*(
        ctx.generate(s, dataclasses.replace(ctx.sampling, max_new_tokens=lengths[first + i], ignore_eos=True))
        for i, s in enumerate(group.samples)
    ))
    return group

@hookimpl
def slime_reward(group, ctx):
    return [score(s.response) for s in group.samples]

def score(text):
    return sum(c.isdigit() for c in text) / max(len(text), 1)

@hookimpl
def slime_step_done(report, ctx):
    with open(STAMPS, "a") as file:
        print(getattr(time, os.environ["BENCH_CLOCK"])(), json.dumps(report.seconds), file=file)
"""


@dataclass(slots=True, frozen=True)
class Side:
    """What one process is asked to do."""

    case: str
    dtype: str
    steps: int
    threads: int
    seed: int
    trl_batch: int  # samples a forward pass of TRL
    max_tokens: int  # of a micro-batch of slime
    slots: int  # sequences that slime's engine decodes at once
    clock: str  # of the module time


def lengths(side: Side) -> list[list[int]]:
    """Response tokens of every sample of every step."""
    import numpy as np

    count = GROUPS * ROLLOUTS
    if side.case == "uniform":
        return [[48] * count for _ in range(side.steps)]
    draws = [np.random.default_rng([side.seed, step]).geometric(1 / 60, count) for step in range(side.steps)]
    return [np.minimum(row, 512).tolist() for row in draws]


def make_model(path: Path) -> int:
    """Write the model folder; the answer is the number of weights in products, per token."""
    import transformers

    from slime_core.testing.models import char_tokenizer
    from slime_core.weights.folder import ModelFolder

    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(str(path))
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=640, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(str(path))
    model: Any = ModelFolder.open(path, init_weights="random").build_model(seed=1)
    model.save_pretrained(str(path))
    return sum(p.numel() for p in model.parameters() if p.ndim == 2)


def prompts(side: Side) -> list[str]:
    """Texts of 13 characters, one token each."""
    return [f"{1000 + i:04d}+{7919 * i % 10000:04d} = ?"[:PROMPT] for i in range(GROUPS * side.steps)]


def run_slime(side: Side, folder: Path) -> list[float]:
    """`slime run` as a process; seconds of its steps but the first."""
    site, data, stamps = folder / "site", folder / "prompts.jsonl", folder / "stamps"
    (site / "bench_lengths-1.dist-info").mkdir(parents=True, exist_ok=True)
    (site / "bench_lengths_plugin.py").write_text(PLUGIN.format(groups=GROUPS, rollouts=ROLLOUTS))
    (site / "bench_lengths-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: bench-lengths\nVersion: 1\n"
    )
    entry = "[slime.plugins]\nbench_lengths = bench_lengths_plugin\n"
    (site / "bench_lengths-1.dist-info" / "entry_points.txt").write_text(entry)
    data.write_text("".join(json.dumps({"input": text}) + "\n" for text in prompts(side)))
    stamps.unlink(missing_ok=True)
    longest = max(map(max, lengths(side)))
    flags = {
        "plugin": "bench_lengths", "hf-checkpoint": folder / "model", "prompt-data": data, "num-rollout": side.steps,
        "rollout-batch-size": GROUPS, "n-samples-per-prompt": ROLLOUTS, "rollout-max-response-len": longest,
        "rollout-max-context-len": PROMPT + longest, "rollout-slots": side.slots, "lr": "1e-5", "dtype": side.dtype,
        "device": "cpu", "cpu-threads": side.threads, "max-tokens-per-gpu": side.max_tokens, "seed": side.seed,
    }  # fmt: skip
    words = [str(word) for key, value in flags.items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "slime_cli.main", "run", *words, "--skip-eval-before-train", "--no-export-final"]
    env = {
        "BENCH_LENGTHS": json.dumps(lengths(side)),
        "BENCH_STAMPS": str(stamps),
        "BENCH_CLOCK": side.clock,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
    }
    _process(command, folder, side, env)
    rows = [line.split(" ", 1) for line in stamps.read_text().splitlines()]
    if len(rows) != side.steps:
        raise SystemExit(f"slime made {len(rows)} steps of {side.steps}")
    parts = [json.loads(row[1]) for row in rows[1:]]
    shown = {name: round(statistics.median(p[name] for p in parts), 3) for name in parts[0]}
    print(f"    slime by part: {shown}", file=sys.stderr)
    times = [float(row[0]) for row in rows]
    return [b - a for a, b in pairwise(times)]


def run_trl(side: Side, folder: Path) -> list[float]:
    """This file as a process that runs TRL; seconds of its steps but the first."""
    command = [sys.executable, str(Path(__file__).resolve()), "--trl-child", json.dumps(asdict(side)), str(folder)]
    out = _process(command, folder, side, {})
    times = [float(word) for word in out.splitlines()[-1].split()]
    return [b - a for a, b in pairwise(times)]


def _process(command: list[str], folder: Path, side: Side, env: dict[str, str]) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": str(side.threads), "TOKENIZERS_PARALLELISM": "false", **env}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command[:6])} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def trl_child(side: Side, folder: Path) -> None:
    """Train with TRL and print the time at the end of each step."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(side.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    dtype = getattr(torch, side.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    table = lengths(side)
    _force_lengths(model, table, tokenizer.eos_token_id)
    count = GROUPS * ROLLOUTS
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=dtype == torch.bfloat16, max_steps=side.steps,
        per_device_train_batch_size=side.trl_batch, gradient_accumulation_steps=count // side.trl_batch,
        num_generations=ROLLOUTS, max_completion_length=max(map(max, table)), learning_rate=1e-5,
        lr_scheduler_type="constant", beta=0.0, loss_type="grpo", temperature=1.0, gradient_checkpointing=False,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1000, shuffle_dataset=False,
        seed=side.seed, adam_beta2=0.98, max_grad_norm=1.0, use_vllm=False,
    )  # fmt: skip
    stamps: list[float] = []

    class Stamp(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            stamps.append(getattr(time, side.clock)())

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

    trainer = GRPOTrainer(
        model=model, args=config, reward_funcs=reward, processing_class=tokenizer, callbacks=[Stamp()],
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts(side)]),
    )  # fmt: skip
    trainer.train()
    print(*stamps)


def _force_lengths(model: Any, table: list[list[int]], eos: int) -> None:
    """Let generate end row i of its s-th call after exactly table[s][i] tokens."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Budget(LogitsProcessor):
        def __init__(self, row: list[int], prompt: int) -> None:
            self.last, self.prompt = torch.tensor(row) - 1, prompt

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            ends = self.last <= input_ids.shape[1] - self.prompt
            scores[:, eos] = -torch.inf
            scores[ends] = -torch.inf
            scores[ends, eos] = 0.0
            return scores

    generate, calls = model.generate, iter(table)

    def budgeted(input_ids: Any = None, **kwargs: Any) -> Any:
        row = next(calls)
        out = generate(
            input_ids=input_ids, logits_processor=LogitsProcessorList([Budget(row, input_ids.shape[1])]), **kwargs
        )
        made = (out[:, input_ids.shape[1] :] == eos).int().argmax(1) + 1
        if made.tolist() != row:
            raise SystemExit("TRL did not generate the lengths that were asked for")
        return out

    model.generate = budgeted


def products(threads: int, dtype: str, clock: str) -> float:
    """FLOP/s of the model's largest matrix products: forward, by the input, by the weight."""
    import torch

    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    x, w, y = (torch.randn(shape).to(kind) for shape in ((3904, 256), (768, 256), (3904, 768)))
    calls = [lambda: torch.mm(x, w.T), lambda: torch.mm(y, w), lambda: torch.mm(y.T, x)]
    best = 0.0
    for _ in range(30):
        start = getattr(time, clock)()
        for call in calls:
            call()
        best = max(best, len(calls) * 2 * 3904 * 256 * 768 / (getattr(time, clock)() - start))
    return best


def limit(side: Side, weights: int, speed: float) -> float:
    """Seconds that a step's matrix products alone need: 2 FLOP a weight and token generated or read, 6 trained."""
    rows = lengths(side)[1:]
    response = statistics.mean(map(sum, rows))
    prompt = PROMPT * GROUPS * ROLLOUTS
    return weights * (2 * (response + prompt) + 6 * (response + prompt)) / speed


def compare(case: str, args: argparse.Namespace) -> None:
    """Alternate both, and print a row of the table."""
    side = Side(
        case=case, dtype=args.dtype, steps=args.steps, threads=args.threads, seed=args.seed,
        trl_batch=args.trl_batch, max_tokens=args.max_tokens, slots=args.slots,
        clock=CLOCKS[args.clock],
    )  # fmt: skip
    times: dict[str, list[float]] = {"slime": [], "trl": []}
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name:
        folder = Path(name)
        weights = make_model(folder / "model")
        speeds = [products(args.threads, args.dtype, side.clock)]
        for round_ in range(args.rounds):
            for which, run in (("trl", run_trl), ("slime", run_slime)):
                found = run(side, folder)
                times[which] += found
                print(f"    round {round_} {which}: {' '.join(f'{t:.2f}' for t in found)} s", file=sys.stderr)
                speeds.append(products(args.threads, args.dtype, side.clock))
    least = limit(side, weights, max(speeds))
    slime, trl = (statistics.median(times[which]) for which in ("slime", "trl"))
    print(
        f"| {case} ({CASES[case]}) | {args.dtype} | {trl:.2f} | {slime:.2f} | {trl / slime:.2f} | {least:.2f} "
        f"| {trl / least:.2f} | {slime / least:.2f} | {max(speeds) / 1e9:.0f} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", choices=[*CASES, "both"], default="both")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each, in turns")
    parser.add_argument("--steps", type=int, default=5, help="steps of each process, the first left out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trl-batch", type=int, default=128, help="samples a forward pass of TRL")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens a micro-batch of slime")
    parser.add_argument("--slots", type=int, default=128, help="sequences that slime's engine decodes at once")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor seconds, on a busy machine")
    parser.add_argument("--trl-child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_child:
        trl_child(Side(**json.loads(args.trl_child[0])), Path(args.trl_child[1]))
        return
    print(
        f"{GROUPS} prompts of {PROMPT} tokens x {ROLLOUTS} samples, one optimizer step; {args.threads} threads; "
        f"{args.clock} seconds\n"
    )
    print("| lengths | dtype | TRL | slime | ratio | products alone | TRL / products | slime / products | GFLOP/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for case in CASES if args.case == "both" else [args.case]:
        compare(case, args)


if __name__ == "__main__":
    main()
