"""Rollout throughput through slime's SGLang engine against the same server asked by a bare HTTP loop.

    python tools/bench/bench_rollout.py                    # on a GPU: Qwen3-4B shape, 256 and 1,024 in flight
    python tools/bench/bench_rollout.py --deterministic    # the same in SGLang's deterministic mode, with seeds
    python tools/bench/bench_rollout.py --router sglang    # slime's requests take the way through SGLang's own router
    python tools/bench/bench_rollout.py --smoke            # what a CPU can: a tiny model, little of everything

One server, one process that asks; 128 tokens in, 512 out. "raw" is a minimal loop of this file over aiohttp: it sends
prepared bytes, reads the answer and looks at nothing in it. "slime" is ``SglangEngine.generate``: routing, checks,
parsed log-probs and versions. Both send the same prompts and ask for the same tokens, with log-probs, and keep the
same number in flight. They alternate within pairs, each pair begins with the other one, and the cache is flushed
before every round. The ratio is of the two rounds of a pair; its median is the result, its smallest and largest the
spread.

Weights are random, drawn from a seed: what they generate does not matter, the end token is ignored. With
``--deterministic`` the figure to compare is the slime column of a run without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from sglang_place import Place, Served, make_folder, scratch, serving

from slime_core.types import GenerateRequest, SamplingParams

GRAPHS = [8, 32, 64, 96, 128, 160, 192, 224, 256]
"""Batch sizes with a CUDA graph: a quarter of those that SGLang captures up to 256, and of the minute it takes."""


@dataclass(slots=True)
class Pairs:
    """Tokens a second of alternating rounds with one number in flight."""

    in_flight: int
    requests: int
    raw: list[float] = field(default_factory=list)
    slime: list[float] = field(default_factory=list)

    def ratios(self) -> list[float]:
        """slime over raw, a pair each."""
        return [ours / bare for ours, bare in zip(self.slime, self.raw, strict=True)]


def make_requests(args: argparse.Namespace, label: str, count: int, vocab: int) -> list[GenerateRequest]:
    """Random prompts of one length, responses of one length."""
    draw = random.Random(label)
    params = SamplingParams(max_new_tokens=args.response, ignore_eos=True)
    return [
        GenerateRequest(
            id=f"{label}-{index}-x",
            tokens=[draw.randrange(3, vocab) for _ in range(args.prompt)],
            params=params,
            seed=index,
        )
        for index in range(count)
    ]


async def closed_loop(count: int, in_flight: int, ask: Callable[[int], Awaitable[None]]) -> float:
    """Seconds until ``count`` requests are done with ``in_flight`` of them under way at any time."""
    left = iter(range(count))

    async def one() -> None:
        for index in left:
            await ask(index)

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(min(in_flight, count))))
    return time.perf_counter() - begin


async def run_raw(served: Served, requests: Sequence[GenerateRequest], in_flight: int, seeds: bool) -> float:
    """Seconds of the bare loop; one answer is looked at, after the clock has stopped."""
    bodies = [json.dumps(raw_body(request, seeds)).encode() for request in requests]
    headers = {"Authorization": f"Bearer {served.token}", "Content-Type": "application/json"}
    last: list[bytes] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False) as session:

        async def ask(index: int) -> None:
            async with session.post(f"{served.url}/generate", data=bodies[index]) as answer:
                data = await answer.read()
                if answer.status != 200:
                    raise SystemExit(f"raw: {answer.status} {data[:200]!r}")
                last[:] = [data]

        seconds = await closed_loop(len(requests), in_flight, ask)
    meta = json.loads(last[0])["meta_info"]
    expected = requests[0].params.max_new_tokens
    if (meta["completion_tokens"], len(meta["output_token_logprobs"])) != (expected, expected):
        raise SystemExit(f"raw: {meta['completion_tokens']} tokens came, not {expected}")
    return seconds


def raw_body(request: GenerateRequest, seeds: bool) -> dict[str, Any]:
    """The same request in SGLang's words."""
    sampling: dict[str, Any] = {
        "max_new_tokens": request.params.max_new_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    if seeds:
        sampling["sampling_seed"] = request.seed
    return {"input_ids": list(request.tokens), "sampling_params": sampling, "return_logprob": True}


async def run_slime(served: Served, requests: Sequence[GenerateRequest], in_flight: int) -> float:
    """Seconds of the engine."""

    async def ask(index: int) -> None:
        done = await served.engine.generate(requests[index])
        if len(done.tokens) != requests[index].params.max_new_tokens or len(done.log_probs) != len(done.tokens):
            raise SystemExit(f"slime: {len(done.tokens)} tokens came ({done.finish})")

    return await closed_loop(len(requests), in_flight, ask)


async def measure(args: argparse.Namespace, served: Served, in_flight: int) -> Pairs:
    """Rounds in pairs; the first of a pair alternates."""
    found = Pairs(in_flight, in_flight * (args.waves if in_flight <= 256 else 1))
    tokens = found.requests * args.response

    async def one(kind: str, requests: list[GenerateRequest]) -> None:
        await served.flush()
        if kind == "raw":
            found.raw.append(tokens / await run_raw(served, requests, in_flight, args.deterministic))
        else:
            found.slime.append(tokens / await run_slime(served, requests, in_flight))

    for number in range(args.rounds):
        requests = make_requests(args, f"r{in_flight}-{number}", found.requests, served.vocab_size)
        for kind in ("raw", "slime") if number % 2 == 0 else ("slime", "raw"):
            await one(kind, requests)
        raw, slime = found.raw[-1], found.slime[-1]
        ratio = f"raw {raw:,.0f}  slime {slime:,.0f}  {slime / raw:.3f}"
        print(f"  {in_flight} in flight, pair {number}: {ratio}", flush=True)
    return found


async def warm(args: argparse.Namespace, served: Served) -> None:
    """Both kinds once, short: kernels are compiled, connections made."""
    short = argparse.Namespace(**{**vars(args), "response": 16})
    most = min(max(args.in_flight), 256)
    requests = make_requests(short, "warm", most, served.vocab_size)
    await run_raw(served, requests, most, args.deterministic)
    await run_slime(served, requests, most)


async def bench(args: argparse.Namespace, place: Place, folder: Path) -> list[Pairs]:
    """Start the server, measure, stop it."""
    most = max(args.in_flight)
    options: dict[str, Any] = {"max_running_requests": most}
    if place.device == "cuda":
        options |= {"mem_fraction_static": args.mem_fraction, "disable_piecewise_cuda_graph": True}
        options |= {"cuda_graph_bs": GRAPHS} if not args.no_graphs else {"disable_cuda_graph": True}
    flags = ["--server-concurrency", str(most), "--rollout-max-response-len", str(args.response)]
    flags += ["--rollout-deterministic"] if args.deterministic else []
    flags += ["--rollout-router", args.router]
    config = place.config(folder, *flags, sglang=options)
    begin = time.perf_counter()
    async with serving(config, folder.parent / "run", fixed=True) as served:
        print(f"  ready after {time.perf_counter() - begin:.0f} s; SGLang {served.sglang}", flush=True)
        await warm(args, served)
        found = []
        for in_flight in args.in_flight:
            found.append(await measure(args, served, in_flight))
            show(args, place, found[-1:])  # what is measured is said, whatever comes after
        return found


def show(args: argparse.Namespace, place: Place, found: list[Pairs]) -> None:
    """The table, and a row of docs/benchmarks.md each."""
    device = torch.cuda.get_device_name() if place.device == "cuda" else "CPU"
    mode = ", deterministic" if args.deterministic else ""
    mode += ", slime's requests through SGLang's router" if args.router == "sglang" else ""
    print(f"\n{device}, {args.shape}{mode}, {args.prompt} in, {args.response} out, log-probs on; tokens/s (medians)")
    print(f"{'in flight':>9} {'requests':>8} {'raw':>9} {'slime':>9} {'slime/raw':>9}   spread of the ratio")
    for pairs in found:
        ratios = pairs.ratios()
        print(
            f"{pairs.in_flight:9} {pairs.requests:8} {statistics.median(pairs.raw):9,.0f} "
            f"{statistics.median(pairs.slime):9,.0f} {statistics.median(ratios):9.3f}   "
            f"{min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} pairs"
        )
    for pairs in found:
        ratios = pairs.ratios()
        what = f"rollout through slime over raw, {args.shape}, {pairs.in_flight} in flight{mode}"
        speeds = f"{statistics.median(pairs.slime):,.0f} of {statistics.median(pairs.raw):,.0f} tokens/s"
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"| {what} | at least 0.95 | {statistics.median(ratios):.3f} ({spread}); {speeds} |")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("4B", "0.6B", "tiny"), default="4B")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=3, help="pairs a number in flight")
    parser.add_argument("--waves", type=int, default=2, help="requests over those in flight; 1 above 256")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--mem-fraction", type=float, default=0.85, help="SGLang's mem_fraction_static")
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs: starts a minute sooner")
    parser.add_argument("--deterministic", action="store_true", help="rollout_deterministic; needs a GPU")
    parser.add_argument("--router", choices=("builtin", "sglang"), default="builtin", help="rollout_router")
    parser.add_argument("--folder", default="", help="where the model folder is made; default: a temporary one")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds until the whole run is given up")
    parser.add_argument("--smoke", action="store_true", help="the tiny model, short, on a CPU: it proves nothing")
    args = parser.parse_args()
    if args.smoke:
        args.shape, args.in_flight, args.rounds, args.prompt, args.response = "tiny", [8, 32], 2, 16, 32
    return args


def main() -> None:
    """Run and print."""
    args = parse()
    place = Place.to_measure(smoke=args.smoke)
    if place is None:
        return
    with tempfile.TemporaryDirectory(dir=scratch(10 << 30)) as made:
        begin = time.perf_counter()
        folder = make_folder(Path(args.folder or made) / "model", args.shape)
        print(f"  {args.shape} folder made in {time.perf_counter() - begin:.0f} s", flush=True)
        asyncio.run(asyncio.wait_for(bench(args, place, folder), args.limit))


if __name__ == "__main__":
    main()
