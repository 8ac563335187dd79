"""Invariant products against cuBLAS on a GPU, a line of JSON each: microseconds, their ratio, and the tile taken.

python tools/bench/bench_invariant.py                  # shapes of SmolLM2-135M and Qwen3-4B
python tools/bench/bench_invariant.py --tiles          # every tile, and whether it has the bits of the first
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch

from slime_core.kernels import linear_cuda

SMALL = (576, 960), (576, 3072), (1536, 576), (576, 49152)
LARGE = (2560, 6144), (4096, 2560), (2560, 19456), (9728, 2560)
SHAPES = [(rows, *shape) for rows, shapes in ((64, SMALL + LARGE), (256, SMALL + LARGE)) for shape in shapes]
SHAPES += [(25_000, *shape) for shape in SMALL[:3]] + [(8192, *shape) for shape in LARGE]
REPEATS = 20


def microseconds(function: Callable[[], torch.Tensor]) -> float:
    """Of one call, in a CUDA graph of several, so that launches do not count."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            function()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / REPEATS


def measured(rows: int, inputs: int, outputs: int, *, tiles: bool) -> dict[str, object]:
    """The figures of one shape."""
    x, weight = (torch.randn(count, inputs, device="cuda", dtype=torch.bfloat16) for count in (rows, outputs))
    cublas = microseconds(lambda: x @ weight.T)
    ours = microseconds(lambda: linear_cuda.product(x, weight, None))
    figures: dict[str, object] = {"rows": rows, "inputs": inputs, "outputs": outputs}
    figures |= {"cublas_us": round(cublas, 1), "us": round(ours, 1), "ratio": round(cublas / ours, 2)}
    figures["tflops"] = round(2 * rows * inputs * outputs / ours / 1e6)
    figures["tile"] = linear_cuda._tile(x, weight)
    if tiles:
        reference = linear_cuda._run(linear_cuda.TILES[0], x, weight, None)
        for tile in linear_cuda.TILES:
            same = torch.equal(linear_cuda._run(tile, x, weight, None), reference)
            spent = microseconds(lambda tile=tile: linear_cuda._run(tile, x, weight, None))  # type: ignore[misc]
            figures[f"{tile.rows}x{tile.outputs}x{tile.inputs}"] = [round(spent, 1), same]
    return figures


def main() -> None:
    """Print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU; nothing was measured")
        return
    for shape in SHAPES:
        print(json.dumps(measured(*shape, tiles=chosen.tiles)), flush=True)


if __name__ == "__main__":
    main()
