"""Tokens a second of the embedded engine on a GPU, and how long it takes from construction to the first token.

    python tools/bench/bench_gpu_engine.py                         # three shapes, 64, 256 and 1,024 in flight
    python tools/bench/bench_gpu_engine.py --shapes 135M --flights 256 --profile 25
    python tools/bench/bench_gpu_engine.py --shapes 0.6B --flights 64 --base nf4 --lora-rank 32 --profile 12

Models are drawn at random from their configs; every request is a prompt of its own (or one of --groups) and makes
exactly --new tokens. One JSON line a measurement; "step_ms" is the time of the whole divided by the tokens of one
sequence. Rounds after the first are reported: the first compiles and captures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import numpy as np
import torch
import transformers

from slime_core.engines.local import LocalEngine
from slime_core.kernels.quantised import QuantisedWeight
from slime_core.testing.models import char_tokenizer
from slime_core.threads import TorchThread
from slime_core.types import AdapterUpdate, GenerateRequest, SamplingParams, WeightUpdate

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("LlamaConfig", {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "135M": ("LlamaConfig", {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "0.6B": ("Qwen3Config", {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True}),
    "4B": ("Qwen3Config", {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "tie_word_embeddings": True}),
    "30B-A3B-cut": ("Qwen3MoeConfig", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}),
    "gemma3-1B": ("Gemma3TextConfig", {}),
}  # fmt: skip


class Folder:
    """What the engine needs of a model folder, without files."""

    def __init__(self, shape: str) -> None:
        kind, values = SHAPES[shape]
        self.config = getattr(transformers, kind)(**(values | {"max_position_embeddings": 8192, "eos_token_id": 1}))
        self.vocab_size, self.context_len = self.config.vocab_size, 8192
        self.eos_token_ids: tuple[int, ...] = ()
        self.trust_remote_code = False

    def tokenizer(self) -> Any:
        """A character tokenizer; texts are decoded as in a run."""
        return char_tokenizer()


def draw_weights(folder: Folder, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Random weights on the device, of a size at which activations stay small."""
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(folder.config, dtype=getattr(torch, args.dtype))
    return dict(model.state_dict())


def update_of(folder: Folder, args: argparse.Namespace) -> WeightUpdate:
    """Random weights, those of linear layers of --base bits, and an adapter of --lora-rank on all of them."""
    weights = draw_weights(folder, args)
    linear = {name: one for name, one in weights.items() if "_proj." in name}
    update = WeightUpdate(version=0, epoch=0, transport="shared" if args.base else "tensors", tensors=weights)
    if args.base:
        dtype = getattr(torch, args.dtype)
        update.tensors |= {name: QuantisedWeight.of(one, args.base, dtype) for name, one in linear.items()}
    if args.lora_rank:
        config = {"peft_type": "LORA", "r": args.lora_rank, "lora_alpha": args.lora_rank}
        config["target_modules"] = sorted({name.split(".")[-2] for name in linear})
        factors = {}
        for name, one in linear.items():
            prefix = f"{name.removesuffix('.weight')}.lora_"
            factors[f"{prefix}A.weight"] = 0.01 * torch.randn(args.lora_rank, one.shape[1], device=one.device)
            factors[f"{prefix}B.weight"] = 0.01 * torch.randn(one.shape[0], args.lora_rank, device=one.device)
        update.adapters = {"default": AdapterUpdate(config=config, tensors=factors)}
    return update


def requests(folder: Folder, count: int, args: argparse.Namespace, number: int) -> list[GenerateRequest]:
    """``count`` requests of --prompt tokens, in --groups that share their prompts."""
    draws = np.random.default_rng(number)
    prompts = draws.integers(3, folder.vocab_size, (args.groups or count, args.prompt)).tolist()
    params = SamplingParams(
        max_new_tokens=args.new, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, ignore_eos=True
    )
    return [
        GenerateRequest(id=f"{number}-{i}", tokens=prompts[i % len(prompts)], params=params, seed=1000 * number + i)
        for i in range(count)
    ]


async def measure(shape: str, args: argparse.Namespace) -> None:
    """All measurements of one shape."""
    folder = Folder(shape)
    update = update_of(folder, args)
    thread = TorchThread(2)
    began = time.perf_counter()
    engine = LocalEngine(
        folder,  # type: ignore[arg-type]
        slots=max(args.flights),
        context_len=folder.context_len,
        dtype=args.dtype,
        device=args.device,
        thread=thread,
        share=0.8,
        paged=True,
    )
    await engine.load(update)
    update.tensors = {}
    loaded = time.perf_counter() - began
    first = requests(folder, 1, args, 0)[0]
    await engine.generate(
        GenerateRequest(id="first", tokens=first.tokens, params=SamplingParams(max_new_tokens=1), seed=1)
    )
    start = {"loaded_s": round(loaded, 2), "first_token_s": round(time.perf_counter() - began, 2)}
    print(json.dumps({"shape": shape, **start, "plan": engine._scheduler.served.plan.name}), flush=True)
    for count in args.flights:
        seconds = []
        for number in range(args.rounds):
            asked = requests(folder, count, args, number + 1)
            began = time.perf_counter()
            done = await asyncio.gather(*(engine.generate(one) for one in asked))
            seconds.append(round(time.perf_counter() - began, 3))
            assert all(len(one.tokens) == args.new for one in done)
        best = min(seconds[1:] or seconds)
        figures = {"in_flight": count, "tokens_per_s": round(count * args.new / best), "rounds_s": seconds}
        figures["step_ms"] = round(1e3 * best / args.new, 3)
        print(json.dumps({"shape": shape, "prompt": args.prompt, "new": args.new, **figures}), flush=True)
        if args.profile:
            await profiled(engine, folder, count, args)
    await engine.close()
    thread.close()
    if args.device == "cuda":
        torch.cuda.empty_cache()


async def profiled(engine: LocalEngine, folder: Folder, count: int, args: argparse.Namespace) -> None:
    """Print where a round of few tokens spends the device's time, and the host's."""
    few = argparse.Namespace(**{**vars(args), "new": 40})
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(one) for one in requests(folder, count, few, 99)))
        seconds = time.perf_counter() - began
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    print(json.dumps({"profiled_tokens": few.new, "seconds": round(seconds, 4), "device_busy": round(busy, 4)}))
    table = profile.key_averages().table(
        sort_by="self_device_time_total", row_limit=args.profile, max_name_column_width=60
    )
    for line in table.splitlines():
        print(line[:62] + line[-100:])


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["135M", "0.6B", "4B"], choices=SHAPES)
    parser.add_argument("--flights", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--groups", type=int, default=0, help="Different prompts; 0: every request has its own.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--base", default="", choices=["", "nf4", "fp8"], help="Bits of linear layers.")
    parser.add_argument("--lora-rank", type=int, default=0, help="Of an adapter beside the base.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", type=int, default=0, help="Rows of a table of kernels after each measurement.")
    args = parser.parse_args()
    for shape in args.shapes:
        try:
            asyncio.run(measure(shape, args))
        except Exception as error:
            print(json.dumps({"shape": shape, "error": f"{type(error).__name__}: {error}"[:400]}), flush=True)


if __name__ == "__main__":
    main()
