"""The gated delta rule of Qwen3-Next over a pack: ours beside flash-linear-attention's kernel, numbers and time.

    pip install flash-linear-attention     # one GPU; without it, and on a CPU, ours alone
    python tools/bench/bench_delta_rule.py --heads 16 --width 128
    python tools/bench/bench_delta_rule.py --device cpu --heads 2 --width 32 --lengths 70 30

Errors are of outputs and gradients in the compute dtype, over ours in float32, by the norm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch

from slime_megatron.linear_attention import delta_rule, gated_delta_rule

NAMES = ("out", "q", "k", "v", "fading", "strength")
Rule = Callable[..., torch.Tensor]


def inputs(args: argparse.Namespace, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v [T, heads, width] in ``dtype``; fading (float32) and strength [T, heads]: always the same numbers."""
    draw = torch.Generator(args.device).manual_seed(0)
    shape = (sum(args.lengths), args.heads)
    rows = [torch.randn(*shape, args.width, device=args.device, generator=draw).to(dtype) for _ in range(3)]
    fading, strength = (torch.rand(shape, device=args.device, generator=draw) for _ in range(2))
    return [tensor.requires_grad_() for tensor in (*rows, -0.3 * fading, strength.to(dtype))]


def passes(rule: Rule, args: argparse.Namespace, dtype: torch.dtype) -> list[torch.Tensor]:
    """The output and the gradients of a forward and a backward pass, in float32."""
    leaves = inputs(args, dtype)
    out = rule(*leaves, args.lengths)
    draw = torch.Generator(args.device).manual_seed(1)
    out.backward(torch.randn(out.shape, device=args.device, generator=draw).to(out.dtype))
    return [tensor.detach().float() for tensor in (out, *(leaf.grad for leaf in leaves if leaf.grad is not None))]


def seconds(rule: Rule, args: argparse.Namespace, dtype: torch.dtype) -> float:
    """Of both passes, the median of some."""
    times = []
    for _ in range(args.rounds + 1):
        if args.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        passes(rule, args, dtype)
        if args.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[3000, 1500, 2048, 1644])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    rules: dict[str, Rule] = {"ours": gated_delta_rule}
    if args.device == "cuda" and find_spec("fla"):
        rules["flash-linear-attention"] = delta_rule
    exact = passes(gated_delta_rule, args, torch.float32)
    print(f"{sum(args.lengths)} tokens, {args.heads} heads of {args.width}, {dtype}\n")
    print("| kernel | ms, forward and backward | " + " | ".join(NAMES) + " |\n" + "| --- " * (2 + len(NAMES)) + "|")
    for name, rule in rules.items():
        pairs = zip(passes(rule, args, dtype), exact, strict=True)
        errors = " | ".join(f"{float((one - other).norm() / other.norm()):.1e}" for one, other in pairs)
        print(f"| {name} | {1000 * seconds(rule, args, dtype):.2f} | {errors} |")


if __name__ == "__main__":
    main()
