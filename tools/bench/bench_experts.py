"""Experts of a layer, forward and backward: each way over megatron-core's loop, side by side in one process.

    python tools/bench/bench_experts.py  # all 128 experts of Qwen3-30B-A3B on a rank, 8192 tokens
    python tools/bench/bench_experts.py --experts 16 --ranks 8 --tokens 65536  # one of 8 ranks that share them
    python tools/bench/bench_experts.py --device cpu --hidden 512 --width 192 --tokens 2048 --rounds 3  # float32
    python tools/bench/bench_experts.py --smoke                                # a small shape on a CPU

Rows are as a router that learns deals them: each expert's share is drawn from a Dirichlet distribution.

    loop          megatron-core's, one expert after another
    product       Megatron's experts in one product, weights in one buffer, as in a model that learns
    stacked       the same with weights that lie apart, which are copied into one tensor each time
    accumulated   product, and gradients added to float32 ones, as in a step
    fsdp          FSDP's experts: sort of tokens, rows, products, activation and sum over a token's experts
    grouped_mm    the same by transformers, with torch's grouped product
    eager         transformers' loop over experts
    products      the six grouped products alone, without activation and autograd
    activation    SwiGLU with the router's weights alone, forward and backward
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

from slime_core.trainers.fsdp.experts import IMPLEMENTATION, register


def make(args: argparse.Namespace) -> dict[str, Any]:
    """The loop, the product over weights of one buffer, and over weights that lie apart; all with the same weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what megatron-core imports
        from slime_megatron.experts import alone

    fields = {
        "num_layers": 1, "num_attention_heads": 1, "hidden_size": args.hidden, "ffn_hidden_size": args.width,
        "num_moe_experts": args.experts, "moe_ffn_hidden_size": args.width, "moe_grouped_gemm": True,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False,
        "bias_activation_fusion": args.device != "cpu", "params_dtype": dtype_of(args),
        "bf16": args.device != "cpu", "use_cpu_initialization": True, "perform_initialization": False,
    }  # fmt: skip
    layers = {name: alone(fields, grouped=name != "loop") for name in ("loop", "product", "stacked", "accumulated")}
    for name, experts in layers.items():
        experts.to(args.device)
        in_order(experts, together=name in ("product", "accumulated"))
    accumulate(layers["accumulated"])
    return layers


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


def accumulate(experts: Any) -> None:
    """Give the experts float32 gradients that a pass adds to, in one buffer in the order of weights."""
    experts.config.gradient_accumulation_fusion = experts.direct = True
    parameters = list(experts.parameters())[::-1]
    buffer = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
    for parameter, part in zip(parameters, buffer.split([p.numel() for p in parameters]), strict=True):
        parameter.main_grad = part.view_as(parameter)


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    """What a device computes in."""
    return torch.float32 if args.device == "cpu" else torch.bfloat16


def rows_of(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, how many each expert has, and the router's weights."""
    total, draw = args.tokens * args.topk // args.ranks, torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    share = torch.distributions.Dirichlet(torch.full((args.experts,), args.even)).sample()
    counts = torch.bincount(torch.multinomial(share, total, replacement=True, generator=draw), minlength=args.experts)
    rows = torch.randn(total, args.hidden, generator=draw).to(args.device, dtype_of(args)).requires_grad_()
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


def of_transformers(
    args: argparse.Namespace, experts: Any, counts: torch.Tensor, implementation: str
) -> Callable[[], torch.Tensor]:
    """transformers' way over the same weights and as many rows of each expert, tokens and all."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=args.hidden, moe_intermediate_size=args.width, num_experts=args.experts)
    config._experts_implementation = implementation
    register()
    first = next(experts.parameters())
    with torch.device("meta"):
        stacks = Qwen3MoeExperts(config)
    stacks.to_empty(device=first.device).to(first.dtype)
    with torch.no_grad():
        for number, expert in enumerate(experts.local_experts):
            stacks.gate_up_proj[number].copy_(expert.linear_fc1.weight)
            stacks.down_proj[number].copy_(expert.linear_fc2.weight)
    rows, draw = int(counts.sum()), torch.Generator().manual_seed(2)
    chosen = torch.arange(args.experts).repeat_interleave(counts)[torch.randperm(rows, generator=draw)]
    index = chosen.view(-1, args.topk).to(first.device)
    tokens = torch.randn(len(index), args.hidden, generator=draw).to(first).requires_grad_()
    weights = torch.rand(len(index), args.topk, generator=draw).to(first).requires_grad_()

    def once() -> torch.Tensor:
        out: torch.Tensor = stacks(tokens, index, weights)
        out.backward(torch.ones_like(out))
        for tensor in (tokens, weights, *stacks.parameters()):
            tensor.grad = None
        return out.detach()

    return once


def parts_of(experts: Any, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> dict[str, Any]:
    """The six products alone, and the activation alone."""
    from slime_core.kernels.grouped import gradient, multiply
    from slime_megatron.experts import stacked

    ends = counts.to(rows.device).cumsum(0, dtype=torch.int32)
    first = stacked([expert.linear_fc1.weight.detach() for expert in experts.local_experts])
    second = stacked([expert.linear_fc2.weight.detach() for expert in experts.local_experts])
    x = rows.detach()
    wide = multiply(x, first, ends)
    narrow, out = wide[:, : wide.shape[1] // 2].contiguous(), torch.ones_like(x)

    def products() -> torch.Tensor:
        multiply(x, first, ends)
        last = multiply(narrow, second, ends)
        multiply(out, second, ends, transposed=True)
        multiply(wide, first, ends, transposed=True)
        gradient(out, narrow, ends)
        gradient(wide, x, ends)
        return last

    hidden, weights = wide.detach().requires_grad_(), probs.detach().requires_grad_()

    def activation() -> torch.Tensor:
        activated: torch.Tensor = experts._activated(hidden, None, weights)
        activated.backward(narrow)
        hidden.grad = weights.grad = None
        return activated.detach()

    return {"products": products, "activation": activation}


def error_of(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The error's norm over that of the loop's output."""
    return float((out - exact).float().norm() / exact.float().norm())


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
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    given = rows_of(args)
    layers = make(args)
    passes = {name: pass_of(experts, *given) for name, experts in layers.items()}
    compared = list(passes)
    for name, implementation in (("fsdp", IMPLEMENTATION), ("grouped_mm", "grouped_mm"), ("eager", "eager")):
        passes[name] = of_transformers(args, layers["product"], given[1], implementation)
    passes |= parts_of(layers["product"], *given)
    outs = {name: once() for name, once in passes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(args.rounds):
        for name, once in passes.items():
            wait()
            start = time.perf_counter()
            once()
            wait()
            seconds[name].append(time.perf_counter() - start)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(
        f"{args.experts} experts {args.hidden} x {args.width}, {len(given[0])} rows, {machine}, {torch.__version__}\n"
    )
    print(
        "| experts | ms, forward and backward | of the loop | TFLOP/s | off the loop |\n"
        "| --- | --- | --- | --- | --- |"
    )
    work = 18 * len(given[0]) * args.hidden * args.width  # three matrices, 2 operations, forward and twice that back
    for name, found in seconds.items():
        middle = statistics.median(found)
        off = f"{error_of(outs[name], outs['loop']):.1e}" if name in compared else ""
        ratio = statistics.median(mine / loop for mine, loop in zip(found, seconds["loop"], strict=True))
        rate = "" if name == "activation" else f"{work / middle / 1e12:.3g}"
        print(f"| {name} | {middle * 1e3:.2f} | {ratio:.3f} | {rate} | {off} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
