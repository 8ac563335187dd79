"""Experts of a layer, forward and backward: all in one product over megatron-core's loop, side by side in one process.

    python tools/bench/bench_experts.py  # all 128 experts of Qwen3-30B-A3B on a rank, 8192 tokens
    python tools/bench/bench_experts.py --experts 16 --ranks 8 --tokens 65536  # one of 8 ranks that share them
    python tools/bench/bench_experts.py --smoke                                # what a CPU can: a small shape

Rows are as a router that learns deals them: each expert's share is drawn from a Dirichlet distribution. "stacked" is
the product with weights that lie apart, which are copied into one tensor each time; in megatron-core's buffers, where
a model that learns has them, they need not be.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def make(args: argparse.Namespace) -> dict[str, Any]:
    """The loop, the product over weights of one buffer, and over weights that lie apart; all with the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what megatron-core imports
        from slime_megatron.experts import alone

    fields = {
        "num_layers": 1, "num_attention_heads": 1, "hidden_size": args.hidden, "ffn_hidden_size": args.width,
        "num_moe_experts": args.experts, "moe_ffn_hidden_size": args.width, "moe_grouped_gemm": True,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "bias_activation_fusion": not args.smoke, "params_dtype": torch.float32 if args.smoke else torch.bfloat16,
        "bf16": not args.smoke, "use_cpu_initialization": True, "perform_initialization": False,
    }  # fmt: skip
    found = {name: alone(fields, grouped=name != "loop") for name in ("loop", "product", "stacked")}
    for name, experts in found.items():
        experts.to(args.device)
        in_order(experts, together=name == "product")
    return found


@torch.no_grad()
def in_order(experts: Any, *, together: bool) -> None:
    """Draw the weights, the same for all; ``together`` in one buffer, from the last parameter to the first."""
    torch.manual_seed(0)
    for _, parameter in sorted(experts.named_parameters()):
        parameter.normal_(std=0.02)
    if together:
        parameters = list(experts.parameters())[::-1]
        buffer = torch.cat([parameter.reshape(-1) for parameter in parameters])
        for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
            parameter.data = part.view_as(parameter)


def rows_of(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, how many each expert has, and the router's weights."""
    total, draw = args.tokens * args.topk // args.ranks, torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    share = torch.distributions.Dirichlet(torch.full((args.experts,), args.even)).sample()
    counts = torch.bincount(torch.multinomial(share, total, replacement=True, generator=draw), minlength=args.experts)
    dtype = torch.float32 if args.smoke else torch.bfloat16
    rows = torch.randn(total, args.hidden, generator=draw).to(args.device, dtype).requires_grad_()
    return rows, counts, torch.rand(total, generator=draw).to(args.device).requires_grad_()


def pass_of(experts: Any, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One pass forward and backward."""

    def once() -> torch.Tensor:
        out: torch.Tensor = experts(rows, counts, probs)[0]
        out.backward(torch.ones_like(out))
        for tensor in (rows, probs, *experts.parameters()):
            tensor.grad = None
        return out.detach()

    return once


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experts", type=int, default=128, help="on this rank")
    parser.add_argument("--ranks", type=int, default=1, help="that the tokens' experts are shared by")
    parser.add_argument("--tokens", type=int, default=8192, help="of all these ranks, in a pass")
    parser.add_argument("--topk", type=int, default=8, help="experts a token")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768, help="of an expert")
    parser.add_argument("--even", type=float, default=4.0, help="the Dirichlet's parameter: large is even")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a small shape on a CPU: it proves nothing")
    args = parser.parse_args()
    if args.smoke:
        args.device, args.experts, args.tokens, args.hidden, args.width, args.rounds = "cpu", 8, 256, 64, 32, 3
    wait = (lambda: None) if args.smoke else torch.cuda.synchronize
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    given = rows_of(args)
    passes = {name: pass_of(experts, *given) for name, experts in make(args).items()}
    outs = {name: once() for name, once in passes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(args.rounds):
        for name, once in passes.items():
            wait()
            start = time.perf_counter()
            once()
            wait()
            seconds[name].append(time.perf_counter() - start)
    machine = "CPU" if args.smoke else torch.cuda.get_device_name()
    print(
        f"{args.experts} experts {args.hidden} x {args.width}, {len(given[0])} rows, {machine}, {torch.__version__}\n"
    )
    print(
        "| experts | ms, forward and backward | of the loop | TFLOP/s | off the loop |\n"
        "| --- | --- | --- | --- | --- |"
    )
    work = 18 * len(given[0]) * args.hidden * args.width  # three matrices, 2 operations, forward and twice that back
    for name, found in seconds.items():
        middle, off = (
            statistics.median(found),
            (outs[name] - outs["loop"]).float().norm() / outs["loop"].float().norm(),
        )
        ratio = statistics.median(mine / loop for mine, loop in zip(found, seconds["loop"], strict=True))
        print(f"| {name} | {middle * 1e3:.2f} | {ratio:.2f} | {work / middle / 1e12:.1f} | {off:.1e} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
