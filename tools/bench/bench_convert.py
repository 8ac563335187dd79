"""Conversion against the disk: `slime convert` beside a plain copy of the same bytes, on the same disk.

    python tools/bench/bench_convert.py --gb 8 --folder /data/bench          # the 4B model of docs/benchmarks.md
    python tools/bench/bench_convert.py --gb 1.5

Makes a Qwen3 of about that size from a seed. A copy reads and writes in pieces of 8 MiB with as many threads as
conversion has workers, and ends with fsync, as conversion does; the best of the rounds is the disk's speed. What the
system has in memory of files is given back before each. Each conversion is a process of its own; its peak memory is
beside what that process had when all modules were loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PIECE = 8 << 20
LAYER_PARAMETERS, VOCAB, HIDDEN = 100_930_816, 151936, 2560  # of Qwen3-4B


def main() -> int:
    """Print a line a figure, and all as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.5, help="of the model in bfloat16")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: a temporary one")
    parser.add_argument("--workers", type=int, default=min(8, max(2, os.cpu_count() or 1)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(given.child, given.workers)
    root = Path(tempfile.mkdtemp(prefix="bench-convert-", dir=given.folder))
    try:
        found = measure(root, given.gb, given.workers, given.rounds)
    finally:
        shutil.rmtree(root)
    print(json.dumps(found))
    return 0


def measure(root: Path, gb: float, workers: int, rounds: int) -> dict[str, Any]:
    """Every figure; speeds in GB/s of the model's bytes, memory in bytes."""
    model = make_model(root / "model", gb)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    found: dict[str, Any] = {"bytes": size, "workers": workers, "copy": [], "hf-to-dist": [], "dist-to-hf": []}
    print(f"{size / 1e9:.2f} GB, {workers} workers, {rounds} rounds")
    memory: list[float] = []
    for _ in range(rounds):
        found["copy"].append(size / timed(lambda: copy(model, root / "copy", workers), model) / 1e9)
        shutil.rmtree(root / "copy")
        for kind, source, target in (("hf-to-dist", model, root / "dist"), ("dist-to-hf", root / "dist", root / "hf")):
            forget(source.rglob("*"))
            said = run(kind, source, target, model, workers)
            found[kind].append(size / said["seconds"] / 1e9)
            memory.append(said["peak"] - said["before"])
        shutil.rmtree(root / "dist")
        shutil.rmtree(root / "hf")
    disk = max(found["copy"])
    print(f"copy {_all(found['copy'])} GB/s; the disk: {disk:.2f}")
    for kind in ("hf-to-dist", "dist-to-hf"):
        print(f"{kind} {_all(found[kind])} GB/s; the best is {max(found[kind]) / disk:.0%} of the disk")
    found["peak"] = max(memory)
    print(
        f"peak memory above the modules' own: {found['peak'] / 1e6:.0f} MB; "
        f"the largest tensor: {VOCAB * HIDDEN * 2 / 1e6:.0f} MB"
    )
    return found


def _all(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def make_model(folder: Path, gb: float) -> Path:
    """A Qwen3 folder of Qwen3-4B's shapes with as many layers as fill the size; values from a seed."""
    import torch
    from safetensors.torch import save_file

    layers = max(1, round((gb * 1e9 / 2 - VOCAB * HIDDEN) / LAYER_PARAMETERS))
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": 9728, "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True, "dtype": "bfloat16", "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "max_position_embeddings": 40960,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)

    index: dict[str, str] = {}
    shard = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    for n in range(layers):
        of, at = f"model.layers.{n}", f"model.layers.{n}.self_attn"
        shard |= {
            f"{of}.input_layernorm.weight": draw(HIDDEN), f"{of}.post_attention_layernorm.weight": draw(HIDDEN),
            f"{at}.q_proj.weight": draw(4096, HIDDEN), f"{at}.k_proj.weight": draw(1024, HIDDEN),
            f"{at}.v_proj.weight": draw(1024, HIDDEN), f"{at}.o_proj.weight": draw(HIDDEN, 4096),
            f"{at}.q_norm.weight": draw(128), f"{at}.k_norm.weight": draw(128),
            f"{of}.mlp.gate_proj.weight": draw(9728, HIDDEN), f"{of}.mlp.up_proj.weight": draw(9728, HIDDEN),
            f"{of}.mlp.down_proj.weight": draw(HIDDEN, 9728),
        }  # fmt: skip
        if sum(t.nbytes for t in shard.values()) > 700e6 or n == layers - 1:
            name = f"model-{n:05d}.safetensors"
            save_file(shard, folder / name, metadata={"format": "pt"})
            index |= dict.fromkeys(shard, name)
            shard = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def copy(source: Path, target: Path, workers: int) -> None:
    """Read and write every file, durably."""
    target.mkdir()

    def one(file: Path) -> None:
        buffer = memoryview(bytearray(PIECE))
        with file.open("rb", buffering=0) as read, (target / file.name).open("wb", buffering=0) as write:
            while count := read.readinto(buffer):
                write.write(buffer[:count])
            os.fsync(write.fileno())

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, sorted(source.glob("*.safetensors"))))


def timed(work: Callable[[], None], source: Path) -> float:
    """Seconds, with nothing of the source in memory."""
    forget(source.rglob("*"))
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def forget(files: Iterable[Path]) -> None:
    """Let the system drop what it has in memory of files."""
    os.sync()
    for file in files:
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def run(kind: str, source: Path, target: Path, model: Path, workers: int) -> dict[str, float]:
    """One conversion in a process of its own."""
    words = [sys.executable, __file__, "--workers", str(workers), "--child", kind, f"{source}:{model}", str(target)]
    said: dict[str, float] = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    return said


def child(words: list[str], workers: int) -> int:
    """What that process does."""
    import torch

    from slime_convert.folder_writing import How
    from slime_core.weights.folder import read_config
    from slime_megatron.convert.command import finder
    from slime_megatron.convert.conversion import dist_to_hf, hf_to_dist

    kind, sources, target = words
    source, model = map(Path, sources.split(":"))
    torch.set_num_threads(1)
    find = finder(())
    find(read_config(model))  # imports what there is to import
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.perf_counter()
    if kind == "hf-to-dist":
        hf_to_dist(source, Path(target), find, How(workers=workers))
    else:
        dist_to_hf(source, Path(target), model, find, How(workers=workers))
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {"seconds": seconds, "before": before, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
