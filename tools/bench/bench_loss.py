"""Time and memory of the loss on the output matrix: slime's two routes, the plain way, Liger's, and the bare matrix.

    python tools/bench/bench_loss.py          # CUDA, Qwen3-4B's head: 8192 tokens, hidden 2560, vocabulary 151,936
    python tools/bench/bench_loss.py --model  # and in a step of a whole model of Qwen3-4B's shape (random weights)
    python tools/bench/bench_loss.py --small  # a CPU, toy sizes: shows that it runs, proves nothing

The loss is GRPO's clipped ratio with advantages, and entropy as a metric. "bare head" is what the model's own forward
and backward cost: logits in blocks and two products with a random gradient of them; what a row takes beyond it is the
loss. Memory is the peak beyond parameters, inputs and gradients. The output matrix's gradient counts once, in the
dtype that it is summed in: float32 for slime, so that its copy in bfloat16, made at the end, is in the peak.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import Any

import torch

from slime_core.algorithms.shared.logprobs import Head, HeadGradients, linear_log_probs, linear_loss
from slime_core.algorithms.shared.losses import PolicyTerms, policy_loss

MIB = 1 << 20
SEQUENCES = 8


@dataclass(slots=True)
class Case:
    """A head, its inputs, and what a GRPO loss reads of each token."""

    hidden: torch.Tensor  # [R, hidden], with gradient
    weight: torch.Tensor  # [vocab, hidden], with gradient
    target: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    chunk: int
    noise: torch.Tensor  # [rows of a block, vocab], in the place of a gradient of logits

    @classmethod
    def make(cls, tokens: int, hidden: int, vocab: int, dtype: torch.dtype, device: str, chunk: int) -> Case:
        """Random numbers at the scale of a trained model's."""
        draw = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=device)

        weight = (normal(vocab, hidden) / hidden**0.5).to(dtype).requires_grad_()
        states = normal(tokens, hidden).to(dtype).requires_grad_()
        target = torch.randint(vocab, (tokens,), generator=draw, device=device)
        with torch.no_grad():
            old, _ = linear_log_probs(states, weight, target, chunk=chunk)
        advantages = normal(SEQUENCES).repeat_interleave(tokens // SEQUENCES)
        return cls(states, weight, target, old, advantages, chunk, noise_of(weight, tokens, chunk))

    def loss(self, part: slice, log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        """The sum over these rows of the clipped loss at weight 1 / R."""
        old, advantages = self.old[part], self.advantages[part]
        values, _ = policy_loss(log_probs, old, advantages, PolicyTerms(eps_clip=0.2, eps_clip_high=0.28))
        return values.sum() / len(self.target)

    def route_a(self) -> torch.Tensor:
        """Gradient within the forward pass."""
        return linear_loss(self.hidden, self.weight, self.target, self.loss, chunk=self.chunk)

    def route_b(self) -> torch.Tensor:
        """Log-probs first, a second pass in the backward."""
        return self.loss(slice(None), *linear_log_probs(self.hidden, self.weight, self.target, chunk=self.chunk))

    def plain(self) -> torch.Tensor:
        """All logits in float32, log_softmax, autograd."""
        table = torch.nn.functional.linear(self.hidden, self.weight).float().log_softmax(-1)
        entropy = -(table.detach().exp() * table.detach()).sum(-1)
        return self.loss(slice(None), table.gather(1, self.target[:, None])[:, 0], entropy)

    def bare(self) -> torch.Tensor:
        """Logits in blocks, and both products of the backward with a random gradient."""
        return _Bare.apply(self.hidden, self.weight, self.chunk, self.noise)  # type: ignore[no-any-return, no-untyped-call]

    def liger(self) -> Callable[[], torch.Tensor]:
        """Liger's fused linear GRPO loss on the same tokens; ImportError where it is not installed."""
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        module = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, epsilon_low=0.2, epsilon_high=0.28)
        rows = SEQUENCES
        ids, old = self.target.view(rows, -1), self.old.view(rows, -1)
        advantages, mask = self.advantages.view(rows, -1)[:, 0].contiguous(), torch.ones_like(ids)

        def call() -> torch.Tensor:
            hidden = self.hidden.view(rows, -1, self.hidden.shape[1])
            loss: torch.Tensor = module(hidden, self.weight, ids, mask, advantages, None, None, old)[0]
            return loss

        return call


def noise_of(weight: torch.Tensor, tokens: int, chunk: int) -> torch.Tensor:
    """What the bare head takes for the gradient of a block's logits."""
    head = Head(weight.detach(), None, weight.new_empty(0), None)
    return head.room(head.blocks(tokens, chunk)[0].stop).normal_(std=1e-6)


class _Bare(torch.autograd.Function):
    """The three products of a linear head, with a random matrix in the place of the logits' gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, chunk: int, noise: torch.Tensor) -> torch.Tensor:
        head = Head(weight, None, hidden.new_empty(0), None)
        room = head.room(len(noise))
        for part in head.blocks(len(hidden), chunk):
            head.logits(hidden[part], room)
        ctx.save_for_backward(hidden, weight, noise)
        ctx.chunk = chunk
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, noise = ctx.saved_tensors
        head = Head(weight, None, hidden.new_empty(0), None)
        found = HeadGradients(hidden, head, (True, True))
        for part in head.blocks(len(hidden), ctx.chunk):
            found.add(noise[: part.stop - part.start], hidden[part], part)
        return *found.finish()[:2], None, None


def sync(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(
    call: Callable[[], torch.Tensor], leaves: list[torch.Tensor], grads: int, device: str, rounds: int
) -> tuple[float, float]:
    """Best seconds of forward and backward, and the peak in MiB beyond what was there and ``grads`` bytes."""
    best = float("inf")
    peak = 0.0
    for _ in range(rounds + 1):
        for leaf in leaves:
            leaf.grad = None
        gc.collect()
        sync(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call().backward()
        sync(device)
        best = min(best, time.perf_counter() - start)
        if device == "cuda":
            peak = (torch.cuda.max_memory_allocated() - before - grads) / MIB
    return best, peak


def gradient_error(
    case: Case, call: Callable[[], torch.Tensor], want: torch.Tensor | None
) -> tuple[float, torch.Tensor]:
    """Relative difference of the output matrix's gradient from ``want`` (0 where there is none), and the gradient."""
    case.hidden.grad = case.weight.grad = None
    call().backward()
    assert case.weight.grad is not None
    found = case.weight.grad.clone()
    case.hidden.grad = case.weight.grad = None
    if want is None:
        return 0.0, found
    parts = [(a.float() - b.float()).norm() for a, b in zip(found.split(8192), want.split(8192))]
    return float(torch.stack(parts).norm() / torch.linalg.vector_norm(want, dtype=torch.float32)), found


def head_table(args: argparse.Namespace, device: str, dtype: torch.dtype) -> None:
    """Print a row a way of computing the loss."""
    case = Case.make(args.tokens, args.hidden, args.vocab, dtype, device, args.chunk)
    leaves = [case.hidden, case.weight]
    ways: dict[str, Callable[[], torch.Tensor] | str] = {
        "bare head": case.bare,
        "slime, within the forward": case.route_a,
        "slime, log-probs first": case.route_b,
        "plain": case.plain,
    }
    try:
        ways["Liger fused GRPO"] = case.liger()
    except ImportError as error:
        ways["Liger fused GRPO"] = f"not measured: {error}"
    print("| loss | ms | ms beyond the bare head | peak MiB | d_weight: relative difference from the first |")
    print("| --- | --- | --- | --- | --- |")
    bare, want = 0.0, None
    for name, call in ways.items():
        if isinstance(call, str):
            print(f"| {name} | {call} | | | |")
            continue
        itemsize = 4 if call in (case.bare, case.route_a, case.route_b) else dtype.itemsize
        grads = case.weight.numel() * itemsize + case.hidden.numel() * dtype.itemsize
        try:
            seconds, peak = measure(call, leaves, grads, device, args.rounds)
            differs, found = gradient_error(case, call, want) if name != "bare head" else (0.0, None)
        except (torch.OutOfMemoryError, RuntimeError) as failed:
            print(f"| {name} | {type(failed).__name__}: {str(failed).splitlines()[0][:80]} | | | |")
            continue
        bare = seconds if name == "bare head" else bare
        want = found if want is None else want
        memory = f"{peak:.0f}" if device == "cuda" else "-"
        shown = f"{differs:.1e}" if name != "bare head" else ""
        print(f"| {name} | {seconds * 1e3:.1f} | {(seconds - bare) * 1e3:.1f} | {memory} | {shown} |", flush=True)


def build_model(args: argparse.Namespace, device: str, dtype: torch.dtype) -> Any:
    """A Qwen3 of the asked size with random weights, gradient checkpointing on."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocab_size=args.vocab,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def model_table(args: argparse.Namespace, device: str, dtype: torch.dtype) -> None:
    """Print a row a loss at the end of a whole model's step, and its share beyond the bare head's."""
    model = build_model(args, device, dtype)
    head = model.get_output_embeddings().weight
    tokens = torch.randint(args.vocab, (args.tokens // args.length, args.length), device=device)
    noise = noise_of(head, args.tokens, args.chunk)
    base = Case.make(args.tokens, 8, 16, dtype, device, args.chunk)
    leaves = list(model.parameters())
    grads = sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    def step(way: str) -> torch.Tensor:
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)
        case = Case(hidden, head, tokens.flatten(), base.old, base.advantages, args.chunk, noise)
        found: torch.Tensor = getattr(case, way)()
        return found

    print("| loss | step, ms | share of the step beyond the bare head | peak MiB |\n| --- | --- | --- | --- |")
    bare = 0.0
    for name, way in (
        ("bare head", "bare"),
        ("slime, within the forward", "route_a"),
        ("slime, log-probs first", "route_b"),
    ):
        seconds, peak = measure(partial(step, way), leaves, grads, device, args.rounds)
        bare = bare or seconds
        memory = f"{peak:.0f}" if device == "cuda" else "-"
        print(f"| {name} | {seconds * 1e3:.1f} | {(seconds / bare - 1) * 100:.1f}% | {memory} |", flush=True)


def versions(device: str) -> str:
    """The machine and what runs on it."""
    import importlib.metadata as metadata

    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or platform.machine()} (CPU)"
    found = [f"torch {torch.__version__}"]
    for package in ("transformers", "triton", "liger-kernel"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return f"{name}, {', '.join(found)}, {date.today()}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true", help="toy sizes, on a CPU where there is no GPU")
    parser.add_argument("--model", action="store_true", help="a whole model's step too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=0, help="rows of logits at once; 0: by bytes")
    parser.add_argument("--length", type=int, help="tokens a sequence of the whole model's step")
    sizes = {"tokens": 8192, "hidden": 2560, "vocab": 151936, "layers": 36, "intermediate": 9728, "heads": 32}
    sizes |= {"kv_heads": 8, "head_dim": 128}
    toy = {"tokens": 256, "hidden": 64, "vocab": 2000, "layers": 2, "intermediate": 128, "heads": 4, "kv_heads": 2}
    toy |= {"head_dim": 16}
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.small:
        print("there is no GPU: toy sizes, as with --small\n")
        args.small = True
    for name, value in (toy if args.small else sizes).items():
        setattr(args, name, getattr(args, name) or value)
    args.length = args.length or args.tokens // 8
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    print(f"{versions(device)}\n\n{args.tokens} tokens, hidden {args.hidden}, vocabulary {args.vocab}, {dtype}\n")
    head_table(args, device, dtype)
    gc.collect()
    if args.model:
        print(f"\nwhole model: {args.layers} layers, gradient checkpointing, {args.tokens} tokens\n")
        model_table(args, device, dtype)


if __name__ == "__main__":
    main()
