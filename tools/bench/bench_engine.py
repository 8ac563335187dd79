"""The embedded engine against `transformers` `generate`, alternating in one process; a model made from a seed.

    python tools/bench/bench_engine.py  2 threads, float32, batch 64, uniform and long-tail lengths
    python tools/bench/bench_engine.py --threads 1 --rounds 1 --lengths tail --samples-per-prompt 8

Tokens are the ones that were asked for: `generate` keeps a whole batch going until its longest sequence ends, and what
it makes beyond a request's length does not count. The limit is the time of the matrix products alone, at the same
number of rows, measured between the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from slime_core.engines.local import LocalEngine
from slime_core.testing.models import char_tokenizer
from slime_core.threads import TorchThread
from slime_core.types import GenerateRequest, SamplingParams, WeightUpdate

MEAN, CAP = 60, 512


@dataclass(slots=True)
class Figures:
    """Seconds of each round."""

    tokens: int
    engine: list[float] = field(default_factory=list)
    generate: list[float] = field(default_factory=list)
    products: list[float] = field(default_factory=list)  # one decode step's


class Folder:
    """What the engine needs of a model folder, without files."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.vocab_size, self.context_len = config.vocab_size, config.max_position_embeddings
        self.eos_token_ids: tuple[int, ...] = ()
        self.trust_remote_code = False

    def tokenizer(self) -> Any:
        """A character tokenizer; texts are decoded as in a run."""
        return char_tokenizer()


def make_model(args: argparse.Namespace) -> Any:
    """A Qwen3-shaped model drawn from the seed."""
    config = transformers.Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(args.seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype)).eval()


def make_requests(args: argparse.Namespace, lengths: str) -> list[GenerateRequest]:
    """Prompts of one length, so that `generate` pads nothing; response lengths fixed or geometric."""
    draws = np.random.default_rng(args.seed)
    out = []
    for index in range(args.requests):
        if index % args.samples_per_prompt == 0:
            prompt = draws.integers(3, args.vocab, args.prompt).tolist()
        length = MEAN if lengths == "uniform" else min(CAP, int(draws.geometric(1 / MEAN)))
        params = SamplingParams(max_new_tokens=length, ignore_eos=True)
        out.append(GenerateRequest(id=str(index), tokens=prompt, params=params, seed=index))
    return out


@torch.inference_mode()
def run_generate(model: Any, requests: list[GenerateRequest], batch: int) -> float:
    """Seconds of `model.generate` over the requests, batch by batch."""
    begin = time.perf_counter()
    for first in range(0, len(requests), batch):
        part = requests[first : first + batch]
        ids = torch.tensor([request.tokens for request in part])
        longest = max(request.params.max_new_tokens for request in part)
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        assert made.shape[1] == ids.shape[1] + longest
    return time.perf_counter() - begin


async def run_engine(engine: LocalEngine, requests: list[GenerateRequest]) -> float:
    """Seconds of the engine over the same requests, all submitted at once."""
    begin = time.perf_counter()
    done = await asyncio.gather(*(engine.generate(request) for request in requests))
    seconds = time.perf_counter() - begin
    assert all(len(d.tokens) == r.params.max_new_tokens for d, r in zip(done, requests, strict=True))
    return seconds


@torch.inference_mode()
def run_products(model: Any, batch: int, steps: int = 20) -> float:
    """Seconds of one decode step's matrix products alone, weights joined and transposed as the engine has them."""
    pairs = []
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        for group in ((a.q_proj, a.k_proj, a.v_proj), (a.o_proj,), (m.gate_proj, m.up_proj), (m.down_proj,)):
            pairs.append(torch.cat([linear.weight.t() for linear in group], 1).contiguous())
    pairs.append(model.lm_head.weight.t().contiguous())
    inputs = [torch.randn(batch, weight.shape[0]).to(weight.dtype) for weight in pairs]
    begin = time.perf_counter()
    for _ in range(steps):
        for x, weight in zip(inputs, pairs, strict=True):
            torch.mm(x, weight)
    return (time.perf_counter() - begin) / steps


async def measure(args: argparse.Namespace, model: Any, thread: TorchThread, lengths: str) -> Figures:
    """Alternate the two, with the products in between."""
    engine = LocalEngine(
        Folder(model.config),  # type: ignore[arg-type]
        slots=args.batch,
        context_len=args.prompt + CAP,
        dtype=args.dtype,
        device="cpu",
        thread=thread,
    )
    await engine.load(WeightUpdate(version=0, epoch=0, transport="tensors", tensors=dict(model.state_dict())))
    requests = make_requests(args, lengths)
    warm = requests[: args.batch]
    short = [GenerateRequest(id=r.id, tokens=r.tokens, params=SamplingParams(max_new_tokens=4), seed=0) for r in warm]
    await run_engine(engine, short)
    await thread.run(run_generate, model, short, args.batch)
    found = Figures(sum(request.params.max_new_tokens for request in requests))
    for _ in range(args.rounds):
        found.engine.append(await run_engine(engine, requests))
        found.products.append(await thread.run(run_products, model, args.batch))
        found.generate.append(await thread.run(run_generate, model, requests, args.batch))
    await engine.close()
    return found


def show(lengths: str, found: Figures, batch: int) -> dict[str, float]:
    """Print one line, from the best round of each; the figures."""
    engine, generate = found.tokens / min(found.engine), found.tokens / min(found.generate)
    limit = batch / min(found.products)
    ratio = engine / generate
    print(
        f"{lengths:8} engine {engine:8.0f} tokens/s   generate {generate:8.0f} tokens/s   ratio {ratio:5.2f}"
        f"   products alone {limit:8.0f} tokens/s ({engine / limit:.0%} reached)"
    )
    return {"engine": engine, "generate": generate, "ratio": ratio, "limit": limit}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "intermediate": 640, "vocab": 128}
    run = {"threads": 2, "batch": 64, "requests": 256, "prompt": 16, "samples_per_prompt": 1, "rounds": 2, "seed": 0}
    for name, value in {**run, **sizes}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lengths", choices=("uniform", "tail", "both"), default="both")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return parser.parse_args()


def main() -> None:
    """Run and print."""
    args = parse()
    transformers.logging.set_verbosity_error()
    thread = TorchThread(args.threads)
    model = thread.call(make_model, args)
    size = sum(p.numel() for p in model.parameters())
    print(f"Qwen3 shape, {size / 1e6:.2f}M parameters, {args.dtype}, {args.threads} threads, batch {args.batch}")
    kinds = ("uniform", "tail") if args.lengths == "both" else (args.lengths,)
    figures = {}
    for kind in kinds:
        figures[kind] = show(kind, asyncio.run(measure(args, model, thread, kind)), args.batch)
    thread.close()
    if args.json:
        print(json.dumps({"parameters": size, **vars(args), **figures}))


if __name__ == "__main__":
    main()
