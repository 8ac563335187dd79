"""The embedded engine against SGLang's own server on the same GPU: tokens a second, and seconds to the first token.

    python tools/bench/bench_engine_vs_sglang.py                               # 135M, 0.6B, 4B; 64, 256 and 1,024
    python tools/bench/bench_engine_vs_sglang.py --shapes 4B --flights 256     # one row of it
    python tools/bench/bench_engine_vs_sglang.py --sides sglang                # one side: JSON lines

Random weights, 128 tokens in, 512 out, sampled at temperature 1 with log-probs. The embedded engine is asked as a run
asks it (`bench_gpu_engine.py`); SGLang by a bare HTTP loop that sends prepared bytes and reads the answers, without
parsing them. Each round has all requests in flight at once; the first one, which compiles and captures, does not
count. The time to the first token begins with the engine's process, imports included, or with the server's.
slime starts the server, as in a run, with dummy weights. SGLANG_SITE or SLIME_SGLANG_PYTHON says where SGLang is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from bench_gpu_engine import SHAPES, Folder
from sglang_place import NO_SGLANG, Place, serving

from slime_core.testing.models import char_tokenizer

ENGINE = Path(__file__).with_name("bench_gpu_engine.py")
GRAPHS = (1, 8, 32, 64, 128, 256, 512, 1024)
"""Batch sizes with a CUDA graph: those that are measured, and a few between them."""
Row = dict[str, Any]


def embedded(shape: str, chosen: argparse.Namespace) -> Iterator[Row]:
    """The embedded engine's lines."""
    sizes = ("--flights", *map(str, chosen.flights), "--rounds", str(chosen.rounds), "--device", chosen.device)
    words = (sys.executable, str(ENGINE), "--shapes", shape, *sizes, "--prompt", str(chosen.prompt))
    began = time.monotonic()
    with subprocess.Popen([*words, "--new", str(chosen.new)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            if "first_token_s" in row:
                row["first_token_s"] = round(time.monotonic() - began, 1)
            yield {"side": "embedded", **row}


def options(device: str, most: int) -> dict[str, Any]:
    """SGLang's options for ``most`` requests at once, beside those of `sglang_place`."""
    common = {"load_format": "dummy", "max_running_requests": most, "disable_radix_cache": True}
    if device == "cpu":
        return common
    graphs = [size for size in GRAPHS if size <= most]
    return common | {"mem_fraction_static": 0.85, "disable_piecewise_cuda_graph": True, "cuda_graph_bs": graphs}


async def served(shape: str, chosen: argparse.Namespace, place: Place, work: Path) -> list[Row]:
    """SGLang's lines."""
    began, folder = time.monotonic(), Folder(shape)
    folder.config.architectures = [type(folder.config).__name__.replace("Config", "ForCausalLM")]
    folder.config.dtype = "bfloat16"
    folder.config.save_pretrained(work / "model")
    char_tokenizer().save_pretrained(str(work / "model"))
    flags = ("--init-weights", "random", "--server-concurrency", str(max(chosen.flights)))
    config = place.config(work / "model", *flags, sglang=options(place.device, max(chosen.flights)))
    async with serving(config, work / "run", fixed=True) as server:
        headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
        connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=chosen.limit)
        async with aiohttp.ClientSession(server.url, connector=connector, timeout=limit, headers=headers) as session:
            await asked(session, folder.vocab_size, 1, chosen.prompt, 1)
            rows = [{"side": "sglang", "shape": shape, "first_token_s": round(time.monotonic() - began, 1)}]
            for count in chosen.flights:
                sizes = (count, chosen.prompt, chosen.new)
                seconds = [await asked(session, folder.vocab_size, *sizes) for _ in range(chosen.rounds)]
                speed = round(count * chosen.new / min(seconds[1:] or seconds))
                rows.append({"side": "sglang", "shape": shape, "in_flight": count, "tokens_per_s": speed})
                print(json.dumps(rows[-1]), flush=True)
            return rows


async def asked(session: aiohttp.ClientSession, vocab: int, count: int, prompt: int, new: int) -> float:
    """Seconds until ``count`` requests, all sent at once, have been answered."""
    sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    bodies = [
        json.dumps(
            {
                "input_ids": [random.randrange(3, vocab) for _ in range(prompt)],
                "sampling_params": sampling,
                "return_logprob": True,
            }
        )
        for _ in range(count)
    ]

    async def one(body: str) -> bytes:
        async with session.post("/generate", data=body) as answer:
            answer.raise_for_status()
            return await answer.read()

    began = time.perf_counter()
    read = await asyncio.gather(*map(one, bodies))
    seconds = time.perf_counter() - began
    meta = json.loads(read[-1])["meta_info"]
    assert (meta["completion_tokens"], len(meta["output_token_logprobs"])) == (new, new), meta["finish_reason"]
    return seconds


def table(rows: list[Row]) -> str:
    """Both sides, a line a shape and number in flight."""
    speed = {(r["side"], r["shape"], r["in_flight"]): r["tokens_per_s"] for r in rows if "in_flight" in r}
    first = {(r["side"], r["shape"]): r["first_token_s"] for r in rows if "first_token_s" in r}
    lines = ["| shape | in flight | embedded tokens/s | SGLang tokens/s | ratio | first token s, embedded | SGLang |"]
    lines.append("|" + " --- |" * 7)
    for shape, count in dict.fromkeys((shape, count) for _, shape, count in speed):
        ours, theirs = (speed.get((side, shape, count)) for side in ("embedded", "sglang"))
        ratio = f"{ours / theirs:.2f}" if ours and theirs else "-"
        begin = " | ".join(str(first.get((side, shape), "-")) for side in ("embedded", "sglang"))
        lines.append(f"| {shape} | {count} | {ours or '-'} | {theirs or '-'} | {ratio} | {begin} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["135M", "0.6B", "4B"], choices=SHAPES)
    parser.add_argument("--flights", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--sides", nargs="+", default=["embedded", "sglang"], choices=["embedded", "sglang"])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=300.0, help="Seconds that SGLang has for a round.")
    chosen = parser.parse_args()
    place = Place.find(chosen.device) if "sglang" in chosen.sides else None
    rows: list[Row] = []
    for shape in chosen.shapes:
        if "embedded" in chosen.sides:
            for row in embedded(shape, chosen):
                rows.append(row)
                print(json.dumps(row), flush=True)
        if "sglang" in chosen.sides and place is None:
            print(f"{NO_SGLANG}; not measured", file=sys.stderr)
        elif place is not None:
            with tempfile.TemporaryDirectory() as work:
                rows += asyncio.run(served(shape, chosen, place, Path(work)))
    print(table(rows))


if __name__ == "__main__":
    main()
