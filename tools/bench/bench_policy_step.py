"""A full-parameter policy step on one GPU: tokens a second and MFU of either backend, over a plain Hugging Face model.

    python tools/bench/bench_policy_step.py --backend fsdp megatron plain --length 8192 --sequences 4
    python tools/bench/bench_policy_step.py --backend megatron --length 16384 --set recompute_granularity=selective
    python tools/bench/bench_policy_step.py --preset qwen3-30b-a3b --layers 12 --sequences 128 \
        --backend megatron --set optimizer_cpu_offload=true
    python tools/bench/bench_policy_step.py --smoke            # what a CPU can: a tiny model, fsdp and plain
    python tools/bench/bench_policy_step.py --backend fsdp plain --length 65536 --sequences 1 --recompute \
        --offload state activations --rounds 2 --warm-up 1 --limit 280      # one long sequence in 80 GiB

The model has the shape of a preset of slime-models (default qwen3-4b); it is drawn from a seed and written once into
--folder. Each backend has a process of its own, one after the other. "plain" is transformers with sdpa, its layers
compiled, the loss in chunks of 2048 rows and fused AdamW in bfloat16: what a loop without a framework reaches.
A backend that fails, or takes longer than --limit, is a row that says so, and the next one follows; one that runs out
of memory is tried once more with a few of its layers recomputed, then with more. GiB are those of the device at its
peak, and of the host as far as its free memory fell from the start of the backend's process.

MFU = operations by `slime_core.weights.flops` (6 * parameters * tokens and causal attention's) / seconds / peak; the
peak is 989e12 (dense bfloat16 of an H100 or H200) unless --peak says otherwise.
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
from sglang_place import scratch

PROMPT = 64  # tokens in front of each response
FEW = (4, 9, 0)  # layers that are recomputed where memory runs out, one after the other; 0 is all
OFFLOADS = {"state": "--fsdp-cpu-offload", "activations": "--activation-offload"}
HEADER = "| backend | seconds a step | tokens/s | MFU | GiB | GiB of the host |\n| --- | --- | --- | --- | --- | --- |"
TAIL = 2500  # characters of what a backend that failed said last


def make_folder(path: Path, preset: str, layers: int = 0, *, smoke: bool = False) -> None:
    """A model of the preset's shape, or of some of its layers, in bfloat16, with the tests' tokenizer; made once."""
    if (path / "tokenizer.json").is_file():  # written last
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    from slime_core.testing.models import char_tokenizer, tiny_model
    from slime_models.presets import presets

    if smoke:
        tiny_model(path, tied=True, context_len=4096)
        return

    values = vars(presets()[preset].config)
    config = AutoConfig.for_model(**values | ({"num_hidden_layers": layers} if layers else {}))
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

    given = ["--plugin", "models", "--hf-checkpoint", str(args.folder), "--train-backend", args.worker]
    given += [] if args.smoke else ["--device", "cuda", "--dtype", "bfloat16"]
    given += ["--lr", "1e-6", "--max-tokens-per-gpu", str(args.length)]
    given += ["--save-interval", "0"]  # a run that saves locks as much host memory as its state has
    if args.recompute is not None:
        given += ["--gradient-checkpointing", "--gradient-checkpointing-layers", str(args.recompute)]
    given += [one if one.startswith("train.") else f"megatron.{one}" for one in args.set]
    given += [OFFLOADS[one] for one in args.offload] if args.worker == "fsdp" else []
    config = resolve_machine(load_config(None, given))
    folder, plugins = ModelFolder.open(args.folder), load_plugins(config)
    if args.worker == "megatron":
        from slime_megatron.worker import MegatronWorker as Worker
    else:
        from slime_core.trainers.fsdp.worker import FsdpWorker as Worker  # type: ignore[assignment]
    worker = Worker(config, plugins, folder, 0, 1, "cpu" if args.smoke else "cuda", None)
    worker.begin(config)
    batch = make_batch(args.length, args.sequences, folder.vocab_size)
    return lambda: worker.step(batch)


def plain_step(args: argparse.Namespace) -> Any:
    """The same of a plain loop: one sequence a pass, gradients added up."""
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    device = "cpu" if args.smoke else "cuda"
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16).to(device)
    model.train()
    if args.recompute is not None:
        model.gradient_checkpointing_enable()
    for layer in model.model.layers if not args.smoke else ():
        layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    vocab = int(model.config.vocab_size)
    tokens = torch.from_numpy(make_batch(args.length, args.sequences, vocab).tokens.astype(np.int64)).to(device)

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
    """One backend in this process: a line of JSON after each round that counts."""
    free = available()
    step = plain_step(args) if args.worker == "plain" else worker_step(args)
    wait = (lambda: None) if args.smoke else torch.cuda.synchronize
    if args.profile:
        profile(args, step)
        return
    seconds: list[float] = []
    for number in range(args.warm_up + args.rounds):
        wait()
        start = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - start)
        if number >= args.warm_up:
            memory = 0.0 if args.smoke else torch.cuda.max_memory_allocated() / 2**30
            row = {"seconds": seconds[args.warm_up :], "memory": memory, "host": (free - available()) / 2**30}
            print(json.dumps(row), flush=True)


def available() -> int:
    """Bytes of the host's memory that are free, or could be."""
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
    return int(line.split()[1]) * 1024


def profile(args: argparse.Namespace, step: Any) -> None:
    """Where a step's time goes, by kernel and by operator, into files of ``args.profile``."""
    from torch.profiler import ProfilerActivity

    for _ in range(args.warm_up):
        step()
    activities = [ProfilerActivity.CPU, *([] if args.smoke else [ProfilerActivity.CUDA])]
    with torch.profiler.profile(activities=activities) as found:
        step()
    args.profile.mkdir(parents=True, exist_ok=True)
    for order in ("self_cpu_time_total", *([] if args.smoke else ["self_device_time_total"])):
        table = found.key_averages().table(sort_by=order, row_limit=45, max_name_column_width=90)
        (args.profile / f"{args.worker}-{order}.txt").write_text(table)


def work(folder: Path, length: int, sequences: int) -> float:
    """Floating-point operations of a step, recomputation not counted."""
    from transformers import AutoConfig

    from slime_core.weights.flops import Flops

    return Flops.of(AutoConfig.from_pretrained(folder)).sequence(float(length)) * sequences


def run_backend(backend: str, folder: Path, limit: float, *more: str) -> tuple[dict[str, Any] | None, str]:
    """The last line of a backend's process, None where it came to none, and why it ended before its time."""
    command = [sys.executable, __file__, *sys.argv[1:], *more, "--folder", str(folder), "--worker", backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
        said, why = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        said, why = _text(late.stdout), f"{_text(late.stderr)}\ncut off after {limit:.0f} s"
    rows = [line for line in said.splitlines() if line.startswith('{"seconds"')]
    return (json.loads(rows[-1]) if rows else None), why


def _text(data: Any) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", nargs="+", choices=["fsdp", "megatron", "plain"], default=["fsdp", "megatron"])
    parser.add_argument("--preset", default="qwen3-4b")
    parser.add_argument("--layers", type=int, default=0, help="so many of the preset's; 0 is all")
    parser.add_argument("--folder", type=Path, default=None, help="of the model; default: in memory if it fits")
    parser.add_argument("--length", type=int, default=8192, help="tokens a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="a step")
    parser.add_argument(
        "--recompute", type=int, nargs="?", const=0, metavar="N", help="of N layers keep the input only"
    )
    parser.add_argument("--offload", nargs="+", choices=list(OFFLOADS), default=[], help="of fsdp, to the host")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of [megatron], or train.NAME=...")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--peak", type=float, default=989e12)
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="no times: tables of kernels and operators there"
    )
    parser.add_argument("--limit", type=float, default=190.0, help="seconds a backend")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on a CPU: it proves nothing")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.preset, args.length, args.sequences = "tiny", 256, 2
        if args.backend == ["fsdp", "megatron"]:
            args.backend = ["fsdp", "plain"]
    if args.folder is None:
        args.folder = Path(scratch(12 << 30) or "/tmp") / f"policy-step-{args.preset}-{args.layers}"
    return args


def main() -> None:
    """Print the table."""
    args = parse()
    if args.worker:
        measure(args)
        return
    if not args.smoke and not torch.cuda.is_available():
        print("no GPU here: --smoke is what runs on a CPU; nothing was measured")
        return
    make_folder(args.folder, args.preset, args.layers, smoke=args.smoke)
    if not args.smoke:
        torch.cuda.empty_cache()
    operations, tokens = work(args.folder, args.length, args.sequences), args.length * args.sequences
    machine = f"{'CPU' if args.smoke else torch.cuda.get_device_name()}, torch {torch.__version__}"
    again = "" if args.recompute is None else f", {args.recompute or 'all'} layers recomputed"
    offload = f", {' and '.join(args.offload)} of fsdp on the host" if args.offload else ""
    more = "".join([again, offload, *(f", {one}" for one in args.set)])
    shape = f"{args.layers} layers of {args.preset}" if args.layers else args.preset
    print(f"{shape}, {args.sequences} x {args.length} tokens{more}, {machine}\n")
    print(HEADER, flush=True)
    for backend in args.backend:
        found, why = run_backend(backend, args.folder, args.limit)
        if args.profile:
            print(f"{backend}: {why[-TAIL:] or f'tables in {args.profile}'}", flush=True)
            continue
        show(backend, args, found, why, operations, tokens)
        for some in FEW if args.recompute is None else ():
            if found is not None or "out of memory" not in why.lower():
                break
            found, why = run_backend(backend, args.folder, args.limit, "--recompute", str(some))
            show(f"{backend}, {some or 'all'} layers recomputed", args, found, why, operations, tokens)


def show(
    name: str, args: argparse.Namespace, found: dict[str, Any] | None, why: str, operations: float, tokens: int
) -> None:
    """A row of the table, and what a backend that failed said."""
    if found is None:
        print(f"| {name} | failed | | | | |", flush=True)
    else:
        best = min(found["seconds"])
        row = f"{best:.3f} | {tokens / best:,.0f} | {operations / best / args.peak:.3f}"
        row += f" | {found['memory']:.1f} | {found['host']:.1f}"
        print(f"| {name} | {row} |", flush=True)
    if why:
        print(f"\n{name}: {why[-TAIL:]}\n", flush=True)


if __name__ == "__main__":
    main()
