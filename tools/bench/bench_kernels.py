"""Measure the Triton kernels of slime_core/kernels on one GPU: milliseconds, and bytes or operations a second.

Every call is captured in a CUDA graph, over several copies of its inputs, so that neither launches nor the L2 cache
count.

Example: python tools/bench/bench_kernels.py decode prefill training sampling weights
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from slime_core.kernels.attention import AttentionBatch, paged_attention, varlen_attention
from slime_core.kernels.cache import norm_rotate_store
from slime_core.kernels.linear import joined
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.kernels.sampling import log_softmax_at, sample
from slime_core.trainers.flash import varlen

SHAPES = {"135M": (9, 3, 64), "0.6B": (16, 8, 128), "4B": (32, 8, 128)}
LAYERS = {"0.6B": (1024, 3072, 16, 8, 128), "4B": (2560, 9728, 32, 8, 128)}
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}
INT = {"dtype": torch.int32, "device": "cuda"}
PAGE = 16
KNOBS = ("", 1.0, 0, 1.0), (" greedy", 0.0, 0, 1.0), (" top-k 20 top-p 0.9", 0.7, 20, 0.9)


def milliseconds(calls: list[Callable[[], object]], repeats: int = 10, *, captured: bool = True) -> float:
    """Of one call, by events around ``repeats`` rounds of all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    run: Callable[[], object] = lambda: [call() for call in calls]  # noqa: E731
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        run = graph.replay
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats / len(calls)


def report(name: str, ms: float, **rates: float) -> None:
    """Print one JSON line."""
    print(json.dumps({"case": name, "ms": round(ms, 4)} | {key: round(value, 1) for key, value in rates.items()}))


def batch_of(rows: int, length: int, new: int, copies: int) -> tuple[list[AttentionBatch], int]:
    """Batches of ``rows`` sequences over pages in a random order, and how many pages they take."""
    pages = -(-length // PAGE)
    batches = []
    for _ in range(copies):
        tables = torch.randperm(rows * pages, device="cuda").int().view(rows, pages)
        tables = torch.cat([tables, torch.zeros(rows, 2048 - pages, **INT)], 1)
        cu_rows = torch.arange(rows + 1, **INT) * new
        batches.append(AttentionBatch(cu_rows, torch.full((rows,), length, **INT), tables, new))
    return batches, rows * pages


def copy_rate() -> float:
    """GB/s of a copy, read and written."""
    source, target = torch.empty(2, 1 << 28, dtype=torch.uint8, device="cuda")
    return 2 * (1 << 28) / milliseconds([lambda: target.copy_(source)] * 4) / 1e6


def decode() -> None:
    """Rows of one token over 600 tokens each."""
    report("copy of 256 MiB", 0, GB_s=copy_rate())
    for shape, (heads, kv_heads, width) in SHAPES.items():
        for rows in (1, 64, 256, 1024):
            copies = max(1, min(8, 2048 // rows))
            batches, pages = batch_of(rows, 600, 1, copies)
            pools = [[torch.randn(pages, PAGE, kv_heads, width, **BF16) for _ in range(2)] for _ in range(copies)]
            query = torch.randn(rows, heads, width, **BF16)
            size = rows * 600 * kv_heads * width * 2 * 2
            for invariant in (False, True):
                ms = milliseconds([
                    lambda a=a, b=b: paged_attention(query, *a, b, scale=0.1, invariant=invariant)  # noqa: B023
                    for a, b in zip(pools, batches)
                ])  # fmt: skip
                report(f"decode {shape} {rows} x 600{' invariant' if invariant else ''}", ms, GB_s=size / ms / 1e6)


def prefill() -> None:
    """8,192 new tokens in sequences of 128, 1,024 and 8,192."""
    for shape, (heads, kv_heads, width) in SHAPES.items():
        for length in (128, 1024, 8192):
            batches, pages = batch_of(8192 // length, length, length, 1)
            pools = [torch.randn(pages, PAGE, kv_heads, width, **BF16) for _ in range(2)]
            query = torch.randn(8192, heads, width, **BF16)
            operations = 4 * 8192 * length / 2 * heads * width
            for invariant in (False, True):
                ms = milliseconds([
                    lambda: paged_attention(query, *pools, batches[0], scale=0.1, invariant=invariant)  # noqa: B023
                ])  # fmt: skip
                name = f"prefill {shape} 8192 in {length}{' invariant' if invariant else ''}"
                report(name, ms, TFLOP_s=operations / ms / 1e9)


def training() -> None:
    """Forward and backward of 25,000 tokens, beside torch's varlen flash attention."""
    for shape, (heads, kv_heads, width) in SHAPES.items():
        for length in (130, 4096):
            count = 25_000 // length
            total = count * length
            cu = torch.arange(count + 1, **INT) * length
            leaves = [torch.randn(total, n, width, **BF16).requires_grad_() for n in (heads, kv_heads, kv_heads)]
            slope = torch.randn(total, heads, width, **BF16)
            operations = 4 * total * length / 2 * heads * width
            kinds = {
                "": lambda: varlen_attention(*leaves, cu, length, scale=0.1),  # noqa: B023
                " invariant": lambda: varlen_attention(*leaves, cu, length, scale=0.1, invariant=True),  # noqa: B023
                " torch": lambda: varlen(*leaves, cu, cu, length, length, scale=0.1),  # noqa: B023
            }
            for name, call in kinds.items():
                with torch.no_grad():
                    forward = milliseconds([call], captured=False)
                both = milliseconds([lambda: torch.autograd.grad(call(), leaves, slope)], captured=False)  # noqa: B023
                rates = {"forward_ms": forward * 1000 / 1000, "TFLOP_s": 3.5 * operations / both / 1e9}
                report(f"training {shape} 25k in {length}{name}", both, **rates)


def sampling() -> None:
    """Sampling, log-probs, and heads rotated and stored."""
    for vocab in (49_152, 151_936):
        for rows in (64, 256, 1024):
            logits = torch.randn(rows, vocab, **BF16) * 3
            seeds, ones = torch.arange(rows, device="cuda"), torch.ones(rows, device="cuda")
            for name, heat, k, p in (
                ("", 1.0, 0, 1.0),
                (" greedy", 0.0, 0, 1.0),
                (" top-k 20 top-p 0.9", 0.7, 20, 0.9),
            ):
                arguments = seeds, seeds, ones * heat, ones.long() * k, ones * p
                ms = milliseconds([lambda: sample(logits, *arguments)])  # noqa: B023
                report(f"sample {rows} of {vocab}{name}", ms, GB_s=logits.numel() * 2 / ms / 1e6)
            ms = milliseconds([lambda: log_softmax_at(logits, seeds)])  # noqa: B023
            report(f"log-probs {rows} of {vocab}", ms, GB_s=logits.numel() * 2 / ms / 1e6)
    for shape, (heads, kv_heads, width) in SHAPES.items():
        for rows in (64, 1024, 8192):
            qkv = torch.randn(rows, heads + 2 * kv_heads, width, **BF16)
            norms = torch.randn(heads + kv_heads, width, **BF16)
            tables = torch.randn(2, 4096, width, **BF16)
            pools = [torch.randn(rows // 16, 16, kv_heads, width, **BF16) for _ in range(2)]
            at = torch.arange(rows, device="cuda")
            ms = milliseconds([lambda: norm_rotate_store(qkv, norms, 1e-6, *tables, at % 4096, at, *pools, heads)])  # noqa: B023
            report(f"norm, rotate, store {shape} {rows}", ms, GB_s=qkv.numel() * 4 / ms / 1e6)


def weights() -> None:
    """Floats of weights in few bits, one layer's q, k and v joined, gate and up, and down."""
    for shape, (hidden, inner, heads, kv_heads, width) in LAYERS.items():
        sizes = {
            "qkv": ([heads * width, kv_heads * width, kv_heads * width], hidden),
            "gate, up": ([inner] * 2, hidden),
        }
        for name, (rows, columns) in (sizes | {"down": ([hidden], inner)}).items():
            for form in ("nf4", "fp8"):
                drawn = [torch.randn(count, columns, **BF16) for count in rows]
                copies = [[QuantisedWeight.of(one, form, torch.bfloat16) for one in drawn] for _ in range(8)]
                ms = milliseconds([lambda one=one: joined(one) for one in copies])
                size = sum(one.stored_bytes for one in copies[0]) + sum(one.nbytes for one in drawn)
                report(f"floats of {form} {shape} {name}", ms, GB_s=size / ms / 1e6)


def main() -> None:
    """Run the parts named on the command line, or all."""
    parts = {"decode": decode, "prefill": prefill, "training": training, "sampling": sampling, "weights": weights}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(parts), choices=[*parts, []])
    for name in parser.parse_args().parts:
        parts[name]()


if __name__ == "__main__":
    main()
